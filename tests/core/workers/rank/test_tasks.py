"""Tasks of a rank beside its work, in this process's main thread: programs against plain asyncio,
interrupts, and the order of collectives.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cellmesh.errors import MeshUsageError
from cellmesh.wire.stream import Channel
from cellmesh.workers.groups.ledger import Ledger
from cellmesh.workers.groups.waits import Waits
from cellmesh.workers.rank.interrupts import Interrupts
from cellmesh.workers.rank.tasks import Call, CollectiveOrder, Steps, Tasks, describe_waiting
from cellmesh.workers.run_tracker import RunTracker

NUM_SEEDS, NUM_CALLS = 60, 6


@dataclass
class Rank:
    """The parts of a rank that its tasks use."""

    tasks: Tasks
    channel: Channel
    ended: dict[int, Any] = field(default_factory=dict)

    def begin(self, run: int, coroutine: Any) -> None:
        async def end(awaited: Any) -> None:
            try:
                self.ended[run] = await awaited
            except BaseException as error:
                self.ended[run] = type(error).__name__
            self.tasks.forget(run)

        self.tasks.tracker.enter(run)
        self.tasks.interrupts.running = run
        self.tasks.begin(run, f"call {run}", coroutine, end)
        self.tasks.interrupts.running = self.tasks.tracker.main_run = -1

    def turn(self) -> None:
        self.tasks.turn(self.channel, is_short=True)

    def end_all(self) -> None:
        for _ in range(10_000):
            if not self.tasks.alive:
                return
            self.turn()
        raise AssertionError(f"these never end: {self.tasks.alive}")

    def interrupt(self, run: int) -> None:
        """As the control thread does."""
        beside = threading.Thread(target=self.tasks.interrupts.request, args=[run])
        beside.start()
        beside.join()


@pytest.fixture
def rank() -> Iterator[Rank]:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    interrupts = Interrupts()
    interrupts.install()
    own, others = socket.socketpair()
    with own, others:
        made = Rank(Tasks(interrupts, RunTracker(), Ledger(Waits())), Channel(own))
        yield made
        if made.tasks._loop is not None:
            made.tasks._loop.close()
    signal.signal(signal.SIGINT, before[0])
    sys.unraisablehook = before[1]


# ---- programs


@dataclass
class Program:
    """Calls that wait for each other, fail, cancel each other and make tasks, from a seed."""

    seed: int
    log: list[tuple[Any, ...]] = field(default_factory=list)
    tasks: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    has_run: Callable[[int], None] = lambda run: None

    def __post_init__(self) -> None:
        self.events = [asyncio.Event() for _ in range(3)]

    async def call(self, number: int) -> int:
        steps = random.Random(self.seed * 100 + number)
        self.tasks[number] = asyncio.current_task()  # type: ignore[assignment]
        for at in range(steps.randrange(1, 8)):
            self.has_run(number)
            self.log.append((number, at))
            match steps.randrange(8):
                case 0 | 1 | 2:
                    await asyncio.sleep(0)
                case 3:
                    steps.choice(self.events).set()
                case 4:
                    try:
                        async with asyncio.timeout(0):
                            await steps.choice(self.events).wait()
                    except TimeoutError:
                        self.log.append((number, "timeout"))
                case 5:
                    async with asyncio.TaskGroup() as group:
                        for each in range(2):
                            group.create_task(self._inner(number, each))
                case 6 if (task := self.tasks.get(steps.randrange(NUM_CALLS))) is not None:
                    task.cancel()
                case 7 if steps.random() < 0.3:
                    raise ValueError(number)
        self.has_run(number)
        return number

    async def _inner(self, number: int, each: int) -> None:
        await asyncio.sleep(0)
        self.has_run(number)
        self.log.append((number, "inner", each))


def in_plain_asyncio(program: Program) -> dict[int, Any]:
    """Run the calls of a program as a script would, one turn of the loop after the other."""
    loop, ended = asyncio.new_event_loop(), dict[int, Any]()
    tasks = []

    async def end(number: int) -> None:
        try:
            ended[number] = await program.call(number)
        except BaseException as error:
            ended[number] = type(error).__name__

    for number in range(NUM_CALLS):
        tasks.append(loop.create_task(end(number)))
        loop.stop()
        loop.run_forever()
    loop.run_until_complete(asyncio.wait(tasks))
    loop.close()
    return ended


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_calls_do_what_they_do_in_plain_asyncio(rank: Rank, seed: int) -> None:
    model, program = Program(seed), Program(seed)
    expected = in_plain_asyncio(model)

    def check(run: int) -> None:
        tracker, interrupts = rank.tasks.tracker, rank.tasks.interrupts
        assert (tracker.current(), interrupts.running) == (run, run)

    program.has_run = check
    for number in range(NUM_CALLS):
        rank.begin(number, program.call(number))
        rank.turn()
    rank.end_all()
    assert rank.ended == expected
    for number in range(NUM_CALLS):
        own = [entry for entry in program.log if entry[0] == number]
        assert own == [entry for entry in model.log if entry[0] == number]
    assert (rank.tasks.calls, rank.tasks.interrupts.tasks) == ({}, {})
    assert rank.tasks.ledger.may_begin is None


# ---- turns and runs that do not wait


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_message_ends_a_turn(rank: Rank) -> None:
    left, right = socket.socketpair()
    with left, right:
        channel, sender = Channel(left), Channel(right)

        async def send() -> None:
            await asyncio.sleep(0.01)
            sender.send([b"work"])

        rank.begin(1, send())
        rank.tasks.turn(channel, is_short=False)
        assert channel.receive() == [b"work"]
        sender.send([b"one"])
        sender.send([b"two"])
        assert channel.receive() == [b"one"]
        rank.begin(2, asyncio.sleep(0))
        rank.tasks.turn(channel, is_short=False)  # the second was received with the first
        assert channel.receive() == [b"two"]


def test_a_task_that_sleeps_for_ever_does_not_end_the_waits_for_work(rank: Rank) -> None:
    left, right = socket.socketpair()
    with left, right:
        rank.begin(1, asyncio.sleep(math.inf))
        rank.tasks.turn(Channel(left), is_short=True)
        Channel(right).send([b"work"])
        assert rank.tasks.turn(Channel(left), is_short=False)


def test_calls_go_on_while_an_asynchronous_cell_runs(rank: Rank) -> None:
    seen = asyncio.Event()

    async def wait_for_cell() -> str:
        await seen.wait()
        return "seen"

    async def cell() -> str:
        assert rank.tasks.interrupts.running == 2
        await asyncio.sleep(0)
        seen.set()
        while 1 not in rank.ended:
            await asyncio.sleep(0)
        assert rank.tasks.tracker.current() == rank.tasks.interrupts.running == 2
        return "cell"

    rank.begin(1, wait_for_cell())
    rank.tasks.tracker.enter(2)
    rank.tasks.interrupts.running = 2
    assert rank.tasks.run(cell()) == "cell"
    assert rank.ended == {1: "seen"}


def test_a_task_goes_on_after_its_call_has_ended(rank: Rank) -> None:
    runs = []

    async def later() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        runs.append(rank.tasks.tracker.current())

    async def call() -> None:
        asyncio.get_running_loop().create_task(later())

    rank.begin(1, call())
    rank.end_all()
    assert (rank.ended, runs) == ({1: None}, [1])


# ---- interrupts


def test_an_interrupt_cancels_a_call_that_waits_and_no_other(rank: Rank) -> None:
    rank.begin(1, forever())
    rank.begin(2, asyncio.sleep(0.01, "slept"))
    rank.turn()
    rank.interrupt(1)
    rank.end_all()
    assert rank.ended == {1: "CancelledError", 2: "slept"}


def test_an_interrupt_strikes_a_call_that_computes_also_in_a_task_of_its_own(rank: Rank) -> None:
    async def spin() -> None:
        threading.Thread(target=rank.tasks.interrupts.request, args=[1]).start()
        while True:
            pass

    async def call() -> None:
        await asyncio.gather(spin(), forever())

    rank.begin(1, call())
    rank.begin(2, asyncio.sleep(0.01, "slept"))
    while 1 not in rank.ended or 2 not in rank.ended:
        rank.turn()
    assert rank.ended[1] in ("KeyboardInterrupt", "CancelledError")
    assert rank.ended[2] == "slept"


@pytest.mark.parametrize("function", [Steps._step, Interrupts.enter, Interrupts.leave])
def test_an_interrupt_within_the_step_of_a_task_is_repeated(rank: Rank, function: Any) -> None:
    interrupts, dropped = rank.tasks.interrupts, list[Any]()
    interrupts.on_dropped = lambda *what: dropped.append(what)
    interrupts.running = interrupts._wanted = 1
    frame: Any = SimpleNamespace(f_code=function.__code__, f_back=None)
    interrupts._on_signal(signal.SIGINT, frame)
    assert dropped == [(1, KeyboardInterrupt)]
    interrupts._wanted = 1
    frame = SimpleNamespace(f_code=Rank.turn.__code__, f_back=frame)
    with pytest.raises(KeyboardInterrupt):
        interrupts._on_signal(signal.SIGINT, frame)
    interrupts.running = -1


def test_an_interrupt_of_a_cell_that_waits_leaves_the_calls_beside_it(rank: Rank) -> None:
    async def cell() -> None:
        beside = threading.Thread(target=rank.tasks.interrupts.request, args=[2])
        asyncio.get_running_loop().call_later(0.01, beside.start)
        await forever()

    rank.begin(1, asyncio.sleep(0.01, "slept"))
    rank.tasks.tracker.enter(2)
    rank.tasks.interrupts.running = 2
    with pytest.raises(asyncio.CancelledError):
        rank.tasks.run(cell())
    rank.tasks.interrupts.running = -1
    rank.end_all()
    assert rank.ended == {1: "slept"}


def test_an_exit_in_a_task_ends_that_task_only(rank: Rank) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def call() -> str:
        task = asyncio.get_running_loop().create_task(leave())
        try:
            await task
        except SystemExit as error:
            return f"exit {error.code}"
        return ""

    rank.begin(1, call())
    rank.end_all()
    assert rank.ended[1] in ("exit 3", "CancelledError")


# ---- collectives


def call(num_before: int = 0, title: str = "serve") -> Call:
    return Call(title, None, num_before)


def test_a_call_that_waits_alone_may_begin_collectives() -> None:
    order = CollectiveOrder()
    for _ in range(3):
        order.begin("all_reduce", 1, {1: call()})


def test_work_that_does_not_wait_may_always_begin_collectives() -> None:
    order = CollectiveOrder()
    for run in (3, 4, 3):
        order.begin("all_reduce", run, {1: call(), 2: call()})


def test_a_collective_is_refused_while_another_call_waits() -> None:
    calls = {1: call(title="serve"), 2: call(title="train")}
    for run, text in ((2, "train may not begin all_reduce: serve waits"), (1, "serve may not")):
        with pytest.raises(MeshUsageError, match=text):
            CollectiveOrder().begin("all_reduce", run, calls)


def test_a_collective_is_refused_after_one_of_other_work_since_the_call_began() -> None:
    order = CollectiveOrder()
    order.begin("broadcast", 1, {9: call()})
    calls = {2: call(order.num_begun)}
    order.begin("all_reduce", 2, calls)  # the earlier one does not count
    order.begin("all_reduce", 3, calls)
    with pytest.raises(MeshUsageError, match="other work has begun collectives"):
        order.begin("all_reduce", 2, calls)


@pytest.mark.parametrize("seed", range(30))
def test_one_of_two_ranks_refuses_if_collectives_could_differ_in_order(seed: int) -> None:
    chosen = random.Random(seed)

    def begun_by(rank: int) -> tuple[list[int], bool]:
        """Begin a call 1, then work 2 with a collective, at any place among the call's own."""
        order, calls, begun = CollectiveOrder(), {1: call()}, []
        for run in chosen.sample([1, 1, 2], 3):
            try:
                order.begin("all_reduce", run, calls)
            except MeshUsageError:
                return begun, True
            begun.append(run)
        return begun, False

    (first, one_refused), (second, other_refused) = begun_by(0), begun_by(1)
    assert first == second or one_refused or other_refused


