"""`%dist_export`, `%dist_seed` and `%%dist --time` in a kernel; exported scripts under torchrun."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellmesh.wire.ranks import parse_ranks
from tests.conftest import check_nothing_left, clean_runtime_dir
from tests.mesh.test_kernel import Notebook, open_notebook, plain

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with clean_runtime_dir() as directory, open_notebook() as opened:
        assert opened.run("%load_ext cellmesh\n%dist_start 2").status == "ok"
        yield opened
        assert opened.run("%dist_stop").status == "ok"
        check_nothing_left(directory)


def torchrun(script: Path) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        [*command, "--nproc-per-node", "2", str(script)],
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output


def test_a_script_does_what_the_cells_did(notebook: Notebook, tmp_path: Path) -> None:
    path, state = tmp_path / "train.py", tmp_path / "state"
    for cell in (
        "%dist_restart",
        "lr = 0.5\n%dist_push lr",
        "%dist_seed 3 --per-rank",
        "%%dist\nmodel = torch.nn.Linear(3, 1)\nopt = torch.optim.SGD(model.parameters(), lr=lr)",
        "%%dist\nloss = model(torch.rand(4, 3)).sum()\nloss.backward()\nopt.step()",
        "%%dist\ndist.all_reduce(loss.detach_())",
        "%%dist\nkept = rank + 7",
        f"%dist_save model opt kept {state}",
        "%%dist\nkept = None",
        f"%dist_load {state}",
        "%%dist --ranks 1\nextra = '''a\n  b'''",
        "%dist_auto on",
        "f'{loss.item().hex()} {kept} {model.bias.item().hex()}'",
        "%dist_auto off",
        "%dist_sync model",
        "x = 1",
        "%dist_status",
    ):
        outcome = notebook.run(cell)
        assert outcome.status == "ok", outcome.errors()
        if "hex" in cell:
            by_cell = outcome.text()
    assert notebook.run("%%dist\nif rank == 0:\n    raise ValueError").status == "error"
    said = notebook.run(f"%dist_export {path}").text()
    assert said.startswith(f"{path}: 7 cells, 1 left out (In [")
    assert "a script has nothing like `%dist_sync model`" in said
    assert "--force" in plain(notebook.run(f"%dist_export {path}").errors()[0]["evalue"])
    shutil.rmtree(state)
    status, output = torchrun(path)
    assert status == 0, output
    assert sorted(re.findall(r"\[\d\] '[^']*'", output)) == expand(by_cell)
    assert (state / ".metadata").exists()


def expand(folded: str) -> list[str]:
    """Lines of the notebook, one a rank."""
    return sorted(
        f"[{rank}] {value}"
        for ranks, value in re.findall(r"\[([\d-]+)\] ('[^']*')", folded)
        for rank in parse_ranks(ranks, 2)
    )


def test_a_straggler_is_named(notebook: Notebook) -> None:
    outcome = notebook.run(
        "%%dist --time\nimport time\nif rank == 1:\n    "
        "time.sleep(0.5)\ndist.all_reduce(torch.ones(1))"
    )
    said = outcome.text()
    assert said.count("of it in collectives") == 2
    assert "rank 1 was the straggler: " in said


def test_seeds_are_equal_or_each_its_own(notebook: Notebook) -> None:
    draw = "%%dist\nimport random, numpy\nrandom.random(), numpy.random.rand(), torch.rand(1)"
    drawn = [
        notebook.run(seed).text() + notebook.run(draw).text()
        for seed in ("%%dist\nimport numpy", *["%dist_seed 7"] * 2, "%dist_seed 7 --per-rank")
    ]
    assert drawn[1] == drawn[2]
    assert drawn[1].startswith("seeded random, numpy, torch with 7\n[0-1] (")
    assert "with 7 + rank\n[0] (" in drawn[3]
