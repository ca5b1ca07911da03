"""When there is room for another run, and the cost of many runs in flight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from cellmesh.controller.core.core import Core, Deliver, Send
from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.run import Run
from cellmesh.controller.session import runs as runs_module
from cellmesh.controller.session.runs import Runs
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Done, Interrupt, Pickled
from cellmesh.wire.status import RankState
from cellmesh.wire.stopping import Pause

from ....support.core_decisions import control_sent, hear, of, running_core
from ....support.runs import FakeControl, work_item

MB = 1 << 20
NUM_RUNS = 3_000


def make_run(number: int, ranks: Sequence[int]) -> Run[Any]:
    return Run(number, work_item(ranks), Printer(ranks, ConsoleSink()), FakeControl())


def in_flight(*runs: tuple[Sequence[int], int]) -> Runs:
    """Runs of these ranks with so many bytes, the oldest first."""
    link: Any = FakeControl()
    catalog = Runs(link, link, 4)
    for number, (ranks, num_bytes) in enumerate(runs, 1):
        catalog.add(make_run(number, ranks), num_bytes)
    return catalog


TWO_LARGE = [((0,), 200 * MB), ((0,), 200 * MB)]


@pytest.mark.parametrize(
    ("runs", "ranks", "num_bytes", "has_room"),
    [
        ([], [0], 10_000 * MB, True),
        (TWO_LARGE[:1], [0], 200 * MB, True),  # the first may be executing
        (TWO_LARGE, [0], 200 * MB, False),
        (TWO_LARGE, [0, 1], 200 * MB, False),
        (TWO_LARGE, [1], 200 * MB, True),  # of a rank that may have to meet rank 0
        (TWO_LARGE, [0], 0, True),
        ([((0, 1), MB)] * 257, [1], MB, False),
        ([((0, 1), MB)] * 256, [1], MB, True),
    ],
)
def test_room(runs: Any, ranks: Sequence[int], num_bytes: int, has_room: bool) -> None:
    assert in_flight(*runs).has_room(ranks, num_bytes) is has_room


@pytest.mark.parametrize("num_runs", [9, 10])
def test_few_runs_may_be_under_way(num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "MAX_RUNS", 10)
    assert in_flight(*[((0, 1), 0)] * num_runs).has_room([3], 0) is (num_runs < 10)


def test_ended_runs_of_a_rank_make_room() -> None:
    catalog = in_flight(*[((0, 1), 200 * MB)] * 2)
    first = catalog.living[1]
    first.settle((0,), Parcel(Done(1)), 0.0)
    assert catalog.has_room([0], 200 * MB)
    assert not catalog.has_room([1], 200 * MB)
    first.settle((1,), Parcel(Done(1)), 0.0)
    first.finish(0.0)
    catalog.forget(1)
    assert catalog.has_room([1], 200 * MB)
    assert not catalog._num_bytes.keys() - {2}


def test_the_value_of_a_run_that_has_ended_goes_with_it() -> None:
    run = make_run(1, (0,))
    run.settle((0,), Parcel(Done(1, Pickled(b"", 1)), (memoryview(b"large"),)), 0.0)
    run.finish(0.0)
    gone = weakref.ref(run)
    gc.disable()  # it would go in the end; until then, results of 10 MB each would add up
    try:
        del run
        assert gone() is None
    finally:
        gc.enable()


def many_running() -> Core:
    return running_core(2, *[(0, 1)] * NUM_RUNS)


def state(request: int, run: int) -> RankState:
    return RankState(request, run, 0, 0, "f", "", "cpu", 0)


def test_many_runs_are_interrupted_by_a_few_messages() -> None:
    core = many_running()
    effects = core.interrupt(range(NUM_RUNS, 0, -1), 1.0)
    assert len(of(Send, effects)) == 2
    *interrupts, (_, probe) = control_sent(effects)
    first = Pause(1)  # the only one that the ranks execute
    others = [Interrupt(run) for run in range(NUM_RUNS, 1, -1)]
    assert [verb for _, verb in interrupts] == [*others, first]
    hear(core, (0,), state(probe.request, 1), 1.0)
    delivered = of(Deliver, hear(core, (1,), state(probe.request, 1), 1.0))
    assert {deliver.run for deliver in delivered} == set(range(2, NUM_RUNS + 1))
    assert not any(deliver.has_begun for deliver in delivered)
