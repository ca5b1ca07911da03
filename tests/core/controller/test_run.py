"""A run: its values, output and failures, and every way of waiting for it and of giving it up."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cellmesh.controller.output.printer import Printer
from cellmesh.controller.run import Run
from cellmesh.errors import MeshUsageError, RankFailure, RanksInterrupted, RemoteError
from cellmesh.wire import payload
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Done, Failed, Pickled
from cellmesh.wire.status import RankState
from cellmesh.wire.verbs import Output

from ...support.run_cases import WAIT_S, Case, Sink, beside, press_stop_once_main_waits_in
from ...support.runs import FakeControl, work_item

# ---- values


def failure_of(case: Case) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        case.run.result(0)
    return caught.value


def test_values_are_loaded_once_and_ranks_that_answer_alike_have_their_own() -> None:
    case = Case(1, single=True)
    case.give(0, [42])
    assert case.run.result(0) == [42]
    assert case.run.result(0) is case.run.result(0)
    case = Case(2)
    pickled, _ = payload.dumps([1], "value")
    case.settle((0, 1), Done(1, pickled))
    first, second = case.run.result(0).list
    assert first == second == [1]
    assert first is not second


def test_results_are_in_the_order_of_ranks_and_show_and_pickle_as_such() -> None:
    case = Case((2, 0))
    for rank in (2, 0):
        case.give(rank, rank)
    results = pickle.loads(pickle.dumps(case.run.result(0)))
    assert repr(results) == "Results({0: 0, 2: 2})"
    assert results.list == [0, 2]
    assert results.get(3) is None
    with pytest.raises(KeyError, match=r"no result of rank 3: there are results of \[0, 2\]"):
        results[3]


def test_unloadable_value_is_reported_with_its_rank() -> None:
    case = Case(1)
    case.settle((0,), Done(1, Pickled(b"cno_such_module\nThing\n.")))
    with pytest.raises(MeshUsageError, match=r"value of rank 0 cannot be loaded .*ModuleNotFound"):
        case.run.result(0)


# ---- failures


def test_a_failure_has_the_original_exceptions_by_rank() -> None:
    case = Case(3)
    case.fail(2, KeyError("key"), line=0)
    case.fail(0, ValueError("no\nand more"), line=4)
    case.settle((1,), Done(1))
    failure = failure_of(case)
    assert list(failure.exceptions_by_rank) == [0, 2]
    assert type(failure.exceptions_by_rank[0]) is ValueError
    assert failure.exceptions_by_rank[2].args == ("key",)
    assert failure.tracebacks == {0: "Traceback ValueError", 2: "Traceback KeyError"}
    assert str(failure) == (
        "rank 0 raised ValueError: no (line 4); rank 2 raised KeyError: 'key'; rank 1 finished"
    )


@pytest.mark.parametrize("stream", [None, b"cno_such_module\nThing\n.", b"not a pickle", b"N."])
def test_an_exception_that_did_not_travel_is_stood_in_for(stream: bytes | None) -> None:
    case, pickled = Case(1), stream and Pickled(stream)
    case.settle((0,), Failed(1, "OddError", "odd", "Traceback", 2, pickled, "it holds a lock"))
    failure = failure_of(case)
    assert "rank 0 raised OddError: odd" in str(failure)
    stand_in = failure.exceptions_by_rank[0]
    assert isinstance(stand_in, RemoteError)
    assert (stand_in.type_name, stand_in.text) == ("OddError", "odd")
    assert stream or stand_in.why == "it holds a lock"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_system_exit_on_a_rank_does_not_end_the_notebook(error: BaseException) -> None:
    case = Case(1)
    case.fail(0, error)
    assert type(failure_of(case).exceptions_by_rank[0]) is type(error)


def test_after_an_interrupt_a_stopped_run_is_an_interrupt() -> None:
    case = Case(2)
    assert case.run.cancel()
    assert case.interrupted.is_set()
    case.fail(0, KeyboardInterrupt("interrupted in all_reduce"), line=5)
    case.settle((1,), Done(1))
    with pytest.raises(RanksInterrupted, match="KeyboardInterrupt: interrupted in all_reduce"):
        case.run.result(0)
    assert not case.run.cancel(), "it is done"
    assert case.num_interrupts == 1


# ---- waiting


def released() -> Failed:
    where = "waited in barrier"
    text = f"Released: {where} at line 4"
    return Failed(1, "Released", where, text, 4, None, "", True, "barrier", 1.0)


def test_timeout_names_missing_ranks_and_leaves_the_run_alone() -> None:
    case = Case(3, title="cell 7")
    case.settle((1,), Done(1))
    with pytest.raises(TimeoutError, match=r"cell 7 has not ended on ranks 0,2 after 0\.01 s"):
        case.run.result(0.01)
    assert not case.interrupted.is_set()
    with beside(lambda: case.settle((0, 2), Done(1))):
        assert case.run.result(WAIT_S) == {0: None, 1: None, 2: None}


def test_callbacks_see_the_run_done_whichever_of_them_or_the_front_end_fails() -> None:
    case, seen = Case(1), []
    case.run.printer.feed((0,), Output(1, "stdout", "text"), 0.0)
    case.sink.out.close()
    case.run.on_end(lambda: int("a user's callback"))
    case.run.on_end(lambda: seen.append((case.run.done(), case.run.result(0))))
    assert seen == []
    with contextlib.suppress(ValueError):
        case.give(0, 5)
    case.run.on_end(lambda: seen.append((case.run.done(), case.run.result(0))))
    assert seen == [(True, {0: 5})] * 2


# ---- one after the other


def test_iteration_yields_values_in_the_order_of_ends_again_and_again() -> None:
    case = Case(2)
    case.give(1, "early")
    values, others = iter(case.run), iter(case.run)
    assert next(values) == next(others) == (1, "early")
    case.give(0, "late")
    assert [*values] == [(0, "late")]
    assert [*case.run] == [(1, "early"), (0, "late")]


def test_iterating_raises_at_the_first_that_failed_and_names_no_running_ranks() -> None:
    case = Case(3)
    case.give(2, "fine")
    case.fail(0, ValueError("no"))
    values = iter(case.run)
    assert next(values) == (2, "fine")
    with pytest.raises(RankFailure) as caught:
        next(values)
    assert list(caught.value.exceptions_by_rank) == [0]
    assert str(caught.value) == "rank 0 raised ValueError: no (line 3); rank 2 finished"


# ---- asyncio


def test_a_run_can_be_awaited_and_iterated_over_asynchronously() -> None:
    case = Case(2)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, lambda: [case.give(rank, rank * 10) for rank in (1, 0)])
        async with asyncio.timeout(WAIT_S):
            assert [pair async for pair in case.run] == [(1, 10), (0, 0)]
            assert await case.run == {0: 0, 1: 10}

    asyncio.run(main())


def test_giving_up_an_await_or_an_iteration_interrupts_the_ranks() -> None:
    case = Case(1)

    async def main() -> Any:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await case.run
        assert case.interrupted.is_set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                [pair async for pair in case.run]
        assert case.num_interrupts == 2
        case.give(0, 1)  # too late for the rank
        return await case.run

    assert asyncio.run(main()) == {0: 1}


def test_an_interrupted_run_that_a_task_awaits_cancels_the_task_and_not_the_loop() -> None:
    case = Case(1)

    async def await_it() -> None:
        await case.run

    async def main() -> None:
        task = asyncio.create_task(await_it())
        await asyncio.sleep(0)
        case.run.cancel()
        case.fail(0, KeyboardInterrupt())
        with pytest.raises(RanksInterrupted, match="rank 0 raised Keyb") as caught:
            await asyncio.gather(task)
        assert isinstance(caught.value, asyncio.CancelledError)
        assert task.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_interrupt_of_a_call_that_the_program_cancels_is_not_shown(is_cancelled: bool) -> None:
    case = Case(2)
    (case.run.cancel if is_cancelled else case.run.interrupt)()
    for rank in (0, 1):
        case.fail(rank, KeyboardInterrupt())
    assert ("KeyboardInterrupt" in case.sink.text) is not is_cancelled


# ---- the stop button


def test_a_second_stop_interrupts_and_a_third_gives_up() -> None:
    case = Case(2)
    case.settle((0,), Done(1))

    def press() -> None:
        press_stop_once_main_waits_in("result")
        press_stop_once_main_waits_in("result", lambda: case.num_interrupts == 1)
        press_stop_once_main_waits_in("result", lambda: case.num_interrupts == 2)

    with beside(press), pytest.raises(RanksInterrupted, match=r"^rank 1 did not stop: .* killed"):
        case.run.result()
    assert case.num_interrupts == 2


def test_a_stop_is_not_lost_if_the_run_ends_before_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(2)

    def end() -> bool:  # the kernel is asked first whether it ends, which takes a while
        case.settle((0, 1), Done(1))
        return False

    monkeypatch.setattr("cellmesh.controller.run.is_leaving", end)
    with (
        beside(lambda: press_stop_once_main_waits_in("result")),
        pytest.raises(RanksInterrupted, match="ended as it was interrupted"),
    ):
        case.run.result()
    assert case.num_interrupts == 0
    assert case.run.result().list == [None, None]


def test_ranks_that_did_not_stop_are_named_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellmesh.controller.run.STOP_S", 0.01)
    case, noted = Case(2), threading.Event()
    note = case.sink.note
    monkeypatch.setattr(case.sink, "note", lambda text: (note(text), noted.set()))

    def act() -> None:
        press_stop_once_main_waits_in("result")
        assert noted.wait(WAIT_S)
        case.settle((0, 1), Done(1))

    with beside(act):
        case.run.result()
    words = "ranks 0-1 did not stop: press again within 5 s to kill and replace what still runs"
    assert case.sink.text == f"{words}\n"


def test_stop_while_iterating_interrupts_the_ranks() -> None:
    case = Case(2)
    case.give(0, "first")

    def press() -> None:
        press_stop_once_main_waits_in("__iter__", lambda: bool(seen))
        if case.interrupted.wait(1.0):
            case.fail(1, KeyboardInterrupt())

    seen: list[Any] = []
    with beside(press), pytest.raises(KeyboardInterrupt):
        seen.extend(case.run)
    assert seen == [(0, "first")]
    assert case.interrupted.is_set()


@pytest.mark.parametrize("read", [Run.result, Run.wait, Run.gather], ids=lambda read: read.__name__)
def test_a_wait_without_a_limit_is_reported_to_the_core(
    read: Callable[[Run[Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(1)
    monkeypatch.setattr(FakeControl, "begin_wait", lambda *_: case.give(0, 1))
    assert read(case.run)


@pytest.mark.parametrize(
    ("read", "is_raised"),
    [
        (lambda run: run.result(), True),
        (lambda run: asyncio.run(run._wait_async()), True),
        (lambda run: run.gather(), False),
        (lambda run: list(run), False),
        (lambda run: run.wait(0), False),
        (lambda run: run.result(0), False),
    ],
    ids=["result", "await", "gather", "iterate", "wait", "too early"],
)
def test_released_ranks_stand_in_the_failure_that_is_raised_or_else_in_a_block(
    read: Callable[[Run[Any]], Any], is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(3)

    def settle(is_over: Callable[[], bool] = bool, timeout_s: float | None = None) -> bool:
        if timeout_s != 0 and not case.run.done():
            case.fail(1, ValueError("no"))
            for rank in (2, 0):
                case.settle((rank,), released())
        return is_over()

    async def settle_async(is_over: Callable[[], bool]) -> None:
        settle()

    monkeypatch.setattr(case.run, "_wait_until", settle)
    monkeypatch.setattr(case.run, "_await_until", settle_async)
    failure: Exception | None = None
    try:
        read(case.run)
    except (RankFailure, TimeoutError) as error:
        failure = error
    settle()
    if is_raised:
        assert isinstance(failure, RankFailure)
        assert "ranks 0,2 waited in barrier at line 4" in str(failure)
        assert failure.exceptions_by_rank.keys() == failure.tracebacks.keys() == {0, 1, 2}
    block = "" if is_raised else "[0,2] Released: waited in barrier at line 4\n"
    assert case.sink.text == f"[1] Traceback ValueError\n{block}"


# ---- the live line


class StatusSink(Sink):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[str, bool]] = []

    def status(self, text: str, final: bool) -> None:
        self.shown.append((text, final))


def test_the_live_line_replaces_itself_and_goes_at_the_end() -> None:
    sink = StatusSink()
    run: Run[Any] = Run(4, work_item(title="t"), Printer((0, 1), sink), FakeControl())
    states = {rank: RankState(1, 4, 2, 3, "time.sleep", "", "cpu", 0) for rank in (0, 1)}
    run.show_live(states, 5.0)
    run.settle((0,), Parcel(Done(4)), 6.0)
    run.show_live(states, 6.5)
    run.settle((1,), Parcel(Done(4)), 7.0)
    run.finish(7.0)
    run.show_live(states, 7.5)
    both, one = "ranks 0-1 running time.sleep at line 3", "rank 1 running time.sleep at line 3"
    assert sink.shown == [(both, False), (one, False), ("", True)]
