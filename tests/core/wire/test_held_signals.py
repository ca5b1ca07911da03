"""What a rank does under a timer whose handler raises."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from cellmesh.wire.held_signals import hold_back


class Alarm(Exception):
    """Raised by a handler."""


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
