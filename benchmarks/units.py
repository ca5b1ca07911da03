"""How figures are shown. Values are kept in seconds, bytes and calls per second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit to show values in.

    Args:
        symbol: after the number.
        scale: what one of it is in the base unit.
        digits: after the point.
    """

    symbol: str
    scale: float
    digits: int

    def show(self, value: float | None) -> str:
        """The value in this unit; a dash for none."""
        if value is None:
            return "-"
        return f"{value / self.scale:,.{self.digits}f} {self.symbol}"


SECONDS = Unit("s", 1, 2)
MILLISECONDS = Unit("ms", 1e-3, 2)
MICROSECONDS = Unit("us", 1e-6, 0)
MEGABYTES = Unit("MB", 1e6, 0)
PER_SECOND = Unit("/s", 1, 0)
TIMES = Unit("x", 1, 2)
