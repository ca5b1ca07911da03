"""A producer that outruns a rank, the notebook or another rank is slowed; what waits is bounded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import cellmesh as cm
from cellmesh.controller.session import runs as runs_module
from cellmesh.wire.limits import MAX_ANSWER_BYTES, MAX_RUN_BYTES
from cellmesh.workers.rank.stack_inspection import stacks_of_threads
from tests.conftest import process_named
from tests.faults.watching import wait_until

from .conftest import state_of

WAIT_S = 60.0
MB = 1 << 20
# 10,000 runs take 60 MB in the notebook's process and 12 in the agent.
MAX_GROWTH = 150 * MB
FEW_RUNS = 1_000
SLOW = "import threading\ngate = threading.Event()\ngate.wait()"


@pytest.fixture
def slow(runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Two ranks, of which rank 1 is in a long computation."""
    with cm.start(2, settle_s=0.1) as mesh:
        mesh.run(abs, -1)
        make_slow(mesh)
        yield mesh


def make_slow(mesh: cm.Mesh) -> None:
    mesh[1].submit_cell(SLOW)
    wait_until(lambda: state_of(mesh, 1).run >= 0, WAIT_S, "rank 1 runs")


class Producer:
    """Submits on a thread of its own, until it is told to stop."""

    def __init__(self, submit: Callable[[int], Any], most: int = 1 << 60) -> None:
        self._submit, self._most = submit, most
        self.num, self.error = 0, ""
        self.last: Any = None
        self.stops = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stops and self.num < self._most:
                self.last = self._submit(self.num)
                self.num += 1
        except cm.CellmeshError as error:
            self.error = str(error)

    def wait_until_blocked(self) -> int:
        """Wait until it is within a submit that does not return; how many did."""

        def is_blocked() -> bool:
            frames = stacks_of_threads().get(self.thread.ident or 0, [])
            is_within = any(frame.f_code.co_name == "make_room" for frame in frames)
            before = self.num
            return is_within and not threading.Event().wait(0.3) and self.num == before

        wait_until(is_blocked, WAIT_S, "submit waits")
        return self.num

    def end(self) -> None:
        self.stops = True
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def held(pid: int) -> int:
    """What a process has: of pages that it shares with others, its part."""
    return int(psutil.Process(pid).memory_full_info().pss)


def pids(mesh: cm.Mesh, runtime_dir: Path) -> dict[str, int]:
    agent = process_named(runtime_dir, "cellmesh-agent").pid
    return {"controller": os.getpid(), "agent": agent, "rank 1": mesh.report()[1].pid}


def check_growth(before: dict[str, int], of: dict[str, int], bound: int = MAX_GROWTH) -> None:
    grown = {name: (held(pid) - before[name]) >> 20 for name, pid in of.items()}
    print("MB more:", grown)
    assert all(num < bound >> 20 for num in grown.values()), grown


