"""A producer that outruns a rank, the notebook or another rank is slowed; what waits is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from cellmesh.errors import MeshUsageError, NoMeshError
from cellmesh.wire.limits import MAX_ANSWER_BYTES, MAX_RUN_BYTES, MAX_RUNS
from cellmesh.workers.rank.stack_inspection import stacks_of_threads
from tests.conftest import check_nothing_left, own_runtime_dir, process_named
from tests.faults.watching import wait_until

from .conftest import state_of
from .test_kernel import open_notebook

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
        mesh[1].submit_cell(SLOW)
        wait_until(lambda: state_of(mesh, 1).run >= 0, WAIT_S, "rank 1 runs")
        yield mesh
    check_nothing_left(runtime_dir)


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


def held_results(pid: int) -> set[int]:
    """The results that are open in a process."""
    links = [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    return {os.stat(link).st_ino for link in links if "cellmesh-result" in os.readlink(link)}


def check_growth(before: dict[str, int], of: dict[str, int], bound: int = MAX_GROWTH) -> None:
    grown = {name: (held(pid) - before[name]) >> 20 for name, pid in of.items()}
    print("MB more:", grown)
    assert all(num < bound >> 20 for num in grown.values()), grown


def test_submits_wait_for_a_rank_that_sleeps(slow: cm.Mesh, runtime_dir: Path) -> None:
    of = pids(slow, runtime_dir)
    before = {name: held(pid) for name, pid in of.items()}
    producer = Producer(lambda index: slow.submit(abs, -index))
    assert producer.wait_until_blocked() <= MAX_RUNS
    check_growth(before, of)
    assert state_of(slow[0], 0).run == -1  # rank 0 has done all of it
    slow[1].interrupt()  # the cell that it is in, too; the producer goes on
    last = producer.num
    wait_until(lambda: producer.num > last + MAX_RUNS, WAIT_S, "it goes on")
    producer.end()
    assert producer.last.result(WAIT_S).list == [producer.num - 1] * 2
    check_growth(before, of)


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


@pytest.mark.parametrize("way", ["signal", "interrupt", "kill", "heal", "restart", "stop"])
def test_stop_and_heal_wait_for_no_full_queue(
    way: str, slow: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all queues full; each is to be done before the ranks have done any of what waits."""
    monkeypatch.setattr(runs_module, "MAX_RUNS", FEW_RUNS)  # so many are submitted in a second
    if way == "signal":
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
        return
    producer = Producer(lambda index: slow.submit(abs, -index))
    producer.wait_until_blocked()
    producer.stops = way not in ("kill", "heal")
    if way in ("kill", "heal"):
        os.kill(slow.report()[1].pid, signal.SIGKILL)
        wait_until(lambda: slow.report()[1].phase == "dead", WAIT_S, "the death")
        producer.thread.join(WAIT_S)
        assert "rank 1" in producer.error or "dead" in producer.error
    if way == "heal":
        assert slow.heal().respawned == (1,)
        assert slow.run(abs, -2).list == [2, 2]
    if way == "interrupt":
        slow.interrupt()
        producer.end()
        slow.interrupt()
        assert slow.run(abs, -2).list == [2, 2]
    if way == "restart":
        slow.restart()
        producer.end()
        assert slow.run(abs, -2).list == [2, 2]
    if way == "stop":
        slow.stop()
        producer.end()


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


