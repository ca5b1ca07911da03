"""What a rank does under a timer whose handler raises."""

from __future__ import annotations

import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cellmesh.wire.held_signals import HeldSignals, hold_back

FILE = HeldSignals.__enter__.__code__.co_filename


class Alarm(Exception):
    """Raised by a handler."""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGALRM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """The calls of a handler that raises every two milliseconds."""
    calls: list[int] = []

    def handler(number: int, frame: object) -> None:
        calls.append(number)
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    yield calls
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_raising_timer_cuts_nothing_and_is_reported_afterwards(calls: list[int]) -> None:
    reports: list[BaseException] = []

    def act() -> str:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            assert not calls
        signal.setitimer(signal.ITIMER_REAL, 0)
        return "done"

    assert hold_back(act, reports.append) == "done"
    assert calls
    assert [type(error) for error in reports] == [Alarm]
    assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    with pytest.raises(Alarm):  # the handler is back
        signal.raise_signal(signal.SIGALRM)


def test_an_error_of_its_own_is_raised_all_the_same(calls: list[int]) -> None:
    def act() -> None:
        signal.raise_signal(signal.SIGALRM)
        raise ValueError("own")

    reports: list[BaseException] = []
    with pytest.raises(ValueError, match="own"):
        hold_back(act, reports.append)
    assert [type(error) for error in reports] == [Alarm]


def test_an_interrupt_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            hold_back(lambda: signal.raise_signal(signal.SIGINT), lambda error: None)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- at every instant


def strike(at: int) -> tuple[Callable[..., Any], list[int]]:
    """A tracer that raises SIGALRM at the nth instruction of what holds signals, or of `work`."""
    seen: list[int] = []

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != FILE and frame.f_code is not work.__code__:
            return None
        frame.f_trace_opcodes = True
        seen.append(frame.f_lineno)
        if len(seen) == at + 1:
            signal.raise_signal(signal.SIGALRM)
        return trace

    return trace, seen


def work(held: HeldSignals, steps: list[str]) -> None:
    with held:
        steps.append("begun")
        steps.append("ended")
    steps.append("after")


def test_a_signal_is_handled_once_and_never_in_the_middle() -> None:
    def raise_alarm(number: int, frame: object) -> None:
        raise Alarm

    signal.signal(signal.SIGALRM, raise_alarm)
    before = sys.gettrace()
    for at in range(5000):
        held, steps = HeldSignals(), list[str]()
        trace, seen = strike(at)
        try:
            sys.settrace(trace)
            work(held, steps)
            was_raised = False
        except Alarm:
            was_raised = True
        finally:
            sys.settrace(before)
        if len(seen) <= at:  # there are no more instants
            break
        assert was_raised, f"a signal at line {seen[at]} was lost"
        assert steps in ([], ["begun", "ended"], ["begun", "ended", "after"]), (
            f"cut at line {seen[at]}"
        )
        assert signal.getsignal(signal.SIGALRM) is raise_alarm, f"line {seen[at]}"
    assert 100 < at < 4999


def test_a_handler_that_does_not_raise_is_called_afterwards() -> None:
    calls: list[str] = []
    signal.signal(signal.SIGALRM, lambda *_: calls.append("handled"))
    with HeldSignals():
        signal.raise_signal(signal.SIGALRM)
        calls.append("inside")
    assert calls == ["inside", "handled"]


def test_each_handler_is_called_whichever_raises() -> None:
    calls: list[int] = []

    def note(number: int, frame: object) -> None:
        calls.append(number)
        raise Alarm

    def raise_all() -> None:
        with HeldSignals():
            for number in numbers:
                signal.raise_signal(number)

    numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGALRM]
    for number in numbers:
        signal.signal(number, note)
    with pytest.raises(Alarm):
        raise_all()
    assert calls == numbers
