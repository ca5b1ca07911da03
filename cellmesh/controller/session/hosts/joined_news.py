"""Joins what the agents of several hosts say of one start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ....wire.messages import Progress

# The stages of a start, in their order.
_STAGES = ("importing torch", "forking ranks", "process group")


def join_progress(said: Sequence[Progress | None]) -> Progress:
    """Return how far a start has come on all hosts: as far as on the slowest one.

    Args:
        said: by each host; None by one that has said nothing yet.
    """
    stages = [progress.stage if progress else _STAGES[0] for progress in said]
    num_ready = sum(progress.num_ready for progress in said if progress is not None)
    return Progress(min(stages, key=_order_of), num_ready)


def _order_of(stage: str) -> int:
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)
