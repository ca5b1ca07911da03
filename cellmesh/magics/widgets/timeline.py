"""The timeline of the last cells."""

from __future__ import annotations

from typing import Any

from ...controller.ranks import Ranks


def show_timeline(ranks: Ranks, num_cells: int, trace: str | None) -> Any:
    """What ``%dist_timeline`` shows."""
    raise NotImplementedError
