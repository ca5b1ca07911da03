"""What a supervisor knows of one rank."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from ...wire.messages import Phase, RankInfo
from ..output import Gate


@dataclass
class RankRecord:
    """One rank.

    Attributes:
        gate: bounds what comes through its descriptors 1 and 2.
        pid: its process, 0 if it has none.
        phase: what it does.
        device, backend: as it said when it became ready.
        ending: how it ended, if it is dead.
        runs: passed to it and not answered yet; the first is what it executes.
        last_run: the newest that it has answered.
        was_killed: it was told to end, as it did not stop.
    """

    gate: Gate
    pid: int = 0
    phase: Phase = "starting"
    device: str = ""
    backend: str = ""
    ending: str = ""
    runs: collections.deque[int] = field(default_factory=collections.deque)
    last_run: int = -1
    was_killed: bool = False

    @property
    def alive(self) -> bool:
        """Whether it has a process."""
        return self.pid > 0

    def renew(self) -> None:
        """Another process is to take its place."""
        self.phase, self.ending, self.last_run, self.was_killed = "starting", "", -1, False
        self.runs.clear()

    def info(self, rank: int, host: str, rss_bytes: int) -> RankInfo:
        """As others see it."""
        return RankInfo(
            rank=rank,
            pid=self.pid,
            host=host,
            phase=self.phase,
            device=self.device,
            backend=self.backend,
            rss_bytes=rss_bytes,
            ending=self.ending,
        )
