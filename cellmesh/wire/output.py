"""Messages with what a rank prints and displays, and with how much of it was not sent."""

from __future__ import annotations

from typing import Literal

from .verb import Verb

StreamName = Literal["stdout", "stderr"]


DisplayKind = Literal["display", "update", "result", "clear"]


class Output(Verb, frozen=True):
    """Text that a run printed since the last such message; `run` is -1 if it belongs to none."""

    run: int
    stream: StreamName
    text: str


class Skipped(Verb, frozen=True):
    """Number of lines and bytes of a rank's output that exceeded the bound and were not sent; the
    rank's log has them.
    """

    run: int
    num_lines: int
    num_bytes: int


class Display(Verb, frozen=True):
    """A rich display of a rank: `bundle` is JSON ``{"data", "metadata"}``; `display_id` is "" where
    it has none.
    """

    run: int
    kind: DisplayKind
    bundle: bytes
    display_id: str = ""
