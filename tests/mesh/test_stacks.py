"""Where ranks are, told while they are blocked."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import cellmesh as cm
from cellmesh.controller.run import Run
from tests.conftest import stop_process

from .conftest import Recorder


@contextlib.contextmanager
def blocked(mesh: cm.Mesh, recorder: Recorder) -> Iterator[Run[None]]:
    """Rank 3 sleeps, the others wait for it in a collective."""
    run = mesh.submit_cell(
        "import time\n"
        "def reduce():\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "print('here')\n"
        "if rank == 3:\n"
        "    time.sleep(60)\n"
        "reduce()",
        sink=recorder,
    )
    recorder.wait_for_line("here")
    try:
        yield run
    finally:
        run.interrupt()
        assert run.wait(20.0)


def test_equal_stacks_are_shown_once_and_from_the_cell_on(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    with blocked(mesh, recorder):
        while {state.collective for rank, state in mesh.states().items() if rank != 3} != {
            "all_reduce"
        }:
            pass  # asking takes its time
        text = mesh.stacks()
        states = mesh.states()
    first, second = text.split("\n\n")
    assert first.startswith("ranks 0-2:\n  In[")
    assert "line 7, in <module>\n    reduce()\n" in first
    assert "line 3, in reduce\n    dist.all_reduce(torch.ones(1))\n" in first
    assert '"torch/distributed/distributed_c10d.py", line ' in first
    assert "in all_reduce" in first
    assert second.startswith("rank 3:\n  In[")
    assert second.rstrip().endswith("line 6, in <module>\n    time.sleep(60)")
    assert "cellmesh" not in second
    assert states[3].where == "time.sleep"
    assert (states[3].line, states[3].collective) == (6, "")
    assert (states[0].line, states[0].collective, states[0].group) == (3, "all_reduce", "0")
    assert states[0].waited_s > 0


def test_idle_ranks_have_no_stack(mesh: cm.Mesh) -> None:
    assert mesh.stacks() == "ranks 0-3:\n  idle"


def test_stopped_rank_is_reported_as_not_answering(mesh: cm.Mesh) -> None:
    mesh.cell("pass")  # ranks that rebuild their groups after the last test would have a stack
    pid = mesh.report()[2].pid
    stop_process(pid)
    try:
        text = mesh.stacks()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert text.startswith("ranks 0-1,3:\n  idle\n\nrank 2:\n  did not answer")


def test_threads_are_shown_when_asked_for(mesh: cm.Mesh) -> None:
    mesh[0:1].cell(
        "import threading\n"
        "gate = threading.Event()\n"
        "def linger():\n"
        "    gate.wait()\n"
        "thread = threading.Thread(target=linger, name='lingerer')\n"
        "thread.start()"
    )
    try:
        assert "lingerer" not in mesh[0:1].stacks()
        text = mesh[0:1].stacks(all_threads=True)
    finally:
        mesh[0:1].cell("gate.set()\nthread.join()")
    assert "thread lingerer:" in text
    assert "gate.wait()" in text
    assert "cellmesh-" not in text
