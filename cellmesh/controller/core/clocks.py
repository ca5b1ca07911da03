"""Offsets between the clocks of hosts, estimated from message round trips to their agents. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

# A quick burst of exchanges at first, then one at long intervals, as clocks drift apart.
NUM_FIRST, FIRST_INTERVAL_S, INTERVAL_S = 8, 0.02, 5.0
# The best of this many latest exchanges is used: older ones are wrong by the clocks' drift.
_NUM_KEPT = 8


class ClockOffset(msgspec.Struct, frozen=True):
    """Offset of a host's clock from the clock of the notebook's host.

    Attributes:
        host: name of the host, as the user gave it.
        offset_s: seconds by which the host's clock is ahead; subtracted from the host's times.
        error_s: largest possible error of the offset in either direction, in seconds.
    """

    host: str
    offset_s: float
    error_s: float

    def describe(self) -> str:
        """Return text such as ``b: +1.203 s ± 0.2 ms``."""
        offset_s = round(self.offset_s, 4) + 0.0  # -0.0 becomes 0.0
        return f"{self.host}: {offset_s:+,.4f} s ± {self.error_s * 1e3:.2g} ms"


class ClockComparison:
    """Estimator of the offset of one host's monotonic clock from that of this process's host.

    In each exchange, this side sends a message and the agent answers with a reading of its clock.
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
        """Start a burst of clock readings from an agent that has connected, and keep its earlier
        readings.
        """
        self._num_sent, self.due_s = 0, now

    def note_sent(self, now: float) -> None:
        """Set the time of the next clock reading (`due_s`), after one was due and was requested or
        skipped.
        """
        self._num_sent += 1
        self.due_s = now + (FIRST_INTERVAL_S if self._num_sent < NUM_FIRST else INTERVAL_S)

    def add(self, sent_s: float, host_s: float, received_s: float) -> None:
        """Add the clock readings of one message round trip.

        Args:
            sent_s: time in seconds at which the message was sent, by the clock of this host.
            host_s: reading of the other host's clock, in seconds.
            received_s: time in seconds at which the answer arrived, by the clock of this host.
        """
        sample = (received_s - sent_s) / 2, host_s - (sent_s + received_s) / 2
        self._samples = (*self._samples[1 - _NUM_KEPT :], sample)

    def offset(self, host: str) -> ClockOffset | None:
        """Return the offset of the named host's clock, from the exchange with the smallest possible
        error; None before the first exchange.
        """
        if not self._samples:
            return None
        error_s, offset_s = min(self._samples)
        return ClockOffset(host, offset_s, error_s)


def describe_clocks(clocks: Iterable[ClockOffset]) -> str:
    """Return a line on the offsets of hosts' clocks; "" if there is only one clock."""
    each = dict.fromkeys(clock.describe() for clock in clocks)
    return f"clocks of hosts, against the notebook's: {', '.join(each)}" if each else ""
