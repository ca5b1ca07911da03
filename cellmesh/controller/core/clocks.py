"""How far the clocks of hosts are apart, from exchanges with their agents. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Exchanges at first, in quick succession, and then for good, as clocks drift apart.
NUM_FIRST, FIRST_INTERVAL_S, INTERVAL_S = 8, 0.02, 5.0
# Of how many exchanges, the last ones, the best is used: older ones are off by the clocks' drift.
_NUM_KEPT = 8


@dataclass(frozen=True)
class ClockOffset:
    """How far the clock of a host is ahead of that of the notebook's host.

    Attributes:
        host: as the user named it.
        offset_s: what has been subtracted from the host's times.
        error_s: by how much that may be wrong, either way.
    """

    host: str
    offset_s: float
    error_s: float

    def describe(self) -> str:
        """Return text such as ``b: +1.203 s ± 0.2 ms``."""
        offset_s = round(self.offset_s, 4) + 0.0  # which makes 0 of -0
        return f"{self.host}: {offset_s:+,.4f} s ± {self.error_s * 1e3:.2g} ms"


class ClockComparison:
    """Compares the monotonic clock of one host with that of this process's host, by exchanges: this
    side sends a message, the agent answers with its clock.

    The agent reads its clock after the message was sent and before the answer arrived, however
    long each took; so the offset from the middle between the two is wrong by half the round trip
    at most.
    """

    def __init__(self) -> None:
        # Errors and offsets; replaced whole, as other threads read it.
        self._samples: tuple[tuple[float, float], ...] = ()
        self._num_sent = 0
        self.due_s = math.inf

    def begin(self, now: float) -> None:
        """Start exchanges, as the agent is connected; the results of earlier ones still count."""
        self._num_sent, self.due_s = 0, now

    def note_sent(self, now: float) -> None:
        """Note that an exchange begins, or that none can; set when the next should (`due_s`)."""
        self._num_sent += 1
        self.due_s = now + (FIRST_INTERVAL_S if self._num_sent < NUM_FIRST else INTERVAL_S)

    def add(self, sent_s: float, host_s: float, received_s: float) -> None:
        """Add the result of an exchange: the two readings here, and the other host's between them.

        Args:
            sent_s: when the message was sent, by the clock of this host.
            host_s: what the other host's clock showed.
            received_s: when the answer arrived, by the clock of this host.
        """
        sample = (received_s - sent_s) / 2, host_s - (sent_s + received_s) / 2
        self._samples = (*self._samples[1 - _NUM_KEPT :], sample)

    def offset(self, host: str) -> ClockOffset | None:
        """Return the offset of the named host's clock, by the exchange that gives it most exactly;
        None if there has been no exchange.
        """
        if not self._samples:
            return None
        error_s, offset_s = min(self._samples)
        return ClockOffset(host, offset_s, error_s)


def describe_clocks(clocks: Iterable[ClockOffset]) -> str:
    """Describe how hosts' clocks were aligned; "" if there is only one clock."""
    each = dict.fromkeys(clock.describe() for clock in clocks)
    return f"clocks of hosts, against the notebook's: {', '.join(each)}" if each else ""
