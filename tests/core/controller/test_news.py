"""Threads that wait for news, and what Ctrl-C leaves of them."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import types
from typing import Any

import pytest

from cellmesh.controller import news as waits
from cellmesh.controller.news import News, Reply

WAIT_S = 60.0
# What else may run within a wait are finalizers, where an interrupt is lost.
_TRACED = {waits.__file__, contextlib.__file__, __file__}


def test_a_wait_that_ends_by_time_leaves_nothing() -> None:
    news = News()
    assert not news.wait_for(lambda: False, 0.001)
    assert not news._wakers
    assert not news.wait_for(lambda: False, -1.0)


@pytest.mark.parametrize(
    ("make", "wait", "report"),
    [
        (News, lambda news: news.wait_for(lambda: False, 0.0001), News.report),
        (Reply, lambda reply: reply.wait(0.0001), lambda reply: reply.give(1)),
    ],
    ids=["news", "reply"],
)
def test_interrupt_of_a_wait_holds_up_no_report(
    make: Any, wait: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace()  # by which each wait ends at its second look
    monkeypatch.setattr(waits, "time", clock)

    def strike(at: int) -> tuple[Any, list[int]]:
        seen: list[int] = []

        def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
            if frame.f_code.co_filename not in _TRACED:
                return None
            frame.f_trace_opcodes = True
            seen.append(frame.f_lineno)
            if len(seen) == at + 1:
                signal.raise_signal(signal.SIGINT)
            return trace

        return trace, seen

    before = sys.gettrace()
    for at in range(5000):
        made = make()
        clock.monotonic = itertools.chain([0.0, 0.0], itertools.repeat(1.0)).__next__
        trace, seen = strike(at)
        try:
            sys.settrace(trace)
            wait(made)
            was_raised = False
        except KeyboardInterrupt:
            was_raised = True
        finally:
            sys.settrace(before)
        reporting = threading.Thread(target=report, args=(made,), daemon=True)
        reporting.start()
        reporting.join(WAIT_S)
        assert not reporting.is_alive(), f"after an interrupt at line {seen[at]}"
        if len(seen) <= at:
            break
        assert was_raised
    assert 100 < at < 4999


def test_a_reply_is_the_value_or_error_that_was_given() -> None:
    given, failed = Reply[int](), Reply[int]()
    assert not given.wait(0.0)
    with pytest.raises(TimeoutError):
        given.result(0.0)
    given.give(1)
    failed.fail(ValueError("why"))
    assert given.is_given()
    assert given.result() == given.result() == 1
    with pytest.raises(ValueError, match="why"):
        failed.result()
