"""What an agent knows of one rank: process, phase, unanswered runs, how it ended."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from ...wire.status import Phase, RankInfo
from ..rank.stdout import Gate


@dataclass
class RankRecord:
    """What an agent knows of one rank: its process, phase, device, backend, unanswered runs, and
    how it ended.
    """

    gate: Gate  # bounds the text of its descriptors 1 and 2
    pid: int = 0
    phase: Phase = "starting"
    device: str = ""
    backend: str = ""
    ending: str = ""  # how it ended, if it is dead
    # Passed to it and not answered yet; the first is what it executes.
    runs: collections.deque[int] = field(default_factory=collections.deque)
    last_run: int = -1
    why_killed: str = ""  # why the agent ends it; "" where it does not
    # Those of `runs` that may give it what a user's namespace holds.
    filling: set[int] = field(default_factory=set)
    # How the rank that it replaces ended, until something of `filling` ends well; its last lines.
    predecessor_ending: str = ""
    last_output: str = ""

    @property
    def alive(self) -> bool:
        """Whether the rank has a process."""
        return self.pid > 0

    def take(self, run: int, fills: bool) -> None:
        """Note a run that is sent to the rank; `fills` as in `Relay`."""
        self.runs.append(run)
        self.phase = "running"
        if fills:
            self.filling.add(run)

    def answer(self, run: int, went_well: bool) -> None:
        """Note that the rank has ended a run, well or not."""
        if self.runs and self.runs[0] == run:
            self.last_run = self.runs.popleft()
            self.phase = "running" if self.runs else "idle"
        if run in self.filling and went_well:
            self.predecessor_ending = self.last_output = ""
        self.filling.discard(run)

    def end(self, reason: str, last_output: str) -> None:
        """Note that the rank's process has ended, how, and what it printed last."""
        self.pid, self.phase, self.ending, self.last_output = 0, "dead", reason, last_output
        self.runs.clear()
        self.filling.clear()

    def renew(self, alone: bool = False) -> None:
        """Reset the record for a new process of this rank; `alone`: the other ranks live on."""
        self.predecessor_ending = self.ending if alone else ""
        self.last_output = self.last_output if alone else ""
        self.phase, self.ending, self.last_run, self.why_killed = "starting", "", -1, ""
        self.runs.clear()
        self.filling.clear()

    def info(self, rank: int, host: str, rss_bytes: int) -> RankInfo:
        """Return the record in the form that is sent to controllers."""
        return RankInfo(
            rank=rank,
            pid=self.pid,
            host=host,
            phase=self.phase,
            device=self.device,
            backend=self.backend,
            rss_bytes=rss_bytes,
            ending=self.ending,
            predecessor_ending=self.predecessor_ending if self.phase in ("idle", "running") else "",
            last_output=self.last_output,
        )