def test_a_callback_of_the_link_may_submit_when_there_is_no_room(
    quick: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[cm.Run[Any]] = []
    ended = threading.Event()

    def again() -> None:
        monkeypatch.setattr(runs_module, "MAX_RUNS", 0)
        made.append(quick.submit(abs, -3))
        made[0].on_end(ended.set)

    quick.submit(abs, -1).on_end(again)
    assert ended.wait(WAIT_S)
    assert made[0].result().list == [3, 3]


WAITS: dict[str, Callable[[cm.Mesh], Any]] = {
    "run": lambda mesh: mesh.run(abs, -1),
    "cell": lambda mesh: mesh.cell("pass"),
    "result": lambda mesh: mesh[0].submit(abs, -1).result(),
    "wait": lambda mesh: mesh.submit(abs, -1).wait(),
    "gather": lambda mesh: mesh.submit(abs, -1).gather(WAIT_S),
    "iterate": lambda mesh: list(mesh.submit(abs, -1)),
    "await": lambda mesh: await_run(mesh).send(None),
    "states": lambda mesh: mesh.states(),
    "push": lambda mesh: mesh.push(x=np.ones(MB)),
    "heal": lambda mesh: mesh.heal(),
    "restart": lambda mesh: mesh.restart(),
    "detach": lambda mesh: mesh.detach(),
    "stop": lambda mesh: mesh.stop(),
}


async def await_run(mesh: cm.Mesh) -> Any:
    return await mesh.submit(abs, -1)


@pytest.mark.parametrize("way", WAITS)
def test_waiting_callback_is_reported(way: str, quick: cm.Mesh) -> None:
    found: list[Any] = []
    ended = threading.Event()

    def call() -> None:
        try:
            found.append(WAITS[way](quick))
        except MeshUsageError as error:
            found.append(str(error))
        found.append(quick.submit(abs, -7))
        ended.set()

    quick.submit_cell("import time; time.sleep(0.2)").on_end(call)  # called by the loop
    assert ended.wait(WAIT_S)
    assert "callback" in found[0]
    assert "submit" in found[0]
    assert found[1].result(WAIT_S).list == [7, 7]
    assert quick.run(abs, -1).list == [1, 1]


def test_callback_may_take_an_ended_result(quick: cm.Mesh) -> None:
    found: list[Any] = []
    first = quick.submit(abs, -1)
    second = quick.submit(abs, -2)
    second.on_end(lambda: found.extend([first.result().list, first.wait(), second.result().list]))
    second.result(WAIT_S)
    wait_until(lambda: found, WAIT_S, "it is called")
    assert found == [[1, 1], True, [2, 2]]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("check_usable", NoMeshError),
        ("make_room", KeyboardInterrupt),
        ("post", KeyboardInterrupt),
    ],
)
def test_unsent_run_is_lent_no_memory(
    where: str, error: type[BaseException], quick: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = quick.rank_set.session.segments
    lent = set(segments._loans)  # what other tests have pushed
    quick.run(len, np.ones(MB))  # whatever is opened once is open
    wait_until(lambda: segments._loans.keys() == lent, WAIT_S, "the segment has come back")
    num_fds = psutil.Process().num_fds()
    session = quick.rank_set.session
    target, fail = (session._link if where == "post" else session.runs), raiser(error)
    if where == "post":  # the first time for each run, which is then forgotten by another
        steps = itertools.cycle((fail, session._link.post))
        fail = lambda command: next(steps)(command)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(target, where, fail)
        for _ in range(3):
            with pytest.raises(error):
                quick.push(x=np.ones(8 * MB))
    wait_until(lambda: not quick.rank_set.session.runs.living, WAIT_S, "no rank counts as busy")
    assert segments._loans.keys() == lent
    assert psutil.Process().num_fds() <= num_fds
    assert quick.run(len, np.ones(MB)).list == [MB, MB]


def raiser(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


RECEIVE = "import torch, torch.distributed as dist\nbox = torch.zeros(1)\ndist.recv(box, 1)"
SEND = "import torch, torch.distributed as dist\ndist.send(torch.ones(1), 0)"


def test_a_pipeline_over_ranks_does_not_wait_for_itself(
    quick: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for what rank 1 does in a run that is submitted behind more than rank 0 may
    have.
    """
    monkeypatch.setattr(runs_module, "MAX_RUN_BYTES", 4 * MB)
    quick[0].submit_cell(RECEIVE)
    runs = [quick[0].submit(len, bytes(3 * MB)) for _ in range(4)]
    quick[1].submit_cell(SEND)
    assert [run.result(WAIT_S) for run in runs] == [3 * MB] * 4


def test_a_rank_ahead_of_one_that_waits_for_it_is_read(runtime_dir: Path) -> None:
    """Rank 1 waits for what rank 0 does behind 2 GB of results of both."""
    with cm.start(2) as mesh:
        mesh[1].submit_cell(RECEIVE.replace("box, 1", "box, 0"))
        runs = [mesh.submit(np.ones, 10 * MB // 8) for _ in range(200)]
        mesh[0].submit_cell(SEND.replace("(1), 0", "(1), 1"))
        assert runs[-1].wait(WAIT_S)
    check_nothing_left(runtime_dir)


def test_a_coroutine_submits_more_than_there_is_room_for(
    quick: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "MAX_RUNS", 10)

    async def submit() -> list[Any]:
        return await asyncio.gather(*(quick.submit(abs, -number) for number in range(100)))

    async def main() -> list[list[Any]]:
        async with asyncio.timeout(WAIT_S):
            return list(await asyncio.gather(submit(), submit()))

    found = asyncio.run(main())
    assert [[results[1] for results in each] for each in found] == [list(range(100))] * 2


def test_dropped_results_are_not_kept(quick: cm.Mesh) -> None:
    """2 GB of them, 10 MB each."""
    before = held(os.getpid())
    run: Any = None
    for _ in range(100):
        run = quick.submit(np.ones, 10 * MB // 8)
    run.result(WAIT_S)
    del run
    wait_until(lambda: not quick.rank_set.session.runs.living, WAIT_S, "all have ended")
    grown = (held(os.getpid()) - before) >> 20
    print("MB more:", grown)
    assert grown < 100


def test_results_that_wait_for_another_rank_take_no_more_than_the_bound(
    slow: cm.Mesh, runtime_dir: Path
) -> None:
    """Rank 0 gives 4 GB to the notebook in runs that rank 1 has not begun."""
    of = pids(slow, runtime_dir)
    before = {name: held(pid) for name, pid in of.items()}
    runs = [slow.submit(np.ones, 10 * MB // 8) for _ in range(400)]

    def num_given() -> int:
        return sum(0 in run._outcomes for run in runs)

    wait_until(lambda: num_given() == 400, WAIT_S, "rank 0 has given its results")
    # The agent keeps 26 for a notebook that attaches later; others are under way to this one.
    most = 5 * MAX_ANSWER_BYTES
    num_held = len(held_results(of["agent"]) | held_results(slow.report()[0].pid))
    assert num_held <= most // (10 * MB)
    check_growth(before, of, most + MAX_GROWTH)
    slow[1].interrupt()
    slow.run(abs, -1)


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
    check_nothing_left(runtime_dir)


def test_many_results_that_are_held_do_not_use_up_descriptors() -> None:
    with own_runtime_dir() as directory:
        with cm.start(1) as mesh:
            runs = [mesh.submit(np.full, MB // 8, index) for index in range(700)]
            values = [run.result(WAIT_S)[0] for run in runs[-1:]]
            num_fds = psutil.Process().num_fds()
            values += [run.result(WAIT_S)[0] for run in runs]
        check_nothing_left(directory)
    assert [value[-1] for value in values] == [699, *range(700)]
    assert num_fds < 600


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
BUSY = """
import time
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    pass
print(psutil.Process().memory_info().rss, agent.memory_info().rss)
"""


def test_a_flood_while_the_notebook_computes_is_bounded(runtime_dir: Path) -> None:
    """Ranks print, display, update and log without end; the kernel's main thread is busy."""
    with open_notebook() as notebook:
        notebook.run("import psutil, os\n%load_ext cellmesh\n%dist_start 2")
        agent = process_named(runtime_dir, "cellmesh-agent").pid
        notebook.run(f"agent = psutil.Process({agent})")
        before = [int(word) for word in notebook.run(BUSY.format(seconds=0)).text().split()]
        flood = notebook.send(FLOOD)
        notebook.finish(flood)
        after = [int(word) for word in notebook.run(BUSY.format(seconds=5)).text().split()]
        assert notebook.run("%dist_interrupt").status == "ok"
        assert notebook.run("%%dist\nprint('here')").status == "ok"
        notebook.run("%dist_stop")
        num_bytes = sum(len(repr(content)) for _, content in notebook.cells[flood].messages)
    print("MB more:", [(late - early) >> 20 for early, late in zip(before, after, strict=True)])
    print("MB shown:", num_bytes >> 20, "messages:", len(notebook.cells[flood].messages))
    assert all(late - early < MAX_GROWTH for early, late in zip(before, after, strict=True))
    assert num_bytes < 32 * MB
    check_nothing_left(runtime_dir)
