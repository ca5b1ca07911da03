"""What ``%dist_who`` shows."""

from __future__ import annotations

from ..controller.ranks import Ranks
from .tables import Table


def names_table(ranks: Ranks, pattern: str) -> Table:
    """The ranks' names as a table."""
    raise NotImplementedError
