"""When an inspection is looked at again: after cells, while they run, in terminals, and when nobody
looks.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cellmesh.controller.inspect import Inspection
from cellmesh.magics.widgets.auto_refresh import AutoRefresh, Occasion, Worker
from cellmesh.magics.widgets.inspector.inspector import Inspector
from tests.support.inspected_ranks import LocalAnswers


class Events:
    """A shell's events."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[..., None]]] = {
            "pre_run_cell": [],
            "post_run_cell": [],
        }

    def register(self, name: str, callback: Callable[..., None]) -> None:
        self.callbacks[name].append(callback)

    def unregister(self, name: str, callback: Callable[..., None]) -> None:
        self.callbacks[name].remove(callback)

    def trigger(self, name: str) -> None:
        for callback in list(self.callbacks[name]):
            callback(None)


class Looks:
    """Counts what is looked at, and lets a test wait for it."""

    def __init__(self) -> None:
        self.seen = True
        self.busy = False
        self.events = Events()
        self._looks: list[Occasion] = []
        self._condition = threading.Condition()
        self.refresher = AutoRefresh(
            self._look, lambda: self.busy, lambda: self.seen, self.events, 0.001
        )

    def _look(self, occasion: Occasion) -> None:
        with self._condition:
            self._looks.append(occasion)
            self._condition.notify_all()

    def wait_for(self, occasion: Occasion, num: int = 1) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self._looks.count(occasion) >= num, 10)

    @property
    def num(self) -> int:
        return len(self._looks)


def shown_max(inspector: Inspector) -> str:
    detail = inspector.widget.detail
    return str(detail["rows"][0][detail["headers"].index("max")])


@pytest.mark.parametrize("took_s", [0.1, 3.0])
def test_values_that_run_code_refresh_automatically_only_if_fast(took_s: float) -> None:
    class TimedAnswers(LocalAnswers):
        def inspect(self, is_beside: bool) -> Inspection:
            return dataclasses.replace(super().inspect(is_beside), took_s=took_s)

    names = {"w": torch.zeros(2)}
    plain = Inspector(beside := LocalAnswers("w", {0: names}))
    inspector = Inspector(answers := TimedAnswers("w + 1", {0: names}))
    names["w"] = torch.full((2,), 3.0)
    beside.asked.clear()
    plain.refresh("after")
    # Ranks answer beside their main threads, which may begin the next cell.
    assert all(is_beside for _, _, is_beside in beside.asked)
    inspector.refresh("after")
    is_short = took_s < 1
    assert shown_max(inspector) == ("4" if is_short else "1")
    assert inspector.widget.summary["notices"] == (
        []
        if is_short
        else [
            "not looked at again: that took 3.0 s, and the next cell would wait for it; press "
            "refresh"
        ]
    )
    answers.busy = True
    inspector.refresh("after")
    assert "the rank is busy" in inspector.widget.summary["notices"][0]
    assert shown_max(inspector) == ("4" if is_short else "1"), "values stay shown"
    answers.busy = False
    inspector.refresh()
    assert shown_max(inspector) == "4"
    assert inspector.widget.summary["notices"] == []


def test_a_page_that_was_reloaded_is_no_view_any_more() -> None:
    inspector = Inspector(
        LocalAnswers("w", {0: {"w": torch.ones(3)}}), watch=True, events=(events := Events())
    )
    assert inspector.is_seen()

    def say(kind: str, view: str, **more: Any) -> None:
        inspector._hear(inspector.widget, {"ask": kind, "view": view, "id": 1, **more}, [])

    say("hello", "first")
    say("seen", "first", is_visible=True)
    say("hello", "second")  # the first has not said goodbye
    assert not inspector.is_seen()
    say("seen", "second", is_visible=True)
    assert inspector.is_seen()
    assert events.callbacks["post_run_cell"]
    say("gone", "second")
    assert not events.callbacks["post_run_cell"]
    say("hello", "third")
    assert events.callbacks["post_run_cell"]


def test_hidden_view_refreshes_when_it_is_shown() -> None:
    looks = Looks()
    looks.refresher.set(watches=True, follows=False)
    looks.seen = False
    looks.events.trigger("pre_run_cell")
    looks.events.trigger("post_run_cell")
    assert looks.num == 0
    looks.seen = True
    looks.refresher.note_seen()
    looks.wait_for("after")
    looks.refresher.note_seen()  # nothing has changed since
    assert looks.num == 1
    looks.refresher.now()
    looks.wait_for("asked")


def test_follow_refreshes_while_ranks_are_busy_and_once_after() -> None:
    looks = Looks()
    looks.refresher.set(watches=False, follows=True)
    looks.busy = True
    looks.events.trigger("pre_run_cell")
    looks.wait_for("during", 3)
    looks.events.trigger("post_run_cell")  # its run goes on in the background
    looks.wait_for("during", looks.num + 2)
    looks.busy = False
    looks.wait_for("after")
    follower = looks.refresher._follower
    if follower is not None:
        follower.join(10)
    assert looks.refresher._follower is None


def test_worker_goes_on_after_a_failed_task_with_the_newest_of_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: queue.SimpleQueue[type[BaseException]] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.put(args.exc_type))
    worker, begun, go, done = Worker(), threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert go.wait(10)
        raise KeyError("rank")

    did: list[str] = []
    worker.do(fail)
    assert begun.wait(10)
    worker.do(lambda: did.append("second"), "key")
    worker.do(lambda: did.append("third"), "key")  # in the place of the second
    worker.do(done.set)
    go.set()
    assert done.wait(10)
    assert failed.get(timeout=10) is KeyError
    assert did == ["third"]
