"""The meters of a rank's progress bars, with a clock of the test's own."""

from __future__ import annotations

import threading
from typing import Any

from cellmesh.wire.codec import Parcel
from cellmesh.wire.progress import Bar
from cellmesh.workers.progress.meters import Meters


class Rank:
    """Bars of a rank, with a clock of the test's own; what waits is sent when the test says so."""

    def __init__(self) -> None:
        self.sent: list[Bar] = []
        self.now = 100.0
        self.run = 1
        self.meters = Meters(self._send, lambda: self.run, clock=lambda: self.now)
        self.meters._thread = threading.current_thread()  # none is started: the test is the clock

    def _send(self, parcel: Parcel[Any]) -> None:
        self.sent.append(parcel.verb)

    def open(self, title: str = "t", total: float = 10.0) -> tuple[Any, list[float]]:
        done = [0.0]
        meter = self.meters.open(lambda: Bar(0, 0, title, done[0], total, 1.0))
        self.meters.changed(meter)
        return meter, done

    def states(self) -> list[tuple[int, float, str]]:
        return [(bar.bar, bar.done, bar.state) for bar in self.sent]
