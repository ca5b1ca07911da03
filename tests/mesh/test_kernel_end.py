"""What becomes of a mesh when its notebook's kernel, or its terminal, ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cellmesh.controller.session.attach import attach
from cellmesh.controller.session.living import find_living
from cellmesh.wire.ticket import read_holder, read_ticket, runtime_root
from tests.conftest import LEFTOVER_S, check_nothing_left

from .test_kernel import Notebook, open_notebook

_BUSY = "%%dist --nowait\nimport time\ntime.sleep(600)"
_SLOW_EXIT = "import atexit, time; atexit.register(time.sleep, 60)"
_DEAF = """\
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)"""


def _check_lives_on(directory: Path) -> None:
    """Fail unless a mesh lives whose controller has gone, and end it."""
    (name,) = (mesh.name for mesh in find_living(asks=False))
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
        ("", _SLOW_EXIT, "shutdown", False),
        ("", _DEAF, "shutdown", False),
        ("", _BUSY, "shutdown", True),
        ("", "%dist_detach", "shutdown", True),
        ("--lease 10m", "x = 1", "shutdown", True),
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


def _run(opened: Notebook, cell: str) -> None:
    if cell == _DEAF:
        opened.read_until(opened.send(cell), lambda outcome: "deaf" in outcome.text())
    else:
        opened.run(cell)
