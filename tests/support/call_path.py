"""Counts the Python functions of cellmesh that a call of nothing passes in the controller."""

from __future__ import annotations

import sys
import threading
from typing import Any

import cellmesh as cm
from tests.support.import_graph import PACKAGE

NUM_CALLS = 200


def noop() -> None:
    """The work of the call; it is sent by value, as a function of a notebook."""


noop.__module__ = "__main__"


def call_path() -> tuple[int, int]:
    """The modules and the calls of functions of one warm call on one rank: the least of many."""
    passed: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            passed.append(frame.f_code.co_filename)

    threading.setprofile(note)  # the link's thread as well
    try:
        with cm.start(1) as mesh:
            counts = []
            sys.setprofile(note)
            for _ in range(NUM_CALLS):
                passed.clear()
                mesh.run(noop)
                counts.append((len(set(passed)), len(passed)))
            sys.setprofile(None)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return min(modules for modules, _ in counts), min(calls for _, calls in counts)
