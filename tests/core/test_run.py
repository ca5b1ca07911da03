"""A run: its outcome as it comes, in every way of waiting for it. No mesh: ranks are told to settle here."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cellmesh.controller.fold import Block, Live
from cellmesh.controller.printer import Printer
from cellmesh.controller.results import Results
from cellmesh.controller.run import Run, describe_state
from cellmesh.controller.sinks import ConsoleSink
from cellmesh.errors import MeshUsageError, RankDied, RankFailure, RanksInterrupted, RemoteError
from cellmesh.wire import payload
from cellmesh.wire.framing import Parcel
from cellmesh.wire.messages import Died, Done, Failed, Output, Pickled, RankState

WAIT_S = 10.0


class Sink(ConsoleSink):
    """Keeps what a run shows."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        super().__init__(self.out, self.out)

    @property
    def text(self) -> str:
        return self.out.getvalue()


class Case:
    """A run and what the link would do to it."""

    def __init__(self, num_ranks: int = 2, single: bool = False, title: str = "the call") -> None:
        self.sink = Sink()
        self.interrupted = threading.Event()
        ranks = range(num_ranks)
        self.run: Run[Any] = Run(1, ranks, single, Printer(ranks, self.sink), self.interrupted.set, title)
        self._left = set(ranks)

    def settle(self, ranks: Sequence[int], verb: Any, buffers: Sequence[Any] = ()) -> None:
        self.run.settle(tuple(ranks), Parcel(verb, tuple(buffers)), 0.0)
        self._left -= set(ranks)
        if not self._left:
            self.run.finish(0.0)

    def give(self, rank: int, value: Any) -> None:
        pickled, buffers = payload.dumps(value, "value")
        self.settle((rank,), Done(1, pickled), [bytearray(buffer) for buffer in buffers])

    def fail(self, rank: int, error: BaseException, line: int = 3) -> None:
        pickled, buffers = payload.dumps(error, "error")
        kind = type(error).__name__
        self.settle((rank,), Failed(1, kind, str(error), f"Traceback {kind}", line, pickled), buffers)

    def die(self, rank: int) -> None:
        self.settle((rank,), Died(rank, "killed by SIGKILL", "last words"))


