"""Programs of torch and of libraries: as cells, with a failure in a step, exported, and as scripts
of torchrun and of ``cellmesh run``, all equal bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exactness.comparing import Losses, difference
from tests.exactness.launching import EXACT, Job
from tests.mesh.test_kernel import Notebook, plain
from tests.programs import test_pressed
from tests.programs.running import FAULTS, SCRIPTS, STEPS, Program, job_of

pytestmark = pytest.mark.timeout(200)

# What takes long to import: the mesh's zygote and the launcher import it once.
MODULES = ("lightning", "accelerate", "transformers")
PROGRAMS = [
    Program("ddp_example"),
    Program("fsdp1"),
    Program("gpt_configurator", argv=("--max_iters=4", "--n_layer=2")),
    Program("dcp_checkpoint"),
    Program("lightning_trainer"),
    ACCELERATE := Program("accelerate_example"),
    Program("hf_trainer"),
    Program("hsdp", num_ranks=4),
    # On trainer 0, whose answer is waited for first: were it trainer 1, trainer 0 would wait for
    # it, and all for trainer 0, until RPC's time-out, as in any script.
    Program("rpc_ddp", fault="forward", count=3, rank=0, num_ranks=4),
]


def begin(notebook: Notebook, cell: str) -> str:
    """Run a cell that is to succeed; what it printed."""
    outcome = notebook.run(cell)
    errors = [plain(error["evalue"]) for error in outcome.errors()]
    said = (cell[:200], *errors, outcome.text(), outcome.text("stderr"))
    assert outcome.status == "ok", "\n".join(said)
    return outcome.text()


def run_as_cells(
    program: Program, notebook: Notebook, folder: Path, is_disturbed: bool = False
) -> Losses:
    """Run a program's cells on fresh ranks in a folder, struck by its failure or not."""
    folder.mkdir()
    begin(notebook, f"%dist_restart\nimport os\nmesh.run(os.chdir, {str(folder)!r})\n{FAULTS}")
    options = f"--argv '{' '.join(program.argv)}'" if program.argv else ""
    for mark, text in program.cells():
        cell = f"%%dist {options}\n{text}"
        if mark == STEPS and is_disturbed:
            begin(notebook, f"mesh[{program.rank}].run(strike_{program.fault}, {program.count})")
            outcome = notebook.run(cell)
            assert outcome.status == "error", "the failure did not strike"
            assert "injected" in json.dumps(outcome.messages), outcome.errors()
        begin(notebook, cell)
    return results_of(notebook)


def run_as_script(program: Program, notebook: Notebook, folder: Path) -> Losses:
    """Run a program as ``cellmesh run`` does, on fresh ranks in a folder."""
    folder.mkdir()
    script = f"{str(program.script)!r}, {program.argv}, keeps=True"
    begin(
        notebook,
        f"%dist_restart\nimport importlib, os\nmesh.run(os.chdir, {str(folder)!r})\n"
        # Exported scripts, which quote these lines, are searched for the package's name.
        "scripts = importlib.import_module(type(mesh).__module__.replace('.mesh', '.rank_set'))\n"
        f"scripts.submit_script(mesh.rank_set, {script}).result()",
    )
    return results_of(notebook)


def results_of(notebook: Notebook) -> Losses:
    """Return what each rank of a notebook's mesh has computed."""
    begin(notebook, f"%dist_pull {EXACT} --all --as exact")
    said = begin(notebook, "import json\nprint(json.dumps(dict(exact)))")
    return {int(rank): list(map(float.fromhex, each)) for rank, each in json.loads(said).items()}


def test_program(
    program: Program,
    notebook_of: Callable[[int], Notebook],
    launch: Callable[[Job], Losses],
    tmp_path: Path,
) -> None:
    notebook = notebook_of(program.num_ranks)
    by_cells = run_as_cells(program, notebook, tmp_path / "cells")
    assert any(by_cells.values()), "the program left no losses"
    exported = tmp_path / "exported.py"
    said = begin(notebook, f"%dist_export {exported}")
    assert "left out" not in said, said
    assert "cellmesh" not in exported.read_text()

    ways = {
        "as a script of `cellmesh run`": run_as_script(program, notebook, tmp_path / "run"),
        "as a script": launch(job_of(program, tmp_path / "script")),
        "as the exported script": launch(job_of(program, tmp_path / "other", exported)),
        "after a failure": run_as_cells(program, notebook, tmp_path / "disturbed", True),
    }
    differences = [difference("as cells", by_cells, way, each) for way, each in ways.items()]
    assert not any(differences), "\n".join(filter(None, differences))


def test_accelerate_runs_again_after_its_end(
    notebook_of: Callable[[int], Notebook], tmp_path: Path
) -> None:
    notebook = notebook_of(ACCELERATE.num_ranks)
    first = run_as_cells(ACCELERATE, notebook, tmp_path / "cells")
    # `end_training` has destroyed the group, and accelerate does not make it again.
    cells = [f"%%dist\n{text}" for _, text in ACCELERATE.cells()]
    begin(notebook, cells[0])
    outcome = notebook.run(cells[1])
    said = "\n".join(plain(line) for each in outcome.errors() for line in each["traceback"])
    assert (
        "`dist.init_process_group()` in a cell on all ranks brings the mesh's groups back" in said
    )
    begin(notebook, "%%dist\ndist.init_process_group()")
    for cell in cells:
        begin(notebook, cell)
    assert results_of(notebook) == first


def test_every_script_is_run() -> None:
    names = {path.stem for path in SCRIPTS.glob("*.py")}
    assert names == {program.name for program in (*PROGRAMS, *test_pressed.PROGRAMS)}
