"""Handlers that raise: those of signals are held back, those of a loop are reported."""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cellmesh.wire.faults import Faults
from cellmesh.wire.held_signals import HeldSignals, hold_back
from cellmesh.workers.agent.events import Events, Order

FILE = HeldSignals.__enter__.__code__.co_filename


class Alarm(Exception):
    """Raised by a handler."""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGALRM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
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

    with pytest.raises(KeyboardInterrupt):  # which is not held
        hold_back(lambda: signal.raise_signal(signal.SIGINT), lambda error: None)
    assert hold_back(act, reports.append) == "done"
    assert calls
    assert [type(error) for error in reports] == [Alarm]
    assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    with pytest.raises(Alarm):  # the handler is back
        signal.raise_signal(signal.SIGALRM)


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


def fail(*args: object) -> None:
    raise ValueError("boom")


def test_a_handler_that_raises_is_reported_with_its_place_and_the_others_are_called() -> None:
    reports: list[str] = []
    events, heard = Events(Faults("the loop", reports.append)), []
    pipes = [os.pipe() for _ in range(3)]
    try:
        for index, (read_end, write_end) in enumerate(pipes):
            events.add(read_end, Order(index), fail if index == 1 else heard.append)
            os.write(write_end, b"x")
        for _ in range(5):
            events.wait(0)
        assert len(heard) == 10
    finally:
        for pair in pipes:
            for number in pair:
                os.close(number)
    assert len(reports) == 3, "one place is reported a few times only"
    assert all("the loop met an error at" in one and f"{__file__}:" in one for one in reports)
    assert all(one.endswith("ValueError: boom") for one in reports)