@contextlib.contextmanager
def beside(function: Callable[[], None]) -> Iterator[None]:
    """Run a function in another thread; wait for it at the end."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def press_stop_once_main_waits_in(name: str, until: Callable[[], bool] = lambda: True) -> None:
    """Send SIGINT to the main thread once it is in this function of `Run` (call it from another thread)."""
    main = threading.main_thread()
    assert main.ident is not None
    gave_up_at = time.monotonic() + WAIT_S
    never = threading.Event()
    while time.monotonic() < gave_up_at:
        frame = sys._current_frames().get(main.ident)
        while frame is not None:
            code = frame.f_code
            if code.co_name == name and code.co_filename.endswith("controller/run.py") and until():
                signal.pthread_kill(main.ident, signal.SIGINT)
                return
            frame = frame.f_back
        never.wait(0.002)


# ---- values


def test_a_result_has_every_ranks_value() -> None:
    case = Case(3)
    for rank in (2, 0, 1):
        case.give(rank, {"rank": rank})
    result = case.run.result(0)
    assert type(result) is Results
    assert result == {rank: {"rank": rank} for rank in range(3)}
    assert list(result) == [0, 1, 2]


def test_a_run_without_values_gives_none() -> None:
    case = Case()
    case.settle((0, 1), Done(1))
    assert case.run.result(0) == {0: None, 1: None}


def test_a_single_ranks_result_is_its_value() -> None:
    case = Case(1, single=True)
    case.give(0, 42)
    assert case.run.result(0) == 42


def test_a_value_is_loaded_once() -> None:
    case = Case(1)
    case.give(0, [1])
    assert case.run.result(0)[0] is case.run.result(0)[0]


def test_ranks_that_answer_alike_have_values_of_their_own() -> None:
    case = Case(2)
    pickled, _ = payload.dumps([1], "value")
    case.settle((0, 1), Done(1, pickled))
    first, second = case.run.result(0).list
    assert first == second == [1]
    assert first is not second


def test_a_value_that_cannot_be_loaded_is_told_with_its_rank() -> None:
    case = Case(1)
    case.settle((0,), Done(1, Pickled(b"cno_such_module\nThing\n.")))
    with pytest.raises(MeshUsageError, match=r"the value of rank 0 cannot be loaded .*ModuleNotFoundError"):
        case.run.result(0)


# ---- waiting


def test_a_run_tells_how_far_it_is() -> None:
    case = Case(3, title="cell 7")
    assert not case.run.done()
    assert case.run.waiting_ranks() == [0, 1, 2]
    assert repr(case.run) == "<cell 7 on ranks 0-2: waits for ranks 0-2>"
    case.settle((0, 2), Done(1))
    assert case.run.waiting_ranks() == [1]
    assert not case.run.wait(0)
    case.settle((1,), Done(1))
    assert case.run.done()
    assert case.run.wait(0)
    assert repr(case.run) == "<cell 7 on ranks 0-2: done>"


def test_a_time_out_names_who_is_missing_and_leaves_the_run_alone() -> None:
    case = Case(3, title="cell 7")
    case.settle((1,), Done(1))
    with pytest.raises(TimeoutError, match=r"cell 7 has not ended on ranks 0,2 after 0\.01 s"):
        case.run.result(0.01)
    assert not case.interrupted.is_set()
    case.settle((0, 2), Done(1))
    assert case.run.result(0) == {0: None, 1: None, 2: None}


def test_result_waits_for_the_last_rank() -> None:
    case = Case(2)
    case.give(0, "zero")
    with beside(lambda: case.give(1, "one")):
        assert case.run.result(WAIT_S) == {0: "zero", 1: "one"}


def test_waiting_raises_nothing_that_happened_on_ranks() -> None:
    case = Case(1)
    case.fail(0, ValueError("no"))
    assert case.run.wait(0)


def test_callbacks_are_called_at_the_end_or_at_once() -> None:
    case, called = Case(1), []
    case.run.on_end(lambda: called.append("before"))
    assert called == []
    case.settle((0,), Done(1))
    assert called == ["before"]
    case.run.on_end(lambda: called.append("after"))
    assert called == ["before", "after"]


def test_a_callback_sees_the_run_done() -> None:
    case, seen = Case(1), []
    case.run.on_end(lambda: seen.append((case.run.done(), case.run.result(0))))
    case.give(0, 5)
    assert seen == [(True, {0: 5})]


def test_a_callback_that_fails_keeps_no_other_from_being_called() -> None:
    case, called = Case(1), []

    def fail() -> None:
        raise ValueError("a user's callback")

    case.run.on_end(fail)
    case.run.on_end(lambda: called.append("second"))
    with contextlib.suppress(ValueError):
        case.settle((0,), Done(1))
    assert called == ["second"]


def test_a_front_end_that_fails_does_not_keep_the_run_from_ending() -> None:
    case, called = Case(1), []
    case.run.on_end(lambda: called.append("ended"))
    case.run.printer.feed((0,), Output(1, "stdout", "text"), 0.0)
    case.sink.out.close()
    with contextlib.suppress(ValueError):
        case.settle((0,), Done(1))
    assert case.run.done()
    assert called == ["ended"]


# ---- output


def test_output_is_shown_before_the_run_is_done() -> None:
    case = Case(1)
    case.run.printer.feed((0,), Output(1, "stdout", "last words"), 0.0)
    seen: list[str] = []
    case.run.on_end(lambda: seen.append(case.sink.text))
    case.settle((0,), Done(1))
    assert seen == ["[0] last words\n"]


def test_an_exception_is_shown_as_it_comes() -> None:
    case = Case(2)
    case.fail(1, ValueError("no"))
    assert not case.run.done()
    case.run.printer.show(1.0)
    assert case.sink.text == "[1] Traceback ValueError\n"


# ---- failures


def test_a_failure_has_the_original_exceptions_by_rank() -> None:
    case = Case(3)
    case.fail(2, KeyError("key"))
    case.fail(0, ValueError("no"))
    case.settle((1,), Done(1))
    with pytest.raises(RankFailure) as caught:
        case.run.result(0)
    failure = caught.value
    assert list(failure.exceptions_by_rank) == [0, 2]
    assert type(failure.exceptions_by_rank[0]) is ValueError
    assert failure.exceptions_by_rank[2].args == ("key",)
    assert failure.tracebacks == {0: "Traceback ValueError", 2: "Traceback KeyError"}


def test_a_failures_summary_says_who_raised_what_and_where() -> None:
    case = Case(5)
    for rank in (1, 2):
        case.fail(rank, ValueError("no\nand more"), line=4)
    case.fail(3, KeyError(), line=0)
    case.settle((0, 4), Done(1))
    with pytest.raises(RankFailure) as caught:
        case.run.raise_failure()
    assert str(caught.value) == (
        "ranks 1-2 raised ValueError: no (line 4); rank 3 raised KeyError; ranks 0,4 finished"
    )


def test_a_death_is_a_failure_with_its_reason_and_last_words() -> None:
    case = Case(2)
    case.settle((0,), Done(1))
    case.die(1)
    with pytest.raises(RankFailure, match="rank 1 killed by SIGKILL; rank 0 finished") as caught:
        case.run.result(0)
    died = caught.value.exceptions_by_rank[1]
    assert isinstance(died, RankDied)
    assert (died.rank, died.reason, died.last_output) == (1, "killed by SIGKILL", "last words")
    assert caught.value.tracebacks == {}


def test_an_exception_that_did_not_travel_is_stood_in_for() -> None:
    case = Case(1)
    case.settle((0,), Failed(1, "OddError", "odd", "Traceback", 2, None, "it holds a lock"))
    with pytest.raises(RankFailure, match="rank 0 raised OddError: odd") as caught:
        case.run.result(0)
    stand_in = caught.value.exceptions_by_rank[0]
    assert isinstance(stand_in, RemoteError)
    assert (stand_in.type_name, stand_in.text, stand_in.why) == ("OddError", "odd", "it holds a lock")


@pytest.mark.parametrize(
    "stream", [b"cno_such_module\nThing\n.", b"not a pickle", b"N."], ids=["import", "junk", "no exception"]
)
def test_an_exception_that_does_not_load_is_stood_in_for(stream: bytes) -> None:
    case = Case(1)
    case.settle((0,), Failed(1, "OddError", "odd", "Traceback", 2, Pickled(stream)))
    with pytest.raises(RankFailure) as caught:
        case.run.result(0)
    assert isinstance(caught.value.exceptions_by_rank[0], RemoteError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_ends_a_program_on_a_rank_does_not_end_the_notebook(error: BaseException) -> None:
    case = Case(1)
    case.fail(0, error)
    with pytest.raises(RankFailure) as caught:
        case.run.result(0)
    assert type(caught.value.exceptions_by_rank[0]) is type(error)


def test_after_an_interrupt_a_stopped_run_is_an_interrupt() -> None:
    case = Case(2)
    case.run.interrupt()
    assert case.interrupted.is_set()
    case.fail(0, KeyboardInterrupt("interrupted in all_reduce"), line=5)
    case.settle((1,), Done(1))
    with pytest.raises(RanksInterrupted, match=r"rank 0 raised KeyboardInterrupt: interrupted in all_reduce"):
        case.run.result(0)


def test_an_interrupt_that_came_too_late_is_none() -> None:
    case = Case(1)
    case.run.interrupt()
    case.give(0, 1)
    assert case.run.result(0) == {0: 1}


def test_an_error_of_the_users_after_an_interrupt_is_their_error() -> None:
    case = Case(1)
    case.run.interrupt()
    case.fail(0, ValueError("no"))
    with pytest.raises(RankFailure):
        case.run.result(0)


# ---- where the others are


def state(run: int = 1, line: int = 5, where: str = "m.f", collective: str = "") -> RankState:
    return RankState(1, run, 3, line, where, collective, "cpu", 0)


def test_the_user_is_told_who_waits_where() -> None:
    case = Case(4)
    case.fail(3, ValueError("no"))
    waits = {rank: state(collective="all_reduce") for rank in (0, 2)}
    case.run.report_waiting({**waits, 1: state(line=9)})
    assert (
        "rank 3 has ended; ranks 0,2 in all_reduce at line 5; rank 1 running m.f at line 9. The stop button"
        in case.sink.text
    )


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (state(run=-1), "idle"),
        (state(), "running m.f at line 5"),
        (state(line=0), "running m.f"),
        (state(where="__main__.<module>"), "running at line 5"),
        (state(collective="all_reduce"), "in all_reduce at line 5"),
        (state(collective="barrier", line=0), "in barrier"),
    ],
)
def test_states_in_words(seen: RankState, words: str) -> None:
    assert describe_state(seen) == words


# ---- one after the other


def test_values_come_in_the_order_in_which_ranks_end() -> None:
    case = Case(3)
    for rank in (2, 0, 1):
        case.give(rank, rank * 10)
    assert list(case.run) == [(2, 20), (0, 0), (1, 10)]


def test_values_come_while_other_ranks_still_run() -> None:
    case = Case(2)
    case.give(1, "early")
    values = iter(case.run)
    assert next(values) == (1, "early")
    case.give(0, "late")
    assert next(values) == (0, "late")
    with pytest.raises(StopIteration):
        next(values)


def test_iterating_raises_at_the_first_that_failed() -> None:
    case = Case(2)
    case.give(1, "fine")
    case.fail(0, ValueError("no"))
    values = iter(case.run)
    assert next(values) == (1, "fine")
    with pytest.raises(RankFailure) as caught:
        next(values)
    assert list(caught.value.exceptions_by_rank) == [0]


def test_what_iterating_raises_says_nothing_of_ranks_that_still_run() -> None:
    case = Case(3)
    case.give(2, "fine")
    case.fail(0, ValueError("no"))
    values = iter(case.run)
    next(values)
    with pytest.raises(RankFailure, match=r"^rank 0 raised ValueError: no \(line 3\)") as caught:
        next(values)
    assert "finished" not in str(caught.value).replace("rank 2 finished", "")


def test_a_run_may_be_iterated_over_again() -> None:
    case, again = Case(2), []
    case.give(1, "one")
    case.give(0, "zero")
    assert list(case.run) == [(1, "one"), (0, "zero")]
    # In a thread, which may wait for ever without holding up the tests.
    thread = threading.Thread(target=lambda: again.extend(case.run), daemon=True)
    thread.start()
    thread.join(1.0)
    assert again == [(1, "one"), (0, "zero")]


def test_two_may_iterate_over_a_run_at_once() -> None:
    case = Case(2)
    first, second = iter(case.run), iter(case.run)
    case.give(1, "one")
    case.give(0, "zero")
    assert next(first) == (1, "one")
    assert next(second) == (1, "one")


# ---- asyncio


def test_a_run_can_be_awaited() -> None:
    case = Case(2)

    async def main() -> Any:
        assert not case.run.done()
        asyncio.get_running_loop().run_in_executor(None, lambda: [case.give(rank, rank) for rank in (0, 1)])
        return await asyncio.wait_for(case.run, WAIT_S)

    assert asyncio.run(main()) == {0: 0, 1: 1}


def test_a_run_that_is_done_can_be_awaited_again_and_again() -> None:
    case = Case(1)
    case.give(0, "value")

    async def main() -> None:
        assert await case.run == {0: "value"}
        assert await case.run == {0: "value"}

    asyncio.run(main())


def test_awaiting_raises_what_happened_on_ranks() -> None:
    case = Case(1)
    case.fail(0, ValueError("no"))

    async def main() -> Any:
        return await case.run

    with pytest.raises(RankFailure):
        asyncio.run(main())


def test_giving_up_an_await_interrupts_the_ranks() -> None:
    case = Case(1)

    async def main() -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_wait_for(case.run), 0.01)
        assert case.interrupted.is_set()
        case.give(0, 1)  # too late for the rank
        return await case.run

    assert asyncio.run(main()) == {0: 1}


def test_a_run_may_outlive_the_loop_that_awaited_it() -> None:
    case, called = Case(1), []

    async def main() -> None:
        await asyncio.wait_for(_wait_for(case.run), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    case.run.on_end(lambda: called.append("ended"))
    with contextlib.suppress(RuntimeError):
        case.give(0, 1)
    assert called == ["ended"]


def test_values_can_be_iterated_over_asynchronously() -> None:
    case = Case(2)

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, lambda: [case.give(rank, rank * 10) for rank in (1, 0)])
        return [pair async for pair in case.run]

    assert asyncio.run(main()) == [(1, 10), (0, 0)]


def test_giving_up_an_asynchronous_iteration_interrupts_the_ranks_and_hangs_nowhere() -> None:
    case = Case(1)

    async def iterate() -> None:
        async for _ in case.run:
            pass

    def give_up() -> None:
        with contextlib.suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(iterate(), 0.01))

    thread = threading.Thread(target=give_up)
    thread.start()
    thread.join(1.0)
    hangs = thread.is_alive()
    case.settle((0,), Done(1))  # lets go of it
    thread.join(WAIT_S)
    assert not hangs
    assert case.interrupted.is_set()


async def _wait_for(run: Run[Any]) -> Any:
    return await run


# ---- the stop button


def test_stop_while_waiting_interrupts_the_ranks_and_waits_for_them() -> None:
    case = Case(2)

    def press() -> None:
        press_stop_once_main_waits_in("result")
        assert case.interrupted.wait(WAIT_S)
        for rank in (0, 1):
            case.fail(rank, KeyboardInterrupt("interrupted in sleep"))

    with beside(press), pytest.raises(RanksInterrupted, match="ranks 0-1 raised KeyboardInterrupt"):
        case.run.result()
    assert case.interrupted.is_set()


def test_a_second_stop_does_not_wait_for_stubborn_ranks() -> None:
    case = Case(2)
    case.settle((0,), Done(1))

    def press() -> None:
        press_stop_once_main_waits_in("result")
        press_stop_once_main_waits_in("_stop_and_wait", case.interrupted.is_set)

    with beside(press), pytest.raises(RanksInterrupted, match="rank 1 did not stop: `%dist_restart`"):
        case.run.result()


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


def test_blocks_reach_the_sink_in_order() -> None:
    shown: list[Block | Live] = []

    class Keeps(Sink):
        def show(self, blocks: Sequence[Block | Live]) -> None:
            shown.extend(blocks)

    printer = Printer((0,), Keeps())
    run: Run[Any] = Run(1, (0,), False, printer, lambda: None, "t")
    printer.feed((0,), Output(1, "stdout", "a\nb\n"), 0.0)
    run.settle((0,), Parcel(Done(1)), 0.0)
    run.finish(0.0)
    assert [block.item.text for block in shown] == ["a", "b"]
