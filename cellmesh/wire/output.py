"""Messages with a rank's text, displays and progress bars, and with how much was not sent."""

from __future__ import annotations

from typing import Literal

from .verb import Verb

StreamName = Literal["stdout", "stderr"]
DisplayKind = Literal["display", "update", "result", "clear"]
BarState = Literal["open", "done", "failed", "stopped", "removed"]


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


class Bar(Verb, frozen=True):
    """The state of a progress bar of user code.

    Attributes:
        run: the run that it was made in.
        bar: its number on the rank; what says that it is open no more is the last of that number.
        title: what stands before it.
        done, total: in `unit`; a total of 0 is not known.
        elapsed_s: since it began.
        unit: of what is counted.
        divisor: numbers are shown with k, M, G of this base (1000 or 1024); 0 for plain ones.
        rate: units a second, lately; 0 is not known.
        note: what stands behind it (tqdm's postfix).
        state: whether it goes on. `stopped`: it was interrupted or released.
        num_outer: how many bars were open round it.
    """

    run: int
    bar: int
    title: str
    done: float
    total: float
    elapsed_s: float
    unit: str = "it"
    divisor: int = 0
    rate: float = 0.0
    note: str = ""
    state: BarState = "open"
    num_outer: int = 0
