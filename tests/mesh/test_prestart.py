"""A zygote imports torch in a notebook's background, and meshes are forked from it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.cli.meshes import find_waiting
from cellmesh.wire import marks
from cellmesh.wire.ticket import find_tickets, runtime_root
from tests.conftest import check_nothing_left, process_named, processes_of, write_ipython_profile

from .test_kernel import Notebook, open_notebook

WAIT_S = 60.0


@contextlib.contextmanager
def prestarting(folder: Path, keep_s: float = 600.0) -> Iterator[Notebook]:
    """A notebook in a folder, whose kernel has loaded the extension; what it has left is looked
    for.
    """
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        write_ipython_profile(folder / "ipython", keep_s)
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        with open_notebook(folder) as notebook:
            loaded = notebook.run("%load_ext cellmesh")
            assert (loaded.status, loaded.messages[2:]) == ("ok", []), loaded
            yield notebook
    check_nothing_left(Path(os.environ["JUPYTER_RUNTIME_DIR"]))


def waiting() -> psutil.Process:
    """The zygote that waits."""
    (found,) = find_waiting(runtime_root())
    return psutil.Process(found.pids[0])


def origin(directory: Path) -> psutil.Process:
    """The process that the mesh's guardian was forked from."""
    guardian = process_named(directory, "cellmesh-agent").parent()
    assert guardian is not None
    forked_from = guardian.parent()
    assert forked_from is not None
    return forked_from


def start(notebook: Notebook, options: str = "2") -> None:
    started = notebook.run(f"%dist_start {options}")
    assert started.status == "ok", started.errors()


def stop(notebook: Notebook) -> None:
    assert notebook.run("%dist_stop").status == "ok"


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cellmesh", *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def wait_for_end(process: psutil.Process) -> None:
    assert not psutil.wait_procs([process], timeout=WAIT_S)[1]


def test_mesh_of_a_prestarted_zygote_has_the_directory_and_path_of_its_start(
    runtime_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "notebook"
    inner = folder / "inner"
    inner.mkdir(parents=True)
    for name in ("random", "numpy"):  # which are beside the notebook
        (folder / f"{name}.py").write_text("raise RuntimeError('imported')")
    (inner / "mine.py").write_text("x = 3")
    with prestarting(folder) as notebook:
        zygote = waiting()
        assert zygote.name() != "cellmesh-zygote"
        notebook.run(f"import os, sys\nsys.path.insert(0, {str(inner)!r})\nos.chdir('inner')")
        for _ in range(2):
            start(notebook, "2 --preload sched")  # as early as can be: it may import still
            assert origin(runtime_dir) == zygote == waiting()
            new = notebook.run(
                "%%dist\nimport sys\nprint([*sys.modules][[*sys.modules].index('sched') + 1 :])"
            )
            # Since the zygote was ready; each rank would do it by itself.
            assert new.text() == "[0-1] []\n"
            shown = notebook.run(
                "%%dist\nimport os, sys, mine\n"
                "print('sched' in sys.modules, os.getcwd())\n"
                "print(mine.x, sys.path[0])"
            )
            assert shown.text() == f"[0-1] True {inner}\n[0-1] 3 {inner}\n"
            (ticket,) = find_tickets(runtime_root())
            marked = {
                psutil.Process(pid).name() for pid in marks.carriers(marks.value_of(ticket.mark))
            }
            assert marked == {"cellmesh-zygote", "cellmesh-store", "cellmesh-r0", "cellmesh-r1"}
            assert notebook.run("%dist_restart").status == "ok"
            # A second mesh in this kernel.
            notebook.run("import cellmesh as cm; other = cm.start(1)")
            assert notebook.run("print(other.pull('rank').list)").text() == "[0]\n"
            table = command("ps").splitlines()
            assert sorted(line.split()[1] for line in table[1:]) == [
                "running",
                "running",
                "waiting",
            ]
            notebook.run("other.stop()")
            stop(notebook)
            assert processes_of(runtime_dir) == [zygote]
        assert f"zygote-of-{zygote.ppid()}  waiting" in command("ps")
        assert f"stopped zygote-of-{zygote.ppid()}: it waited" in command("stop", "--all")
        wait_for_end(zygote)
        assert command("ps") == "no mesh is running\n"
        start(notebook)  # from another one
        assert origin(runtime_dir) == waiting() != zygote
        zygote = waiting()
        assert notebook.run("%unload_ext cellmesh").status == "ok"
        wait_for_end(zygote)


def test_a_zygote_that_is_idle_imports_what_models_need(runtime_dir: Path, tmp_path: Path) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        deadline, shown = time.monotonic() + WAIT_S, ""
        while "set()" not in shown:
            assert time.monotonic() < deadline, shown
            start(notebook, "1")
            shown = notebook.run(
                "%%dist\nimport sys\n"
                "print({'torch.distributed.tensor', 'torch.distributed.fsdp'} - {*sys.modules})"
            ).text()
            stop(notebook)
            threading.Event().wait(1)  # in which nobody asks the zygote for a mesh


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['MY_OWN'] = '1'",
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    ],
)
def test_zygote_is_replaced_where_its_environment_has_changed(
    change: str, runtime_dir: Path, tmp_path: Path
) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        old = waiting()
        if "RLIMIT" in change:  # or it may be so already
            notebook.run("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 1))")
        notebook.run(f"import os\n{change}")
        start(notebook)
        wait_for_end(old)
        assert origin(runtime_dir) == waiting() != old
        seen = notebook.run(
            "%%dist\nimport os, resource\nprint(os.environ.get('MY_OWN'), "
            "resource.getrlimit(resource.RLIMIT_CORE))"
        ).text()
        assert seen.startswith("[0-1] 1" if "MY_OWN" in change else "[0-1] None (0, 0)")
        new = waiting()
        stop(notebook)
        start(notebook)
        assert origin(runtime_dir) == new
        stop(notebook)


