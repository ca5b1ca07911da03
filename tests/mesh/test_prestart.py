"""A zygote imports torch in a notebook's background, and meshes are forked from it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.controller.session.living import find_waiting
from cellmesh.wire.ticket import read_ticket, runtime_root
from tests.conftest import (
    check_nothing_left,
    process_named,
    processes_of,
    run_python,
    write_ipython_profile,
)

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
    return found


def origin(directory: Path, agent: psutil.Process | None = None) -> psutil.Process:
    """The process that the guardian of the mesh, or of the agent's, was forked from."""
    guardian = (agent or process_named(directory, "cellmesh-agent")).parent()
    assert guardian is not None
    forked_from = guardian.parent()
    assert forked_from is not None
    while "preload" in forked_from.cmdline()[0]:  # a copy, which serves in place of its parent
        forked_from = forked_from.parent()
        assert forked_from is not None
    return forked_from


def start(notebook: Notebook, options: str = "2") -> None:
    started = notebook.run(f"%dist_start {options}")
    assert started.status == "ok", started.errors()


def stop(notebook: Notebook) -> None:
    assert notebook.run("%dist_stop").status == "ok"


def command(*arguments: str) -> str:
    done = run_python("-m", "cellmesh", *arguments)
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
            shown = notebook.run(
                "%%dist\nimport os, sys, mine\n"
                "print('sched' in sys.modules, os.getcwd())\n"
                "print(mine.x, sys.path[0])"
            )
            assert shown.text() == f"[0-1] True {inner}\n[0-1] 3 {inner}\n"
            assert notebook.run("%dist_restart").status == "ok"
            # A second mesh in this kernel.
            notebook.run("import cellmesh as cm; other = cm.start(1)")
            name = notebook.run("print(other.name)").text().strip()
            assert origin(runtime_dir, agent_of(name)) == zygote
            assert notebook.run("print(other.pull('rank').list)").text() == "[0]\n"
            assert command("ps").count("running") == 2
            notebook.run("other.stop()")
            stop(notebook)
            running = set(processes_of(runtime_dir))
            assert running.difference(zygote.children(recursive=True)) == {zygote}
        assert f"process {zygote.pid} waits for the next mesh" in command("ps")
        assert f"stopped process {zygote.pid}, which waited" in command("stop", "--all")
        wait_for_end(zygote)
        assert command("ps") == "no mesh is running\n"
        start(notebook)  # from another one
        assert origin(runtime_dir) == waiting() != zygote
        zygote = waiting()
        assert notebook.run("%unload_ext cellmesh").status == "ok"
        wait_for_end(zygote)


def test_zygote_is_replaced_where_its_environment_has_changed(
    runtime_dir: Path, tmp_path: Path
) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        old = waiting()
        notebook.run("import os\nos.environ['MY_OWN'] = '1'")
        start(notebook)
        wait_for_end(old)
        new = waiting()
        assert origin(runtime_dir) == new != old
        seen = notebook.run("%%dist\nimport os\nprint(os.environ.get('MY_OWN'))").text()
        assert seen == "[0-1] 1\n"
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


def agent_of(name: str) -> psutil.Process:
    return psutil.Process(read_ticket(runtime_root() / name / "ticket.json").agent_pid)


@pytest.mark.usefixtures("starts_cold")
def test_the_next_mesh_of_a_script_is_forked_from_a_mesh_and_outlives_it(runtime_dir: Path) -> None:
    visible = "__import__('os').environ.get('CUDA_VISIBLE_DEVICES')"
    first = cm.start(1, name="first")
    second = cm.start(1, name="second", gpus="none")
    assert find_waiting(runtime_root()) == []
    assert agent_of("first") in agent_of("second").parents()
    assert [mesh.pull(visible).list for mesh in (first, second)] == [[None], [""]]
    second.cell("kept = 2")
    first.restart()
    command("stop", "first")
    assert first.rank_set.session.ending
    third = cm.start(1, name="third")
    assert agent_of("second") in agent_of("third").parents()
    third.cell("kept = 3")
    assert second.pull("kept").list == [2]
    for process in (agent_of("second"), agent_of("second").parent()):
        assert process is not None
        process.kill()
    assert third.pull("kept").list == [3]
    third.stop()
    second.stop()


def test_nothing_is_left_of_the_meshes_of_a_killed_script(runtime_dir: Path) -> None:
    source = "import cellmesh as cm\nfor _ in 'ab': cm.start(1)\nprint(len(cm.meshes))\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", source], **pipes) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "2\n"
        script.kill()


@pytest.mark.parametrize("stage", ["importing", "kept"])
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
            stop(notebook)
        zygote = waiting()
        psutil.Process(zygote.ppid()).kill()
        wait_for_end(zygote)
        check_nothing_left(runtime_dir)
        child.kill()


def test_the_next_start_works_whichever_was_killed(runtime_dir: Path, tmp_path: Path) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        first = waiting()
        first.kill()  # while it imports
        wait_for_end(first)
        for victim in ("agent", "zygote"):
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
            assert origin(runtime_dir) == waiting() != first
            assert notebook.run("%%dist\nprint(rank >= 0)").text() == "[0-1] True\n"
            stop(notebook)
            assert set(processes_of(runtime_dir)) - set(waiting().children()) == {waiting()}
