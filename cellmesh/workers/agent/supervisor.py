"""The state machine that decides an agent's actions: pure, without sockets, processes or clocks.

The `Agent` reports each event by calling a method, and carries out the actions that the method
returns. The life of a mesh::

    starting --all ranks ready--> ready --Restart--> restarting --all old ranks ended--> starting
      |                            |
      +--a rank or import failed---+--Stop, lease over--> stopping --all ended, or grace over-->
      ended

While the mesh is ready, single dead ranks are forked again on demand (`Supervisor.respawn`): all
requested ones become ready, or none of them stays.

The module is longer than others, as each event of a state machine depends on the whole state.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ...wire.codec import Frame, Parcel, encode
from ...wire.messages import (
    Channel,
    Died,
    Done,
    Failed,
    Leave,
    MeshReady,
    Progress,
    Ranked,
    RankReady,
    RankUnready,
    Relay,
    Respawned,
    RespawnFailed,
    StartFailed,
    Stopped,
    StoreDied,
    StoreUp,
)
from ...wire.peer_calls import Routed
from ...wire.status import Phase, RankInfo
from ...wire.verbs import Output, StreamName
from ..rank.stdout import Gate
from .merger import Answers, Merger


@dataclass
class RankRecord:
    """An agent's record of one rank: its process, phase, device, backend, unanswered runs, and how
    it ended.
    """

    gate: Gate  # bounds the text from its descriptors 1 and 2
    pid: int = 0
    phase: Phase = "starting"
    device: str = ""
    backend: str = ""
    ending: str = ""  # how it ended, if dead
    # Runs sent to it and not answered yet; it executes the first one.
    runs: collections.deque[int] = field(default_factory=collections.deque)
    last_run: int = -1
    why_killed: str = ""  # why the agent kills it; "" otherwise
    # The runs among `runs` that may bind names of the user (`Relay.fills`).
    filling: set[int] = field(default_factory=set)
    whole: int = -1  # the last run whose text is not bounded (`Relay.is_whole`)
    # How its predecessor ended, until a run of `filling` succeeds; the predecessor's last lines.
    predecessor_ending: str = ""
    last_output: str = ""

    @property
    def alive(self) -> bool:
        """Whether the rank has a process."""
        return self.pid > 0

    def answer(self, runs: Iterable[int], went_well: bool) -> None:
        """Record that the rank has ended runs, successfully or not."""
        waiting, filling = self.runs, self.filling
        for run in runs:
            if waiting and waiting[0] == run:
                self.last_run = waiting.popleft()
                self.phase = "running" if waiting else "idle"
            if run in filling:
                filling.discard(run)
                if went_well:
                    self.predecessor_ending = self.last_output = ""

    def end(self, reason: str, last_output: str) -> None:
        """Record that the rank's process has ended, for this reason, with these last lines of
        output.
        """
        self.pid, self.phase, self.ending, self.last_output = 0, "dead", reason, last_output
        self.runs.clear()
        self.filling.clear()

    def renew(self, alone: bool = False) -> None:
        """Reset the record for a new process of the rank; `alone`: other ranks keep their
        processes.
        """
        self.predecessor_ending = self.ending if alone else ""
        self.last_output = self.last_output if alone else ""
        self.phase, self.ending, self.last_run, self.why_killed = "starting", "", -1, ""
        self.runs.clear()
        self.filling.clear()

    def info(self, rank: int, host: str, rss_bytes: int) -> RankInfo:
        """Return the record as the `RankInfo` that is sent to controllers."""
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


class Fork(msgspec.Struct, frozen=True):
    """Action: the agent forks these ranks from the zygote; if the zygote has ended, it starts a new
    one first.
    """

    ranks: tuple[int, ...]
    incarnation: int  # number of times that all ranks have been forked
    rejoin: bool = False  # they replace dead ranks, and join the living ones' groups later


class KillRanks(msgspec.Struct, frozen=True):
    """Action: the agent sends SIGKILL to these ranks and to the processes that they started."""

    ranks: tuple[int, ...]


class ToRanks(msgspec.Struct, frozen=True):
    """Action: the agent writes frames to the sockets of ranks."""

    ranks: tuple[int, ...]
    channel: Channel
    frames: Sequence[Frame]


class Up(msgspec.Struct, frozen=True):
    """Action: the agent sends messages to the controller."""

    parcels: Sequence[Parcel[Any]]


Action = Fork | KillRanks | ToRanks | Up


# How long ranks may run their exit handlers before they are killed.
LEAVE_S = 1.0
# A rank's last messages may arrive later than the report of its death.
LAST_WORDS_S = 0.05
# A fork takes milliseconds, a new zygote some seconds; after this time it is taken to hang.
RESPAWN_S = 60.0
# How many deaths of the zygote, and how many starts in a row that lost a process, are retried.
MAX_ZYGOTES_LOST = MAX_STARTS_LOST = 2
# Reason of the end of a rank that `Supervisor.kill` ended.
KILLED = "did not stop when interrupted: killed"

State = Literal["starting", "ready", "restarting", "stopping", "ended"]


class Supervisor:
    """The state machine of a mesh's life: its methods take events and monotonic times in
    seconds, and return the actions that the agent carries out.

    Args:
        ranks: ranks of this host.
        backend: backend in the ticket.
        host: name of the host.
        now: monotonic time in seconds.
        is_whole: whether the mesh has no other host; else only controllers restart all ranks.
        owns_store: whether the c10d store runs on this host; else ranks wait for `use_store`.
        joins: whether the host joins a ready mesh, in which its ranks count as dead.

    Attributes:
        state: state of the mesh; "ended" once every process has ended: the agent then exits.
        store_port: port of the c10d store, 0 without one; the owner keeps it up to date.
        unforked: ranks whose process the zygote has not reported yet.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        backend: str,
        host: str,
        now: float,
        is_whole: bool = True,
        owns_store: bool = True,
        joins: bool = False,
    ) -> None:
        self.store_port = 0
        self._is_whole, self.owns_store = is_whole, owns_store
        self._num_gpus = -1  # unknown until the zygote has counted them
        self._backend = backend
        self._host = host
        self._ranks = {rank: RankRecord(Gate(now)) for rank in ranks}
        self._merger = Merger()
        self.state: State = "ready" if joins else "starting"
        for state in self._ranks.values() if joins else ():
            state.end("was on a host that is lost", "")
        self._incarnation = 0
        self._reason = ""
        self._kill_at: float | None = None
        self._endings: list[tuple[float, Died]] = []
        self._deaths: dict[int, Died] = {}
        self.unforked: set[int] = set()
        self._num_zygotes_lost, self._num_starts_lost = 0, MAX_STARTS_LOST
        self._leaving: set[int] = set()  # living ranks that a resize has removed
        self._respawning: set[int] = set()
        self._respawn_until, self._respawn_failure = math.inf, ""

    # ---- the zygote and the processes

    def zygote_ready(self, num_gpus: int) -> list[Action]:
        """Fork ranks, as the zygote has imported torch; fail the start if GPUs are too few."""
        if self.state == "ready":
            return [self._fork_missing()] if self.unforked else []
        if self.state != "starting":
            return []
        if self._backend == "nccl" and num_gpus < len(self._ranks):
            instead = f"Start {num_gpus} ranks, or use" if num_gpus else "Use"
            text = (
                f"--backend nccl needs a GPU for each rank: {len(self._ranks)} ranks, {num_gpus} "
                f"GPUs here. {instead} --backend gloo"
            )
            return self._fail_start("user", text)
        if self._incarnation and not self.unforked:
            return []
        self._num_gpus = num_gpus
        if not (self.store_port or self.owns_store):
            return []  # until the store's host has announced its port
        fork = self._fork_missing() if self.unforked else self._fork_all()
        return [Up([Parcel(Progress("forking ranks", 0))]), fork]

    def use_store(self, port: int, incarnation: int = 0) -> list[Action]:
        """Set the port of the c10d store on another host, and fork the ranks that waited for it.

        Args:
            port: port of the store.
            incarnation: incarnation of the mesh's ranks, if this host has joined later.
        """
        self._incarnation = self._incarnation or incarnation
        was_waiting, self.store_port = not self.store_port and self._num_gpus >= 0, port
        return self.zygote_ready(self._num_gpus) if was_waiting else []

    def store_started(self, port: int) -> list[Action]:
        """Record the port of this host's c10d store, and announce it to other hosts' ranks."""
        self.store_port = port
        return [] if self._is_whole else [Up([Parcel(StoreUp(port))])]

    def zygote_ended(self, reason: str, last_output: str) -> list[Action]:
        """Handle the zygote's death: living ranks continue, a new zygote forks the missing ones."""
        text = f"the zygote {reason}\n{last_output}".strip()
        self._num_zygotes_lost += 1
        if self._incarnation == 0:
            return self._fail_start("host", text)
        if not self.unforked or self.state not in ("starting", "ready"):
            return []
        if self.state == "starting" and self._living():
            return self._start_over(text)
        if self._num_zygotes_lost > MAX_ZYGOTES_LOST:
            return self.fail(text)
        if self.state == "starting" and self._is_whole:
            # Ranks that it forked unreported are killed, but may have met under this one's keys.
            self._incarnation += 1
        return [self._fork_missing()]

    def fail(self, text: str, fault: Literal["user", "host"] = "host") -> list[Action]:
        """Give up forking ranks: report that replacing dead ranks has failed if the mesh is ready,
        else that the mesh's start has failed.
        """
        return self._fail_respawn(text) if self.state == "ready" else self._fail_start(fault, text)

    def store_ended(self, reason: str) -> list[Action]:
        """Handle the death of the c10d store; `store_port` is then the port of its replacement, or
        0.
        """
        if self.state == "starting" and self._living():
            return self._start_over(f"the store {reason} while ranks started")
        return [Up([Parcel(StoreDied(reason, self.store_port))])] if self.state == "ready" else []

    def forked(self, pids: dict[int, int]) -> list[Action]:
        """Record the process numbers of newly forked ranks (rank -> pid)."""
        for rank, pid in pids.items():
            self._ranks[rank].pid = pid
        self.unforked.difference_update(pids)
        return [KillRanks(tuple(pids))] if self.state in ("stopping", "ended") else []

    def rank_ended(self, rank: int, reason: str, last_output: str, now: float) -> list[Action]:
        """Handle the end of a rank's process that has been reaped."""
        state = self._ranks[rank]
        if rank in self._leaving:
            return self._left(rank, now)
        reason = state.why_killed or reason
        self._close_gate(rank, now)
        self._merger.rank_ended(rank, now)
        for run in state.runs:
            self._merger.forget(run)
        state.end(reason, last_output)
        if self.state == "starting":
            return self._start_over(f"rank {rank} {reason} while it started\n{last_output}")
        if self.state == "restarting" and not self._living():
            return [self._fork_all()]
        if self.state == "stopping":
            return self._end_if_empty()
        if rank in self._respawning:
            return self._fail_respawn(f"rank {rank} {reason} while it started\n{last_output}")
        if self.state == "ready":
            died = self._deaths[rank] = Died(rank, reason, last_output)
            self._endings.append((now + LAST_WORDS_S, died))
        return []

    # ---- messages of ranks

    def from_rank(self, rank: int, parcel: Parcel[Any], now: float) -> list[Action]:
        """Handle a message that a rank has sent."""
        state = self._ranks[rank]
        verb = parcel.verb
        kind = type(verb)
        if kind is Done or kind is Failed:
            if state.gate.hides:
                self._close_gate(rank, now)
            state.answer((verb.run,), kind is Done)
        elif kind is RankReady:
            state.phase, state.device, state.backend = "idle", verb.device, verb.backend
            return self._note_respawned() if rank in self._respawning else self._note_ready()
        elif kind is RankUnready:
            text = f"rank {rank} could not start: {verb.text}"
            is_new = self.state == "starting" or rank in self._respawning
            return self.fail(text) if is_new else []
        elif kind is Routed:  # without the delay for equal messages
            return [Up([Parcel(Ranked((rank,), verb), parcel.buffers)])]
        self._merger.add(rank, parcel, now)
        return []

    def answered(self, rank: int, answers: Answers, now: float) -> None:
        """Handle a message of a rank that consists of plain answers; else like `from_rank`."""
        state = self._ranks[rank]
        if state.gate.hides:
            self._close_gate(rank, now)
        state.answer(answers.runs, went_well=True)
        self._merger.add_answers(rank, answers, now)

    def from_pipe(
        self, rank: int, stream: StreamName, text: str, now: float, data: bytes = b""
    ) -> list[Action]:
        """Handle text that a rank has written to its descriptor 1 or 2; `data`: as in `Output`."""
        state = self._ranks[rank]
        run = state.runs[0] if state.runs else state.last_run
        is_whole = run >= 0 and run == state.whole
        admitted = [Output(run, stream, text, data)] if is_whole else None
        for verb in admitted or (state.gate.admit(run, stream, text, now) if text else ()):
            self._merger.add(rank, Parcel(verb), now)
        return []

    def runs_script(self, rank: int) -> bool:
        """Return whether a rank runs a script, or another run whose text is not bounded."""
        state = self._ranks[rank]
        return bool(state.runs) and state.runs[0] == state.whole

    # ---- orders of the controller

    def relay(self, order: Relay, frames: Sequence[Frame]) -> list[Action]:
        """Pass a controller's message on to those of its ranks that are alive on this host."""
        run, fills, ranks = order.run, order.fills, []
        is_work = run >= 0 and order.channel == "work"
        for rank in order.ranks:
            state = self._ranks.get(rank)
            if state is not None and state.pid > 0:
                ranks.append(rank)
                if is_work:
                    if not order.interleaves:
                        state.runs.append(run)
                        state.phase = "running"
                    if fills:
                        state.filling.add(run)
                    if order.is_whole:
                        state.whole = run
        if run >= 0 and ranks:
            self._merger.expect(run, len(ranks))
        return [ToRanks(tuple(ranks), order.channel, frames)] if ranks else []

    def restart(self) -> list[Action]:
        """Kill every rank, and fork all ranks again."""
        if self.state not in ("ready", "starting"):
            return []
        if self.state == "starting" and self._incarnation == 0:
            return []  # torch is being imported: no rank has been forked yet
        self.state = "restarting"
        self._forget_respawn()
        living = self._living()
        return [KillRanks(living)] if living else [self._fork_all()]

    def respawn(self, ranks: Sequence[int], now: float) -> list[Action]:
        """Fork a new process for each of these ranks that is dead."""
        if self.state != "ready":
            return [Up([Parcel(RespawnFailed(tuple(ranks), f"the mesh is {self.state}"))])]
        wanted = {rank for rank, state in self._ranks.items() if state.phase == "dead"}
        wanted.intersection_update(ranks)
        if not wanted or self._respawn_failure:
            return [Up([Parcel(RespawnFailed(tuple(ranks), "none of them is dead, or not yet"))])]
        num_ranks = len(self._ranks) - len(self._leaving)
        if num_ranks > self._num_gpus and any(
            "nccl" in state.backend for state in self._ranks.values() if state.alive
        ):
            text = f"NCCL needs a GPU for each of {num_ranks} ranks, and {self._num_gpus} are here"
            return [Up([Parcel(RespawnFailed(tuple(ranks), text))])]
        told = [died for _, died in self._endings if died.rank in wanted]
        self._endings = [ending for ending in self._endings if ending[1].rank not in wanted]
        for rank in wanted:
            self._ranks[rank].renew(alone=True)
            self._deaths.pop(rank, None)
        self._respawning |= wanted
        self.unforked |= wanted
        self._num_zygotes_lost = 0
        self._respawn_until = now + RESPAWN_S
        return [*([Up([*map(Parcel, told)])] if told else []), self._fork_missing()]

    def resize(self, ranks: Sequence[int], now: float) -> list[Action]:
        """Make these the ranks of this host in a ready mesh: kill its other ranks, and record added
        ranks as dead until they are forked.
        """
        for rank in ranks:
            if rank not in self._ranks:
                self._ranks[rank] = RankRecord(Gate(now))
                self._ranks[rank].end("has not been started yet", "")
        for rank in [rank for rank in self._ranks if rank not in ranks]:
            if self._ranks[rank].alive:
                self._leaving.add(rank)
            else:
                del self._ranks[rank]
            self._deaths.pop(rank, None)
        return [KillRanks(tuple(sorted(self._leaving)))] if self._leaving else []

    def _left(self, rank: int, now: float) -> list[Action]:
        """Drop the record of a rank that a resize has removed, and whose process has ended."""
        self._merger.rank_ended(rank, now)
        self._leaving.discard(rank)
        del self._ranks[rank]
        if self.state == "restarting" and not self._living():
            return [self._fork_all()]
        return self._end_if_empty() if self.state == "stopping" else []

    def kill(self, ranks: Sequence[int], why: str = KILLED) -> list[Action]:
        """Kill these ranks, which ignored an interrupt, do not answer, or lost their connection."""
        living = tuple(rank for rank in ranks if rank in self._ranks and self._ranks[rank].alive)
        for rank in living:
            self._ranks[rank].why_killed = why
        return [KillRanks(living)] if living else []

    def stop(self, reason: str, now: float) -> list[Action]:
        """End the mesh: ask its ranks to exit, and kill those that have not exited in time."""
        if self.state in ("stopping", "ended"):
            return []
        self.state, self._reason = "stopping", reason
        self._kill_at = now + LEAVE_S
        self._forget_respawn()
        living = self._living()
        if not living:
            return self._end_if_empty()
        return [ToRanks(living, "control", encode([Parcel(Leave())]))]

    def tick(self, now: float) -> list[Action]:
        """Act on time-outs that have passed: send delayed messages, kill ranks that do not exit, or
        give up starting new processes for dead ranks.
        """
        actions: list[Action] = []
        merged: list[Parcel[Any]] = [*self._merger.take(now)]
        if self._endings:
            merged += [Parcel(died) for at, died in self._endings if at <= now]
            self._endings = [(at, died) for at, died in self._endings if at > now]
        if merged:
            actions.append(Up(merged))
        if self.state == "stopping" and self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + LEAVE_S
            actions.append(KillRanks(self._living()))
        if now >= self._respawn_until:
            is_last = bool(self._respawn_failure)  # a killed rank hangs in the kernel
            self._respawn_until = now + LEAVE_S
            text = f"the ranks were not ready after {RESPAWN_S:.0f} s"
            actions += self._fail_respawn(text, is_last)
        return actions

    def deadline(self) -> float | None:
        """Return when `Supervisor.tick` must be called next; None if no time-out runs."""
        due = self._merger.deadline()
        due = self._respawn_until if due is None else min(due, self._respawn_until)
        if self._endings:
            due = min(due, *(at for at, _ in self._endings))
        if self.state == "stopping" and self._kill_at is not None:
            due = min(due, self._kill_at)
        return due if due < math.inf else None

    def progress(self) -> Parcel[Any]:
        """Return a message on how far the mesh's start is, for a controller that attaches."""
        if self.state == "ready":
            return Parcel(MeshReady(self.report({}), self.store_port, self._incarnation))
        return Parcel(Progress("process group" if self._incarnation else "importing torch", 0))

    def deaths(self) -> list[Died]:
        """Return the reports of deaths that were sent to the controller, for ranks that are still
        dead.
        """
        to_come = {died.rank for _, died in self._endings}
        return [died for rank, died in sorted(self._deaths.items()) if rank not in to_come]

    def report(self, rss_bytes: Mapping[int, int]) -> tuple[RankInfo, ...]:
        """Return the process, state and memory of each rank of this host; `rss_bytes` maps pids to
        memory.
        """
        return tuple(
            state.info(rank, self._host, rss_bytes.get(state.pid, 0))
            for rank, state in self._ranks.items()
            if rank not in self._leaving
        )

    def pids(self) -> dict[int, int]:
        """Return the process numbers of living ranks (rank -> pid)."""
        return {rank: state.pid for rank, state in self._ranks.items() if state.alive}

    def _living(self) -> tuple[int, ...]:
        return tuple(self.pids())

    def _fork_all(self) -> Fork:
        self.state = "starting"
        self._incarnation += 1
        self._num_zygotes_lost = 0
        self._endings.clear()
        self._deaths.clear()
        for state in self._ranks.values():
            state.renew()
        self.unforked = set(self._ranks) - self._leaving
        return self._fork_missing()

    def _start_over(self, text: str) -> list[Action]:
        """Kill and fork all ranks again, as a process that they need has died during their start.

        Fail the start instead if it is the mesh's first, if too many in a row ended so, or if only
        controllers restart all ranks.
        """
        # Ranks meet under keys of their incarnation, which a rank that is forked later cannot join.
        self._num_starts_lost += 1
        is_last = self._num_starts_lost > MAX_STARTS_LOST or not self._is_whole
        return self._fail_start("host", text) if is_last else self.restart()

    def _fork_missing(self) -> Fork:
        return Fork(tuple(sorted(self.unforked)), self._incarnation, rejoin=bool(self._respawning))

    def _note_respawned(self) -> list[Action]:
        phases = {self._ranks[rank].phase for rank in self._respawning}
        if phases != {"idle"} or self._respawn_failure:
            return []
        infos = tuple(info for info in self.report({}) if info.rank in self._respawning)
        self._forget_respawn()
        return [Up([Parcel(Respawned(infos))])]

    def _fail_respawn(self, text: str, is_last: bool = False) -> list[Action]:
        """Give up replacing dead ranks: kill their new processes, and report the failure once these
        have ended.
        """
        if not self._respawning:
            return []
        actions: list[Action] = []
        if not self._respawn_failure:
            self._respawn_failure = text.strip()
            for rank in self.unforked:
                self._ranks[rank].phase, self._ranks[rank].ending = "dead", "was not forked"
            self.unforked.clear()
            living = tuple(rank for rank in sorted(self._respawning) if self._ranks[rank].alive)
            actions += [KillRanks(living)] if living else []
        if not is_last and any(self._ranks[rank].alive for rank in self._respawning):
            return actions
        failed = RespawnFailed(tuple(sorted(self._respawning)), self._respawn_failure)
        self._forget_respawn()
        return [*actions, Up([Parcel(failed)])]

    def _forget_respawn(self) -> None:
        self._respawning, self._respawn_until, self._respawn_failure = set(), math.inf, ""
        self.unforked.clear()

    def _note_ready(self) -> list[Action]:
        num_ready = sum(state.phase == "idle" for state in self._ranks.values())
        up: list[Parcel[Any]] = [Parcel(Progress("process group", num_ready))]
        if num_ready == len(self._ranks) and self.state == "starting":
            self.state, self._num_starts_lost = "ready", 0
            up.append(Parcel(MeshReady(self.report({}), self.store_port, self._incarnation)))
        return [Up(up)]

    def _fail_start(self, fault: Literal["user", "host"], text: str) -> list[Action]:
        if self.state not in ("starting", "restarting"):
            return []
        self.state, self._reason = "stopping", "the start failed"
        self._kill_at = None
        living = self._living()
        failed = Up([Parcel(StartFailed(fault, text.strip()))])
        return [failed, KillRanks(living)] if living else [failed, *self._end_if_empty()]

    def _end_if_empty(self) -> list[Action]:
        if self._living():
            return []
        self.state = "ended"
        return [Up([*self._merger.take(math.inf), Parcel(Stopped(self._reason))])]

    def _close_gate(self, rank: int, now: float) -> None:
        for verb in self._ranks[rank].gate.close():
            self._merger.add(rank, Parcel(verb), now)
