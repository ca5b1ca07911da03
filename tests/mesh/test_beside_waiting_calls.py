"""Bars, threads, checkpoints and the stop button beside calls that wait: those of each call are its
own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.output.bars import Bars
from cellmesh.controller.output.fold import Trace
from cellmesh.controller.run import Run
from cellmesh.errors import RankDied, RankFailure, RanksInterrupted
from tests.faults.watching import wait_until
from tests.support.run_cases import beside, press_stop_once_main_waits_in

from .conftest import Recorder

WAIT_S = 60.0


class Worker:
    """What the tests call; each name is a gate that `open` opens."""

    def __init__(self) -> None:
        import threading

        self.gates: dict[str, Any] = {}
        self.gate_of_threads = threading.Event()
        self.log: list[str] = []

    async def wait(self, name: str) -> str:
        import asyncio

        await self.gates.setdefault(name, asyncio.Event()).wait()
        return name

    def open(self, name: str) -> None:
        import asyncio

        self.gates.setdefault(name, asyncio.Event()).set()

    async def count(self, name: str, num: int) -> None:
        import asyncio

        from tqdm import tqdm

        for number in tqdm(range(num), desc=name):
            await self.wait(f"{name} {number}")
            await asyncio.sleep(0)

    async def use_thread(self, name: str) -> str:
        import asyncio

        def work() -> str:
            print(f"{name} begins")
            self.gate_of_threads.wait()
            print(f"{name} ends")
            return name

        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self.log.append(f"{name} cancelled")
            raise

    async def ask(self) -> str:
        await self.wait("asked")
        return input("which? ")

    async def refuse_to_end(self) -> None:
        import asyncio

        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                self.log.append("refused")


@pytest.fixture(scope="module")
def worker(quick: cm.Mesh) -> Any:
    return quick.spawn(Worker)


def submit(worker: Any, sink: Recorder, method: str, *args: Any) -> Run[Any]:
    """Call an asynchronous method whose output `sink` gets."""
    started: Run[Any] = worker._spawned.start(
        "call", (method,), worker._rank_set, args, interleaves=True, sink=sink
    )
    return started


def counts(sink: Recorder) -> dict[str, tuple[str, str]]:
    """The last drawing of each bar: its title, counts and state."""
    rows = [row for block in sink.items(Bars) for row in block.item.rows]
    return {row.title: (row.counts, row.state) for row in rows}


def test_a_bar_is_shown_where_its_call_was_made(worker: Any) -> None:
    left, right = Recorder(), Recorder()
    runs = [submit(worker, left, "count", "left", 3), submit(worker, right, "count", "right", 2)]
    for gate in ("left 0", "right 0", "right 1", "left 1"):
        worker.open(gate)
    runs[1].result(WAIT_S)
    assert counts(right)["right"] == ("2/2", "done")
    worker.open("left 2")
    runs[0].result(WAIT_S)
    assert counts(left)["left"] == ("3/3", "done")
    assert [set(counts(sink)) for sink in (left, right)] == [{"left"}, {"right"}]


def test_a_thread_of_a_call_prints_there_and_outlives_its_cancel(
    quick: cm.Mesh, worker: Any
) -> None:
    first, second = Recorder(), Recorder()
    runs = [submit(worker, first, "use_thread", "one"), submit(worker, second, "use_thread", "two")]
    first.wait_for_line("one begins")
    second.wait_for_line("two begins")
    quick.cell("print('beside')")
    assert runs[0].cancel()
    with pytest.raises(RanksInterrupted):
        runs[0].result(WAIT_S)
    assert quick.pull("worker.log").list == [["one cancelled"]] * 2
    assert not runs[1].done()
    quick.cell("worker.gate_of_threads.set()")
    assert runs[1].result(WAIT_S).list == ["two"] * 2
    assert {text for _, text in second.lines()} == {"two begins", "two ends"}
    assert {text for _, text in first.lines()} <= {"one begins", "one ends"}


def test_a_call_that_waits_cannot_ask_and_shows_its_own_traceback(
    quick: cm.Mesh, worker: Any
) -> None:
    sink, other = Recorder(), Recorder()
    run = submit(worker, sink, "ask")
    quick.submit_cell("worker.open('asked')", sink=other).result(WAIT_S)
    with pytest.raises(RankFailure, match=r"ranks 0-1 raised RuntimeError: input\(\) can ask only"):
        run.result(WAIT_S)
    (shown,) = sink.items(Trace)
    assert "input() can ask only while the cell runs that it belongs to" in str(shown.item)
    assert other.blocks == []


def test_checkpoints_are_saved_and_loaded_beside_calls_that_wait(
    quick: cm.Mesh, worker: Any, tmp_path: Path
) -> None:
    quick.cell(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(3, 3))\nstep = 7"
    )
    waiting = worker.wait.submit("saved")
    weights = "model.module.weight.detach().clone()"
    before = quick.pull(weights)
    quick.save("model", "step", path=tmp_path / "latest")
    quick.cell("model(torch.ones(2, 3)).sum().backward()\nmodel.module.weight.data.zero_()")
    quick.load(path=tmp_path / "latest")
    after = quick.pull(weights)
    assert all(after[rank].equal(before[rank]) for rank in range(2))
    assert not waiting.done()
    worker.open("saved")
    assert waiting.result(WAIT_S).list == ["saved"] * 2


def test_a_third_press_leaves_a_call_that_refuses_to_end(
    quick: cm.Mesh, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The presses of a slow machine, too, come before the rank is killed.
    for module, name, seconds in (
        ("core.runs", "STOP_S", 4.0),
        ("core.runs", "ESCALATE_S", WAIT_S),
        ("run", "ESCALATE_S", WAIT_S),
    ):
        monkeypatch.setattr(f"cellmesh.controller.{module}.{name}", seconds)
    waiting = worker.wait.submit("pressed")
    refusing = worker[1].refuse_to_end.submit()
    quick.run(lambda: None)
    presses = quick.rank_set.session.core.mesh.transitions

    def has_come(event: str) -> bool:
        subject = f"run {refusing.number} "
        return any(e.event == event and e.subject.startswith(subject) for e in [*presses])

    def press_three_times() -> None:
        press_stop_once_main_waits_in("_attend")
        wait_until(lambda: has_come("interrupted at once") or has_come("interrupted"))
        press_stop_once_main_waits_in("_attend")
        wait_until(lambda: has_come("interrupted again"))
        press_stop_once_main_waits_in("_attend")

    with (
        beside(press_three_times),
        pytest.raises(RanksInterrupted, match="rank 1 did not stop: those that still run"),
    ):
        refusing.result()
    wait_until(lambda: waiting.failed_ranks() == [1])
    assert refusing.wait(WAIT_S)
    assert waiting.waiting_ranks() == [0]
    quick.heal()
    assert quick.run(lambda: 5).list == [5] * 2
    worker[0].open("pressed")
    values, errors = waiting.gather(WAIT_S)
    assert values == {0: "pressed"}
    assert isinstance(errors[1], RankDied)
    with pytest.raises((RankDied, RankFailure, cm.errors.MeshUsageError), match="rank 1"):
        worker.open("more")
