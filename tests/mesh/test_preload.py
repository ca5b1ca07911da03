"""Modules that ranks have in common are imported once, by the process that they are forked from."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from cellmesh.controller.session.living import find_waiting
from cellmesh.wire.preload import read_preloads
from cellmesh.wire.ticket import runtime_root
from tests.conftest import check_nothing_left

from .test_prestart import prestarting, start, stop

WAIT_S = 100.0
FIRST_STEP = """%%dist
import sys
before = set(sys.modules)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
print(sorted(set(sys.modules) - before))
"""
SLOW = "import time\ntime.sleep(0.05)\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, from which this test's processes import."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")
    return folder


def wait_until_loaded() -> psutil.Process:
    """Wait until the waiting process, or a copy in its place, has all of its modules."""
    (process,) = find_waiting(runtime_root())
    deadline = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline, "the modules were not loaded"
        for copy in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if copy.cmdline()[:1] == ["cellmesh-preloaded-all"]:
                    return copy
        psutil.wait_procs(process.children(), timeout=0.05)


def test_first_cells_import_nothing_that_torch_has(runtime_dir: Path, tmp_path: Path) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        copy = wait_until_loaded()
        start(notebook)
        assert notebook.run(FIRST_STEP).text() == "[0-1] []\n"
        stop(notebook)
        # What serves is killed, and the process that it has replaced serves again.
        copy.kill()
        psutil.wait_procs([copy], timeout=WAIT_S)
        start(notebook)
        assert notebook.run("%%dist\nimport sys").status == "ok"
        stop(notebook)


def test_modules_that_all_ranks_import_are_there_in_the_next_kernel(
    runtime_dir: Path, tmp_path: Path, packages: Path
) -> None:
    for name in ("of_all", "of_one", "prints_once"):
        (packages / f"{name}.py").write_text(SLOW)
    own = tmp_path / "project"
    own.mkdir()
    (own / "pyproject.toml").write_text("")
    (own / "mine.py").write_text(f"{SLOW}import of_all")
    to_project = f"import sys; sys.path.insert(0, {str(own)!r})"
    first = "%%dist --time\nimport mine\nif rank == 0: import of_one\nimport prints_once"
    names = ("mine", "of_all", "of_one", "prints_once")
    have = f"%%dist\nimport sys\nprint([name for name in {names} if name in sys.modules])"
    with prestarting(own / "first") as notebook:
        notebook.run(to_project)
        start(notebook)
        assert notebook.run(have).text() == "[0-1] []\n"
        assert " ms in imports" in notebook.run(first).text()
        stop(notebook)
    (path,) = (runtime_dir / "cellmesh-preload").glob("*.json")
    assert [each.name for each in read_preloads(path).modules] == ["of_all", "prints_once"]
    (packages / "prints_once.py").write_text("print('hello')")
    with prestarting(own / "second") as notebook:
        wait_until_loaded()
        start(notebook)
        assert notebook.run(have).text() == "[0-1] ['of_all']\n"
        shown = str(notebook.run("%dist_status --debug").messages)
        assert "parts of torch and 1 modules that this project's ranks import (of_all)" in shown
        assert "not preloaded: prints_once, which prints" in shown
        stop(notebook)


def test_preload_of_nothing_imports_torch_only(
    runtime_dir: Path, tmp_path: Path, packages: Path
) -> None:
    (packages / "of_all.py").write_text(SLOW)
    own = tmp_path / "notebook"
    own.mkdir()
    (own / "pyproject.toml").write_text("[tool.cellmesh]\npreload = []")
    with prestarting(own) as notebook:
        start(notebook)
        notebook.run("%%dist\nimport of_all")
        seen = notebook.run("%%dist\nimport sys\nprint('torch.distributed.fsdp' in sys.modules)")
        assert seen.text() == "[0-1] False\n"
        shown = str(notebook.run("%dist_status --debug").messages)
        assert "nothing was imported before the fork but torch" in shown
        stop(notebook)
    assert not (runtime_dir / "cellmesh-preload").exists()


def test_a_script_has_what_its_last_run_imported(
    runtime_dir: Path, tmp_path: Path, packages: Path
) -> None:
    (packages / "of_all.py").write_text(SLOW)
    (packages / "ends.py").write_text(SLOW)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
            import json, sys
            import cellmesh as cm

            def imports(is_again):
                had = [name for name in ("of_all", "ends") if name in sys.modules]
                import of_all
                if not is_again:
                    import ends
                return had

            if __name__ == "__main__":
                with cm.start(2) as mesh:
                    print(json.dumps(mesh.run(imports, "again" in sys.argv).list))
            """)
    )

    def run(*arguments: str) -> list[list[str]]:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr
        seen: list[list[str]] = json.loads(done.stdout)
        return seen

    assert run() == [[], []]
    assert run() == [["of_all", "ends"]] * 2
    (packages / "ends.py").write_text("import os; os._exit(0)")
    assert run("again") == [["of_all"]] * 2
    check_nothing_left(runtime_dir)
