"""What a notebook shows of a mesh: how many go on, and how they end."""

from __future__ import annotations

import queue
import threading

import pytest

from cellmesh.controller.live_views import LiveViews


class View:
    """Notes calls, and whether they are on the main thread."""

    def __init__(self, name: str, told: queue.SimpleQueue[tuple[str, str, bool]]) -> None:
        self._name = name
        self._told = told

    def freeze(self, why: str) -> None:
        self._told.put((self._name, why, threading.current_thread() is threading.main_thread()))

    def close(self) -> None:
        self.freeze("closed")


def test_the_oldest_of_a_kind_stands_still_and_then_is_let_go_of() -> None:
    told: queue.SimpleQueue[tuple[str, str, bool]] = queue.SimpleQueue()
    shown = LiveViews(max_live=2, max_still=1)
    for name in ("a", "b"):
        shown.add("plots", View(name, told))
    shown.add("tables", View("other", told))
    shown.add("plots", View("c", told))
    assert told.get(timeout=10) == ("a", "no longer updated: newer plots are", False)
    shown.add("plots", View("d", told))
    assert told.get(timeout=10) == ("b", "no longer updated: newer plots are", False)
    assert told.get(timeout=10) == ("a", "closed", False)
    shown.end("the mesh has ended")
    assert [told.get(timeout=10)[:2] for _ in range(3)] == [
        (name, "the mesh has ended") for name in ("c", "d", "other")
    ]
    shown.add("plots", View("late", told))
    assert told.get(timeout=10)[:2] == ("late", "the mesh has ended")
    assert told.empty()


def test_a_view_is_headed_by_its_mesh_where_there_are_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = LiveViews()
    shown.print_heading()
    for text in ("", "generator:"):
        shown.heading = lambda is_first, text=text: text
        shown.print_heading()
    assert capsys.readouterr().out == "generator:\n"
