"""What a rank did lately: its cells and its collectives, kept in a ring."""

from __future__ import annotations

import time

from ..wire.looks import Past, Span


class Spans:
    """The rank's recent past. Written by the main thread, read by any."""

    def past(self, since_s: float) -> Past:
        """The spans that ended after `since_s`, or go on."""
        spans: tuple[Span, ...] = ()
        return Past(spans, time.monotonic())