def test_unused_zygote_ends_after_its_time(runtime_dir: Path, tmp_path: Path) -> None:
    with prestarting(tmp_path / "notebook", keep_s=0.1) as notebook:
        wait_for_end(waiting())
        start(notebook)
        assert notebook.run("%%dist\nrank").status == "ok"
        kept = origin(runtime_dir)
        assert kept == waiting()
        stop(notebook)
        wait_for_end(kept)


@pytest.mark.parametrize("option", ["prestart = false", "nonsense ="])
def test_prestart_can_be_switched_off(option: str, runtime_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "notebook"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(f"[tool.cellmesh]\n{option}\n")
    with prestarting(folder) as notebook:
        assert find_waiting(runtime_root()) == []
        if "nonsense" in option:
            assert "pyproject.toml" in notebook.run("%dist_start 2").errors()[0]["evalue"]
            return
        start(notebook)
        stop(notebook)
        assert processes_of(runtime_dir) == []


def test_a_script_has_none(runtime_dir: Path) -> None:
    with cm.start(1):
        assert find_waiting(runtime_root()) == []
    check_nothing_left(runtime_dir)


def test_an_import_that_fails_is_shown_by_the_start(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = tmp_path / "path" / "torch.py"
    torch.parent.mkdir()
    torch.write_text("raise ImportError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", str(torch.parent))
    with prestarting(tmp_path / "notebook") as notebook:
        for _ in range(2):
            failed = notebook.run("%dist_start 2")
            assert "this torch is broken" in failed.errors()[0]["evalue"]


@pytest.mark.parametrize("stage", ["importing", "running", "kept"])
def test_no_zygote_is_left_when_the_kernel_is_killed(
    stage: str, runtime_dir: Path, tmp_path: Path
) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        # What the kernel has forked holds its connection to the zygote, and outlives it.
        held = notebook.run(
            "import os, signal\nif (pid := os.fork()) == 0:\n    os.setsid(); "
            "signal.pause()\nprint(pid)"
        )
        child = psutil.Process(int(held.text()))
        if stage != "importing":
            start(notebook, "2 --lease 0")
        if stage == "kept":
            stop(notebook)
        zygote = waiting()
        psutil.Process(zygote.ppid()).kill()
        wait_for_end(zygote)
        check_nothing_left(runtime_dir)
        child.kill()


@pytest.mark.parametrize("victim", ["waits", "guard", "agent", "zygote"])
def test_the_next_start_works_whichever_was_killed(
    victim: str, runtime_dir: Path, tmp_path: Path
) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        first = waiting()
        if victim == "waits":
            first.kill()  # while it imports
            wait_for_end(first)
        start(notebook)
        killed = process_named(runtime_dir, f"cellmesh-{victim}")
        killed.kill()
        wait_for_end(killed)
        if victim == "agent":
            notebook.run("%%dist\nrank")
        else:
            assert notebook.run("%%dist\nprint(rank >= 0)").text() == "[0-1] True\n"
            stop(notebook)
        start(notebook)
        assert origin(runtime_dir) == waiting()
        assert (waiting() == first) == (victim != "waits")
        assert notebook.run("%%dist\nprint(rank >= 0)").text() == "[0-1] True\n"
        stop(notebook)
        assert processes_of(runtime_dir) == [waiting()]
