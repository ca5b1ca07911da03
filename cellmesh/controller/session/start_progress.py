"""The progress of a start, as users see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartProgress:
    """How far a start or restart has come.

    Attributes:
        stage: what is being done, in words.
        num_ready: ranks that have answered.
        num_ranks: of how many.
        elapsed_s: since it began, in seconds.
    """

    stage: str
    num_ready: int
    num_ranks: int
    elapsed_s: float