def test_arguments_wait_for_a_rank_that_sleeps(slow: cm.Mesh, runtime_dir: Path) -> None:
    """10 GB in pieces of 1 MB, of which no more than `MAX_RUN_BYTES` are in memory."""
    of = pids(slow, runtime_dir)
    before = {name: held(pid) for name, pid in of.items()}
    num_fds = psutil.Process(of["agent"]).num_fds()
    piece = np.ones(MB // 8)
    producer = Producer(lambda index: slow.submit(len, piece), 10_000)
    num = producer.wait_until_blocked()
    assert 200 <= num <= MAX_RUN_BYTES // MB + 2
    check_growth(before, of, MAX_RUN_BYTES + MAX_GROWTH)
    assert psutil.Process(of["agent"]).num_fds() < num_fds + num + 20
    # What goes to the rank that is not slow does not wait, nor do small arguments.
    assert slow[0].submit(len, piece).result(WAIT_S) == len(piece)
    assert slow[0].submit(abs, -1).result(WAIT_S) == 1
    slow[1].interrupt()
    wait_until(lambda: producer.num > num + 1000, WAIT_S, "it goes on")
    producer.end()
    assert producer.last.result(WAIT_S).list == [len(piece)] * 2


def test_stop_and_heal_wait_for_no_full_queue(
    slow: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is done before the ranks have done any of what waits in full queues."""
    monkeypatch.setattr(runs_module, "MAX_RUNS", FEW_RUNS)  # so many are submitted in a second
    for _ in range(FEW_RUNS - 2):
        slow.submit(abs, -1)
    # The stop button, while the cell is within `submit`.
    main = threading.main_thread().ident
    assert main is not None
    waiter = threading.Thread(target=press_once_blocked, args=(main,))
    waiter.start()
    with pytest.raises(KeyboardInterrupt):
        submit_two(slow)
    waiter.join()
    assert len(slow.rank_set.session.runs.living) == FEW_RUNS
    slow.interrupt()
    assert slow.run(abs, -2).list == [2, 2]
    for way in ("interrupt", "heal", "restart", "stop"):
        make_slow(slow)
        producer = Producer(lambda index: slow.submit(abs, -index))
        producer.wait_until_blocked()
        producer.stops = way != "heal"
        if way == "heal":
            os.kill(slow.report()[1].pid, signal.SIGKILL)
            wait_until(lambda: slow.report()[1].phase == "dead", WAIT_S, "the death")
            producer.thread.join(WAIT_S)
            assert "rank 1" in producer.error or "dead" in producer.error
            assert slow.heal().respawned == (1,)
        else:
            getattr(slow, way)()
            producer.end()
        if way == "interrupt":
            slow.interrupt()
        if way != "stop":
            assert slow.run(abs, -2).list == [2, 2], way


def submit_two(mesh: cm.Mesh) -> None:
    for _ in range(2):  # there is room for one
        mesh.submit(abs, -1)


def press_once_blocked(main: int) -> None:
    def is_blocked() -> bool:
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_name != "make_room":
            frame = frame.f_back
        return frame is not None

    wait_until(is_blocked, WAIT_S, "submit waits")
    signal.pthread_kill(main, signal.SIGINT)


def test_a_pipeline_over_ranks_does_not_wait_for_itself(
    quick: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for what rank 1 does in a run that is submitted behind more than rank 0 may
    have.
    """
    monkeypatch.setattr(runs_module, "MAX_RUN_BYTES", 4 * MB)
    quick[0].submit_cell("dist.recv(torch.zeros(1), 1)")
    runs = [quick[0].submit(len, bytes(3 * MB)) for _ in range(4)]
    quick[1].submit_cell("dist.send(torch.ones(1), 0)")
    assert [run.result(WAIT_S) for run in runs] == [3 * MB] * 4


STOPPED = """
import sys, threading, numpy as np, cellmesh as cm
words = open(int(sys.argv[1]), "w", buffering=1)  # stdout is also that of the flood
FLOOD = '''
import threading, time
def flood():
    while True:
        print("x" * 1000)
threading.Thread(target=flood, daemon=True).start()
'''
with cm.start(2) as mesh:
    mesh.cell(FLOOD)
    print("ready", file=words)
    for line in sys.stdin:
        runs = [mesh.submit(np.ones, 1 << 17) for _ in range(2000)]
        print("sent", file=words)
        sums = [run.result(60)[1].sum() for run in runs[:: len(runs) - 1]]
        print(int(sum(sums)), file=words)
        del runs
"""


def test_a_notebook_that_is_stopped_has_ranks_wait(runtime_dir: Path) -> None:
    """SIGSTOP while ranks print and give 4 GB of results; SIGCONT, and all of them arrive."""
    read_end, write_end = os.pipe()
    with (
        open(read_end) as words,
        subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write_end],
            text=True,
        ) as kernel,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(kernel.kill)  # a stopped process ends by nothing else
        os.close(write_end)  # the notebook's end is reported as an empty line
        assert kernel.stdin is not None
        assert words.readline() == "ready\n"
        agent = process_named(runtime_dir, "cellmesh-agent")
        rank = process_named(runtime_dir, "cellmesh-r1")
        before = {name: held(p.pid) for name, p in (("agent", agent), ("rank", rank))}
        kernel.stdin.write("\n")
        kernel.stdin.flush()
        assert words.readline() == "sent\n"
        os.kill(kernel.pid, signal.SIGSTOP)

        def reads_no_more() -> bool:
            num = agent.num_fds()
            return num > 200 and not threading.Event().wait(0.5) and agent.num_fds() == num

        wait_until(reads_no_more, WAIT_S, "the agent reads no more")
        # Of each of two ranks, what waits, and what is kept for another notebook.
        assert agent.num_fds() < 100 + 2 * 2 * MAX_ANSWER_BYTES // MB
        check_growth(before, {"agent": agent.pid, "rank": rank.pid}, 4 * MAX_ANSWER_BYTES)
        os.kill(kernel.pid, signal.SIGCONT)
        assert words.readline() == f"{2 << 17}\n"
        kernel.communicate()
    assert kernel.returncode == 0


FLOOD = """%%dist --nowait
import cellmesh
from IPython.display import display
label = display({"text/plain": ""}, raw=True, display_id=True)
step = 0
while True:
    step += 1
    print("x" * 200)
    label.update({"text/plain": str(step) * 50}, raw=True)
    cellmesh.log(loss=step)
    if step % 10 == 0:
        display({"text/plain": "y" * 10_000}, raw=True)
"""
