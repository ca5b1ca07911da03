"""Notebooks executed in a real kernel, and the check that nothing is left over of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

from cellmesh.wire.ticket import runtime_root
from tests.conftest import LEFTOVER_S, is_started_under, kernel_config, own_runtime_dir

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCRIPTS = ROOT / "tests" / "exactness" / "scripts"


def script_of(notebook: Path) -> Path:
    """The hand-written script that trains as a notebook does; `tests/exactness` runs both, if it is
    there.
    """
    return SCRIPTS / f"{notebook.stem}.py"


@contextlib.contextmanager
def runtime_directory_of_a_test() -> Iterator[Path]:
    """A runtime directory: no process that was given it may be left, and no file in it but the list
    of modules to preload.
    """
    with own_runtime_dir() as directory:
        assert runtime_root() == directory / "cellmesh"
        yield directory
        _, running = psutil.wait_procs(_started_with(directory), timeout=LEFTOVER_S)
        assert running == []
        learned = directory / "cellmesh-preload"
        kept = {runtime_root(), learned, *learned.glob("*.json")}
        assert {*directory.rglob("*")} - kept == set()


def _started_with(directory: Path) -> list[psutil.Process]:
    """The processes with this runtime directory, or one in it, in their environment, orphans too,
    and those of meshes that were forked for it.
    """
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:  # it has just ended
            continue
        if environment.get("JUPYTER_RUNTIME_DIR", "").startswith(str(directory)) or (
            is_started_under(directory, environment)
        ):
            found.append(process)
    return found


def execute(notebook: nbformat.NotebookNode) -> None:
    """Execute a notebook in place, where its like lie, and check that it started a mesh and ended
    it.
    """
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
        config=kernel_config(),
    )
    meshes: list[Path] = []
    client.on_cell_executed = lambda **_: meshes.extend(runtime_root().glob("*"))
    client.execute()
    assert meshes, "the notebook started no mesh in the test's runtime directory"
    assert list(runtime_root().glob("*")) == []
