"""The tensor inspector."""

from __future__ import annotations

from typing import Any

from ...controller.ranks import Ranks
from ..options import Given
from ..tables import facts_table


def inspect_value(ranks: Ranks, expression: str, options: Given) -> Any:
    """What ``%dist_inspect`` shows."""
    return facts_table(expression, ranks.inspect(expression))
