"""Live plots of what ranks log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...controller.ranks import Ranks


def show_plot(ranks: Ranks, names: Sequence[str], mean: bool = False) -> Any:
    """What ``%dist_plot`` shows."""
    raise NotImplementedError
