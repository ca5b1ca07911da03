"""What a rank prints and displays, and how much of it exceeded the bounds."""

from __future__ import annotations

from typing import Literal

from .verb import Verb

StreamName = Literal["stdout", "stderr"]


DisplayKind = Literal["display", "update", "result", "clear"]


class Output(Verb, frozen=True):
    """Text that a run printed (a delta). `run` is -1 where it belongs to none."""

    run: int
    stream: StreamName
    text: str


class Skipped(Verb, frozen=True):
    """How many lines and bytes of output were not sent, as they exceeded the bound; the rank's log
    has them.
    """

    run: int
    num_lines: int
    num_bytes: int


class Display(Verb, frozen=True):
    """A rich display: `bundle` is JSON ``{"data", "metadata"}``; `display_id` is "" where it has
    none.
    """

    run: int
    kind: DisplayKind
    bundle: bytes
    display_id: str = ""
