"""What an agent decides: pure, without sockets, processes or clocks.

The agent's shell tells what happened by calling a method, with the time where it matters, and carries out the
actions that come back. The life of a mesh::

    starting --all ranks ready--> ready --Restart--> restarting --all old ranks ended--> starting
        |                            |
        +--a rank or import failed---+--Stop, controller gone--> stopping --all ended, or grace over--> ended
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..wire.framing import Frame, Parcel
from ..wire.messages import (
    Channel,
    Died,
    Done,
    Failed,
    MeshReady,
    Phase,
    Progress,
    RankInfo,
    RankReady,
    RankUnready,
    Relay,
    StartFailed,
    Stopped,
    StoreDied,
    StreamName,
)
from .merger import Merger
from .output import Gate

# How long ranks may take to run their exit handlers before they are killed.
LEAVE_S = 1.0
# A rank's last words travel slower than the news of its death.
LAST_WORDS_S = 0.05


@dataclass(frozen=True)
class ForkAll:
    """Fork every rank."""

    incarnation: int


@dataclass(frozen=True)
class KillRanks:
    """SIGKILL these ranks and what they started."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class AskToLeave:
    """Tell these ranks to end by themselves."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ToRanks:
    """Pass frames on."""

    ranks: tuple[int, ...]
    channel: Channel
    frames: Sequence[Frame]


@dataclass(frozen=True)
class Up:
    """Send to the controller."""

    parcels: Sequence[Parcel[Any]]


@dataclass(frozen=True)
class End:
    """Everything has ended: tidy up and exit."""

    reason: str


Action = ForkAll | KillRanks | AskToLeave | ToRanks | Up | End
State = Literal["starting", "ready", "restarting", "stopping", "ended"]


@dataclass
class _Rank:
    gate: Gate
    pid: int = 0
    phase: Phase = "starting"
    device: str = ""
    backend: str = ""
    ending: str = ""
    # Runs passed to it and not answered yet; the first is what it executes.
    runs: collections.deque[int] = field(default_factory=collections.deque)
    last_run: int = -1

    @property
    def alive(self) -> bool:
        return self.pid > 0


class Supervisor:
    """Decides for one agent.

    Args:
        num_ranks: ranks on this host.
        backend: as the user asked: ``auto``, ``gloo`` or ``nccl``.
        host: this host's name.
        now: seconds, any clock that does not run backwards.
    """

    def __init__(self, num_ranks: int, backend: str, host: str, now: float) -> None:
        self._backend = backend
        self._host = host
        self._ranks = {rank: _Rank(Gate(now)) for rank in range(num_ranks)}
        self._merger = Merger()
        self._state: State = "starting"
        self._incarnation = 0
        self._reason = ""
        self._kill_at: float | None = None
        self._endings: list[tuple[float, Died]] = []

    # ---- the zygote and the processes

    def zygote_ready(self, num_gpus: int) -> list[Action]:
        """Torch is imported: fork the ranks, unless what was asked for cannot work."""
        if self._state != "starting":
            return []
        if self._backend == "nccl" and num_gpus < len(self._ranks):
            return self._fail_start(
                "user",
                f"--backend nccl needs a GPU for each rank: {len(self._ranks)} ranks, {num_gpus} GPUs here. "
                + (f"Start {num_gpus} ranks, or use" if num_gpus else "Use")
                + " --backend gloo",
            )
        return [Up([Parcel(Progress("forking ranks", 0))]), self._fork()]

    def zygote_failed(self, text: str) -> list[Action]:
        """An import failed in the zygote."""
        return self._fail_start("user", text)

    def zygote_ended(self, reason: str, last_output: str) -> list[Action]:
        """The zygote's process ended; living ranks do without it."""
        if self._state not in ("starting", "restarting"):
            return []
        return self._fail_start("host", f"the zygote {reason}\n{last_output}".strip())

    def fork_failed(self, text: str) -> list[Action]:
        """The ranks could not be forked."""
        return self._fail_start("host", text)

    def store_ended(self, reason: str) -> list[Action]:
        """The c10d store's process ended."""
        if self._state not in ("starting", "ready"):
            return []
        return [Up([Parcel(StoreDied(reason))])]

    def forked(self, pids: dict[int, int]) -> list[Action]:
        """These ranks (rank -> pid) have processes now."""
        for rank, pid in pids.items():
            self._ranks[rank].pid = pid
        if self._state in ("stopping", "ended"):
            return [KillRanks(tuple(pids))]
        return []

    def rank_ended(self, rank: int, reason: str, last_output: str, now: float) -> list[Action]:
        """A rank's process ended and was reaped."""
        state = self._ranks[rank]
        state.pid, state.phase, state.ending = 0, "dead", reason
        self._close_gate(rank, now)
        for run in state.runs:
            self._merger.forget(run)
        state.runs.clear()
        if self._state == "starting":
            return self._fail_start("host", f"rank {rank} {reason} while it started\n{last_output}")
        if self._state == "restarting" and not self._living():
            return [self._fork()]
        if self._state == "stopping":
            return self._end_if_empty()
        if self._state == "ready":
            self._endings.append((now + LAST_WORDS_S, Died(rank, reason, last_output)))
        return []

    # ---- what ranks say

    def from_rank(self, rank: int, parcel: Parcel[Any], now: float) -> list[Action]:
        """A rank said something."""
        state = self._ranks[rank]
        verb = parcel.verb
        kind = type(verb)
        if kind is Done or kind is Failed:
            self._close_gate(rank, now)
            if state.runs and state.runs[0] == verb.run:
                state.last_run = state.runs.popleft()
                state.phase = "running" if state.runs else "idle"
        elif kind is RankReady:
            state.phase, state.device, state.backend = "idle", verb.device, verb.backend
            return self._note_ready()
        elif kind is RankUnready:
            return self._fail_start("host", f"rank {rank} could not start: {verb.text}")
        self._merger.add(rank, parcel, now)
        return []

    def from_pipe(self, rank: int, stream: StreamName, text: str, now: float) -> list[Action]:
        """Something came through a rank's descriptor 1 or 2."""
        state = self._ranks[rank]
        run = state.runs[0] if state.runs else state.last_run
        for verb in state.gate.admit(run, stream, text, now):
            self._merger.add(rank, Parcel(verb), now)
        return []

    # ---- what the controller says

    def relay(self, order: Relay, frames: Sequence[Frame]) -> list[Action]:
        """Pass work or control messages on to the ranks that live."""
        ranks = tuple(rank for rank in order.ranks if rank in self._ranks and self._ranks[rank].alive)
        if order.run >= 0 and ranks:
            self._merger.expect(order.run, len(ranks))
            if order.channel == "work":
                for rank in ranks:
                    self._ranks[rank].runs.append(order.run)
                    self._ranks[rank].phase = "running"
        return [ToRanks(ranks, order.channel, frames)] if ranks else []

    def restart(self) -> list[Action]:
        """Replace every rank."""
        if self._state not in ("ready", "starting"):
            return []
        if self._state == "starting" and self._incarnation == 0:
            return []  # torch is being imported: the ranks will be new anyway
        self._state = "restarting"
        living = self._living()
        return [KillRanks(living)] if living else [self._fork()]

    def stop(self, reason: str, now: float) -> list[Action]:
        """End everything."""
        if self._state in ("stopping", "ended"):
            return []
        self._state, self._reason = "stopping", reason
        self._kill_at = now + LEAVE_S
        living = self._living()
        return [AskToLeave(living)] if living else self._end_if_empty()

    # ---- time

    def tick(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        due = [died for at, died in self._endings if at <= now]
        self._endings = [(at, died) for at, died in self._endings if at > now]
        merged: list[Parcel[Any]] = [*self._merger.take(now), *map(Parcel, due)]
        if merged:
            actions.append(Up(merged))
        if self._state == "stopping" and self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + LEAVE_S
            actions.append(KillRanks(self._living()))
        return actions

    def deadline(self) -> float | None:
        """When to call `tick` at the latest; None: not before something happens."""
        times = [at for at, _ in self._endings]
        times += [at for at in (self._merger.deadline(),) if at is not None]
        if self._state == "stopping" and self._kill_at is not None:
            times.append(self._kill_at)
        return min(times, default=None)

    # ---- what there is to see

    @property
    def state(self) -> State:
        """Where in its life the mesh is."""
        return self._state

    def progress(self) -> Parcel[Any]:
        """What to tell a controller that has just come."""
        if self._state == "ready":
            return Parcel(MeshReady(self.report({})))
        return Parcel(Progress("importing torch", 0))

    def report(self, rss_bytes: dict[int, int]) -> tuple[RankInfo, ...]:
        """All ranks, with their memory (pid -> bytes) where given."""
        return tuple(
            RankInfo(
                rank=rank,
                pid=state.pid,
                host=self._host,
                phase=state.phase,
                device=state.device,
                backend=state.backend,
                rss_bytes=rss_bytes.get(state.pid, 0),
                ending=state.ending,
            )
            for rank, state in self._ranks.items()
        )

    def pids(self) -> dict[int, int]:
        """rank -> pid of the living."""
        return {rank: state.pid for rank, state in self._ranks.items() if state.alive}

    # ---- inside

    def _living(self) -> tuple[int, ...]:
        return tuple(self.pids())

    def _fork(self) -> ForkAll:
        self._state = "starting"
        self._incarnation += 1
        self._endings.clear()
        for state in self._ranks.values():
            state.phase, state.ending, state.last_run = "starting", "", -1
            state.runs.clear()
        return ForkAll(self._incarnation)

    def _note_ready(self) -> list[Action]:
        num_ready = sum(state.phase == "idle" for state in self._ranks.values())
        up: list[Parcel[Any]] = [Parcel(Progress("process group", num_ready))]
        if num_ready == len(self._ranks) and self._state == "starting":
            self._state = "ready"
            up.append(Parcel(MeshReady(self.report({}))))
        return [Up(up)]

    def _fail_start(self, fault: Literal["user", "host"], text: str) -> list[Action]:
        if self._state not in ("starting", "restarting"):
            return []
        self._state, self._reason = "stopping", "the start failed"
        self._kill_at = None
        living = self._living()
        actions: list[Action] = [Up([Parcel(StartFailed(fault, text.strip()))])]
        return [*actions, KillRanks(living)] if living else [*actions, *self._end_if_empty()]

    def _end_if_empty(self) -> list[Action]:
        if self._living():
            return []
        self._state = "ended"
        last_words = self._merger.take(math.inf)
        return [Up([*last_words, Parcel(Stopped(self._reason))]), End(self._reason)]

    def _close_gate(self, rank: int, now: float) -> None:
        for verb in self._ranks[rank].gate.close():
            self._merger.add(rank, Parcel(verb), now)


def join_relays(actions: Sequence[Action]) -> list[Action]:
    """Make one message of what goes to the same ranks in a row."""
    joined: list[Action] = []
    for action in actions:
        last = joined[-1] if joined else None
        if (
            isinstance(action, ToRanks)
            and isinstance(last, ToRanks)
            and (action.ranks, action.channel) == (last.ranks, last.channel)
        ):
            joined[-1] = ToRanks(last.ranks, last.channel, [*last.frames, *action.frames])
        else:
            joined.append(action)
    return joined