def test_a_call_that_is_cancelled_before_its_first_step_is_answered(rank: Rank) -> None:
    begun: list[int] = []

    async def wait() -> None:
        begun.append(1)
        await asyncio.sleep(1000)

    rank.begin(1, wait())
    rank.tasks.interrupts.cancel(1, KeyboardInterrupt)
    rank.end_all()
    assert rank.ended == {1: "CancelledError"}
    assert (begun, rank.tasks.calls) == ([1], {})


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def test_modes_of_gradients_are_those_of_the_task(rank: Rank) -> None:
    gate = asyncio.Event()
    seen: list[tuple[bool, bool]] = []

    async def hold(mode: Any) -> None:
        with mode:
            task = asyncio.create_task(look())
            await gate.wait()
            seen.append(modes())
            await task
        seen.append(modes())

    async def look() -> None:
        seen.append(modes())

    for run, mode in enumerate((torch.no_grad(), torch.inference_mode(), torch.enable_grad())):
        rank.begin(run, hold(mode))
    for _ in range(5):
        rank.turn()
        assert modes() == (True, False)
    assert seen == [(False, False), (False, False), (True, False)]  # tasks begin as their makers
    seen.clear()
    gate.set()
    rank.end_all()
    assert sorted(seen) == [(False, False), (False, True), *[(True, False)] * 4]
    assert modes() == (True, False)

    async def turn_off() -> None:
        await asyncio.sleep(0)
        torch.set_grad_enabled(False)

    rank.begin(7, turn_off())
    rank.end_all()
    assert modes() == (False, False)
    torch.set_grad_enabled(True)


def test_calls_that_wait_are_described_while_other_code_holds_every_object() -> None:
    held = []

    class Shell:
        """Cells whose numbers are looked up while another thread calls `gc.get_objects`."""

        def cell_of(self, _: str) -> int:
            held.append(gc.get_objects())
            return 3

    async def serve() -> None:
        await asyncio.sleep(0)

    waiting = [serve() for _ in range(2)]
    for each in waiting:
        each.send(None)
    calls = {run: Call("serve", each, 0) for run, each in enumerate(waiting)}
    found = describe_waiting(calls, Shell())  # type: ignore[arg-type]
    assert [(each.run, each.title) for each in found] == [(0, "serve"), (1, "serve")]
    assert "at In[3] line" in found[0].where
    assert len(held) == 2
    for each in waiting:
        each.close()
