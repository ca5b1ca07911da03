"""What becomes of a mesh when its notebook's kernel, or its terminal, ends."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from cellmesh.controller.session.attach import attach
from cellmesh.controller.session.living import living_meshes
from cellmesh.wire.ticket import read_holder, read_ticket, runtime_root
from tests.conftest import LEFTOVER_S, check_nothing_left, kernel_config

from .test_kernel import Notebook, open_notebook

_BUSY = "%%dist --nowait\nimport time\ntime.sleep(600)"
# Threads, exit handlers and a main thread that take longer than Jupyter waits for a kernel that it
# ends.
_SLOW_THREAD = (
    "import threading; threading.Thread(target=threading.Event().wait, args=(60,)).start()"
)
_SLOW_EXIT = "import atexit, time; atexit.register(time.sleep, 60)"
_DEAF = """\
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)"""


def _check_lives_on(directory: Path) -> None:
    """Fail unless a mesh lives whose controller has gone, and end it."""
    (name,) = living_meshes()
    ticket = read_ticket(runtime_root() / name / "ticket.json")
    deadline = time.monotonic() + LEFTOVER_S
    while (holder := read_holder(ticket)) is None or holder.is_attached:
        assert time.monotonic() < deadline, holder
    with attach(name) as mesh:
        for run in mesh.runs:
            assert run.cancel()
        assert mesh.pull("rank") == {0: 0, 1: 1}
    check_nothing_left(directory)


@pytest.mark.parametrize(
    ("start", "cell", "end", "lives_on"),
    [
        ("", "%%dist\nx = 1", "shutdown", False),
        ("", _SLOW_THREAD, "shutdown", False),
        ("", _SLOW_EXIT, "shutdown", False),
        ("", _DEAF, "shutdown", False),
        ("", "%dist_detach\n%dist_attach", "shutdown", False),
        ("", "x", "shutdown", False),
        ("", _BUSY, "shutdown", True),
        ("", "%dist_detach", "shutdown", True),
        ("--lease 10m", "x = 1", "shutdown", True),
        ("", "x = 1", "restart", True),
        ("", "x = 1", "kill", True),
    ],
)
def test_a_kernel_that_is_shut_down_ends_its_idle_mesh(
    start: str, cell: str, end: str, lives_on: bool, runtime_dir: Path
) -> None:
    with open_notebook() as opened:
        opened.run("%load_ext cellmesh")
        assert opened.run(f"%dist_start 2 {start}").status == "ok"
        _run(opened, cell)
        if end != "shutdown":
            opened.client.stop_channels()
            opened.manager.restart_kernel(now=end == "kill")
    if lives_on:
        _check_lives_on(runtime_dir)
    check_nothing_left(runtime_dir)


def _run(opened: Notebook, cell: str) -> None:
    if cell == _DEAF:
        opened.read_until(opened.send(cell), lambda outcome: "deaf" in outcome.text())
    else:
        opened.run(cell)


def test_nbclient_leaves_nothing(runtime_dir: Path) -> None:
    cells = ["%load_ext cellmesh", "%dist_start 2", "%%dist\nprint('hi')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    asyncio.run(NotebookClient(notebook, config=kernel_config()).async_execute())
    assert notebook.cells[-1].outputs[0].text == "[0-1] hi\n"
    check_nothing_left(runtime_dir)


def test_exit_in_a_terminal_ends_its_mesh_and_one_of_a_notebook_that_it_holds(
    runtime_dir: Path,
) -> None:
    with open_notebook() as opened:
        opened.run("%load_ext cellmesh")
        opened.run("%dist_start 2 --name left")
        opened.run("%dist_detach")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "IPYTHONDIR": str(runtime_dir / "ipython")},
    ) as terminal:
        os.close(theirs)
        os.write(ours, b"%load_ext cellmesh\n%dist_attach left\nexit\n")
        said = b""
        try:
            while piece := os.read(ours, 1 << 16):
                said += piece
        except OSError:  # the terminal's other end has been closed
            pass
        assert terminal.wait(60) == 0, said.decode()
    os.close(ours)
    assert b"attached to left" in said
    check_nothing_left(runtime_dir)
