"""The message in which a rank sends the state of a progress bar of user code."""

from __future__ import annotations

from typing import Literal

from .verb import Verb

BarState = Literal["open", "done", "failed", "stopped", "removed"]


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
