"""The same program cell by cell, as the script that `%dist_export` wrote, and as a person writes
it, run as torchrun does and by ``cellmesh run``.

Each leaves a list `losses` on every rank; they must be equal bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from tests.conftest import clean_runtime_dir, write_ipython_profile
from tests.exactness.comparing import Losses, difference
from tests.exactness.launcher import TIMEOUT_S, launcher, results_of
from tests.exactness.launching import EXACT, Job
from tests.notebooks.kernels import NOTEBOOKS, ROOT, execute, runtime_directory_of_a_test, script_of
from tests.support.shared_prestart import lending

PAIRS = [(path, script_of(path)) for path in NOTEBOOKS if script_of(path).exists()]
# Of a notebook that trains for longer than a test may, and reads this from the environment.
NUM_STEPS = 6
# What scripts import that takes each rank long.
MODULES = ("torch.distributed.checkpoint", "torch.distributed.optim")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of all ways to run a program, and the environment that they share.
    Kernels have their meshes forked from a zygote with this environment.
    """
    directory = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # As a person would run all three; the number of threads decides in which order a sum is
        # added up.
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("NOTEBOOK_STEPS", str(NUM_STEPS))
        patch.setenv("TMPDIR", str(directory))
        # These are torch's own, and stay.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        ipython = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        write_ipython_profile(ipython)
        patch.setenv("IPYTHONDIR", str(ipython))
        stack.enter_context(lending(ipython))
        yield directory


@pytest.fixture(scope="module")
def launch(temporary: Path) -> Iterator[Callable[[Job], Losses]]:
    """What runs scripts as torchrun does, where notebooks are run."""
    with launcher(ROOT / "notebooks", *MODULES) as launched:
        yield launched


@pytest.fixture(scope="module")
def shells(temporary: Path) -> Iterator[Path]:
    """The runtime directory of all ``cellmesh run``, which are forked from the first one's
    zygote.
    """
    with clean_runtime_dir() as directory:
        yield directory


@pytest.fixture(autouse=True)
def runtime_directory() -> Iterator[Path]:
    with runtime_directory_of_a_test() as directory:
        yield directory


ONE = {0: [1.0, math.nan], 1: [0.5]}


@pytest.mark.parametrize(
    ("by_hand", "text"),
    [
        (ONE, ""),
        ({0: [1.0, math.nan], 1: [0.5, 2.0]}, "step 1 on rank 1: None by cell, 2.0 by hand"),
        ({**ONE, 1: [math.nextafter(0.5, 1)]}, "step 0 on rank 1: 0.5 by cell, 0.5000000000000001"),
        ({0: [1.0, math.nan]}, "by cell has ranks [0, 1], by hand [0]"),
    ],
)
def test_the_first_step_that_differs_is_named(by_hand: Losses, text: str) -> None:
    found = difference("by cell", ONE, "by hand", by_hand)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_every_script_has_its_notebook() -> None:
    scripts = {path.stem for path in (ROOT / "tests" / "exactness" / "scripts").glob("*.py")}
    assert scripts == {path.stem for path, _ in PAIRS}


@pytest.mark.parametrize(("path", "script"), PAIRS, ids=[path.stem for path, _ in PAIRS])
def test_losses_are_equal_bit_for_bit(
    path: Path,
    script: Path,
    launch: Callable[[Job], Losses],
    shells: Path,
    tmp_path: Path,
    temporary: Path,
) -> None:
    exported = tmp_path / "exported.py"
    by_cell = run_notebook(path, exported)
    assert by_cell, "the notebook left no losses"
    assert all(losses for losses in by_cell.values()), "there is a rank without losses"
    subprocess.run([sys.executable, "-m", "py_compile", str(exported)], check=True, timeout=60)
    assert not re.search(r"(?m)^\s*(import|from)\s+cellmesh", exported.read_text())
    scripts = {"in the hand-written script": script, "in the exported script": exported}
    for number, (name, launched) in enumerate(scripts.items()):
        folder = tmp_path / f"losses_{number}"
        folder.mkdir()
        by_script = launch(Job(str(launched), str(folder), len(by_cell)))
        assert not (parted := difference("cell by cell", by_cell, name, by_script)), parted
    by_command = run_by_command(script, tmp_path, len(by_cell), shells)
    assert not (parted := difference("cell by cell", by_cell, "by command", by_command)), parted
    assert list(temporary.iterdir()) == [], "something has left its temporary files"


def run_by_command(script: Path, folder: Path, num_ranks: int, shells: Path) -> Losses:
    """Run a script by ``cellmesh run``, with lines that write its losses."""
    path = f"pathlib.Path({str(folder)!r}, os.environ['RANK'] + '.json')"
    copy = folder / script.relative_to(ROOT)
    copy.parent.mkdir(parents=True)
    (folder / "notebooks").symlink_to(ROOT / "notebooks")  # whose data it reads
    leave = f"import json, os, pathlib; {path}.write_text(json.dumps({EXACT}))"
    copy.write_text(f"{script.read_text()}\n{leave}\n")
    done = subprocess.run(
        [sys.executable, "-m", "cellmesh", "run", "-n", str(num_ranks), copy],
        cwd=ROOT / "notebooks",
        env={**os.environ, "JUPYTER_RUNTIME_DIR": str(shells)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return results_of(folder, num_ranks)


def run_notebook(path: Path, exported: Path) -> Losses:
    """Run a notebook cell by cell; on the way it is exported, and its losses are brought here.

    That is before the cell with the tag `export-here`, which a notebook of two meshes has, or else
    before the last one.
    """
    notebook = nbformat.read(path, as_version=4)
    tagged = [
        i for i, cell in enumerate(notebook.cells) if "export-here" in cell.metadata.get("tags", ())
    ]
    (place,) = tagged or [len(notebook.cells) - 1]
    kept = exported.with_suffix(".json")
    added = (
        f"%dist_export {exported}",
        "%dist_pull losses --all --as exact_losses",
        "import json, pathlib\n"
        "exact = {rank: [float(x).hex() for x in each] for rank, each in exact_losses.items()}\n"
        f"_ = pathlib.Path({str(kept)!r}).write_text(json.dumps(exact))",
    )
    notebook.cells[place:place] = [new_code_cell(source) for source in added]
    execute(notebook)
    losses = json.loads(kept.read_text())
    return {int(rank): [float.fromhex(loss) for loss in each] for rank, each in losses.items()}
