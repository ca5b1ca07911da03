"""Signals that come while the main thread must not be cut in half, at every instant of it."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cellmesh.wire.held_signals import HeldSignals

FILE = HeldSignals.__enter__.__code__.co_filename


class Alarm(Exception):
    """What a handler of the user's raises."""


def raise_alarm(number: int, frame: object) -> None:
    raise Alarm


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, raise_alarm)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def strike(at: int, number: signal.Signals) -> tuple[Callable[..., Any], list[int]]:
    """A tracer that raises a signal at the nth instruction of what holds signals, or of `work`."""
    seen: list[int] = []

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != FILE and frame.f_code is not work.__code__:
            return None
        frame.f_trace_opcodes = True
        seen.append(frame.f_lineno)
        if len(seen) == at + 1:
            signal.raise_signal(number)
        return trace

    return trace, seen


def work(held: HeldSignals, steps: list[str]) -> None:
    with held:
        steps.append("begun")
        steps.append("ended")
    steps.append("after")


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Alarm)],
    ids=["int", "alarm"],
)
def test_a_signal_is_handled_once_and_never_in_the_middle(
    number: signal.Signals, error: type[BaseException]
) -> None:
    before = sys.gettrace()
    for at in range(5000):
        notes: list[str] = []
        held, steps = HeldSignals(lambda notes=notes: notes.append("noted")), list[str]()  # type: ignore[misc]
        trace, seen = strike(at, number)
        try:
            sys.settrace(trace)
            work(held, steps)
            was_raised = False
        except error:
            was_raised = True
        finally:
            sys.settrace(before)
        if len(seen) <= at:  # there are no more instants
            break
        assert was_raised, f"a signal at line {seen[at]} was lost"
        assert steps in ([], ["begun", "ended"], ["begun", "ended", "after"]), (
            f"cut at line {seen[at]}"
        )
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"line {seen[at]}"
        assert signal.getsignal(signal.SIGALRM) is raise_alarm, f"line {seen[at]}"
        with held:  # it can be used again
            pass
    assert 100 < at < 4999


def test_a_handler_that_does_not_raise_is_called_afterwards() -> None:
    calls: list[str] = []
    signal.signal(signal.SIGALRM, lambda *_: calls.append("handled"))
    with HeldSignals(lambda: calls.append("noted")) as held:
        signal.raise_signal(signal.SIGALRM)
        calls.append("inside")
    assert held is None
    assert calls == ["noted", "inside", "handled"]


def raise_all(numbers: list[signal.Signals]) -> None:
    with HeldSignals(lambda: None):
        for number in numbers:
            signal.raise_signal(number)


def test_each_handler_is_called_whichever_raises() -> None:
    calls: list[int] = []

    def note(number: int, frame: object) -> None:
        calls.append(number)
        raise Alarm

    numbers = [signal.SIGALRM, signal.SIGINT, signal.SIGUSR1, signal.SIGINT]
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for number in numbers:
            signal.signal(number, note)
        with pytest.raises(Alarm):
            raise_all(numbers)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert calls == numbers
