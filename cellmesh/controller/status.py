"""Takes the status of all ranks of a mesh, again and again, for dashboards.

Only `take_snapshot` asks a process anything; the rest is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ..wire.status import RankInfo, RankState
from .core.effects import State
from .core.mesh_state import FIRST_HEAL
from .core.sweeps import SWEEP_S
from .core.verdict import find_verdict
from .session.session import Session

Doing = Literal["idle", "runs", "waits", "asks", "heals", "new", "starts", "silent", "dead"]

# What is drawn over time, and for how long.
SERIES = ("cpu", "rss", "gpu", "gpu_memory")
_SPAN_S = 60.0
# How often an idle rank is asked again whether it is, in seconds.
_ASK_IDLE_S = 5
# So much of a call is shown, in characters.
_MAX_WHERE = 80
# A view that has been silent for so long has been closed.
PATIENCE_S = 5.0
# While a cell runs, some front ends' messages wait: a page that was closed then is noticed after
# this time.
UNHEARD_S = 900.0
MAX_VIEWS = 100


@dataclass(frozen=True)
class Snapshot:
    """What all ranks of a mesh are and do at one moment.

    Attributes:
        at_s: when, by the agent's monotonic clock.
        state: where in its life the mesh is.
        dims: the DeviceMesh's, name -> size.
        infos: all ranks, as the agent knows them.
        states: what they do; ranks that are dead or did not answer are missing.
    """

    at_s: float
    state: State
    dims: Mapping[str, int]
    infos: Sequence[RankInfo] = ()
    states: Mapping[int, RankState] = field(default_factory=dict)


class RankStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's row in the dashboard; fields that have their default value are not sent.

    Attributes:
        rank: which.
        doing: what it does, in a word; ``new``: idle, and it has replaced another and holds
            nothing.
        pid: its process, 0 if it has none.
        host: where.
        device: where it computes.
        cell: the ``In[n]`` that it runs, 0 if none or not known.
        line: the cell's line, 0 if not known.
        where: the call that it is in, as written.
        collective: what it waits in, "" if in nothing.
        waited_s: for how long.
        is_broken: its process groups are to be healed.
        note: how it or its predecessor ended, "" for others.
        last_output: the last lines of the one that ended.
        cpu: CPU time over time since the snapshot before, in percent of a core; None if that is
            not known.
        rss: resident memory in bytes, None without a process.
        gpu: how busy its GPU is, in percent; None without one.
        gpu_memory: what torch has reserved there, in bytes; None without one.
    """

    rank: int
    doing: Doing
    pid: int = 0
    host: str = ""
    device: str = ""
    cell: int = 0
    line: int = 0
    where: str = ""
    collective: str = ""
    waited_s: float = 0.0
    is_broken: bool = False
    note: str = ""
    last_output: str = ""
    cpu: float | None = None
    rss: int | None = None
    gpu: int | None = None
    gpu_memory: int | None = None


def take_snapshot(session: Session, before: Snapshot | None = None) -> Snapshot | None:
    """Ask the agent and all ranks for their states. Blocks, at most a second for silent ranks.

    Args:
        session: the mesh.
        before: the snapshot before; idle ranks of it are not asked each time.

    Returns:
        The snapshot; None if the mesh has ended.

    Raises:
        HostError: the agent does not answer.
    """
    host = session.ask_host()
    if host is None:
        return None
    known = keep_states(before, host.ranks, host.at_s)
    states: dict[int, RankState] = {}
    if session.state == "ready":  # ranks that start cannot answer yet
        asked = [info.rank for info in host.ranks if info.rank not in known]
        states = {**known, **(session.states(asked) if asked else {})}
    return Snapshot(host.at_s, session.state, dict(session.dims), host.ranks, states)


def keep_states(
    before: Snapshot | None, infos: Iterable[RankInfo], at_s: float
) -> dict[int, RankState]:
    """Return the states of idle ranks from the previous snapshot, as these cannot have changed.

    Args:
        before: that snapshot.
        infos: the ranks, as the agent knows them now.
        at_s: the time of these.
    """
    if before is None:
        return {}
    pids = {info.rank: info.pid for info in before.infos}
    turn = int(at_s) % _ASK_IDLE_S  # all are asked now and then, some of them at a time
    return {
        info.rank: state
        for info in infos
        if info.phase == "idle"
        and info.rank % _ASK_IDLE_S != turn
        and info.pid == pids.get(info.rank)
        and (state := before.states.get(info.rank)) is not None
        and state.run < 0
        and not state.is_broken
        and not state.device.startswith("cuda")  # others may use its GPU
    }


def rank_statuses(before: Snapshot | None, now: Snapshot) -> list[RankStatus]:
    """Return the dashboard's row of each rank, from the last two snapshots.

    Args:
        before: the snapshot before, since which CPU time is counted; None if there is none.
        now: the snapshot.
    """
    earlier = {info.rank: info for info in before.infos} if before is not None else {}
    passed_s = now.at_s - before.at_s if before is not None else 0.0
    return [
        _rank_status(info, now.states.get(info.rank), _cpu(earlier.get(info.rank), info, passed_s))
        for info in now.infos
    ]


def find_trouble(snapshot: Snapshot) -> str:
    """Return why some ranks of a snapshot can never go on; "" if they can, as far as is known."""
    dead = {info.rank for info in snapshot.infos if info.phase == "dead"}
    verdict = find_verdict(snapshot.states, (), len(snapshot.infos), SWEEP_S, dead)
    return verdict.text if verdict is not None else ""


def _rank_status(info: RankInfo, state: RankState | None, cpu: float | None) -> RankStatus:
    ending = info.ending or info.predecessor_ending
    status = RankStatus(
        rank=info.rank,
        doing=_doing(info, state),
        pid=info.pid,
        host=info.host,
        device=info.device,
        note=ending,
        last_output=info.last_output if ending else "",
        cpu=cpu,
        rss=info.rss_bytes if info.pid else None,
    )
    if state is None or not info.pid:
        return status
    has_gpu = state.device.startswith("cuda")
    return msgspec.structs.replace(
        status,
        cell=state.execution_count,
        line=state.line,
        where=": ".join(filter(None, (state.inner, state.where)))[:_MAX_WHERE],
        collective=state.collective,
        waited_s=round(state.waited_s, 1),
        is_broken=state.is_broken,
        gpu=state.device_percent if has_gpu and state.device_percent >= 0 else None,
        gpu_memory=state.device_bytes if has_gpu else None,
    )


def _doing(info: RankInfo, state: RankState | None) -> Doing:
    if info.phase == "dead":
        return "dead"
    if info.phase == "starting":
        return "starts"
    if state is None:
        return "silent"
    if state.run >= FIRST_HEAL:
        return "heals"
    if state.run < 0:
        return "new" if info.predecessor_ending else "idle"
    if state.asks:
        return "asks"
    return "waits" if state.collective else "runs"


def _cpu(before: RankInfo | None, now: RankInfo, passed_s: float) -> float | None:
    """Return how busy a process was between two snapshots, in percent of a core."""
    if before is None or not now.pid or before.pid != now.pid or passed_s <= 0:
        return None
    return round(max(0.0, 100 * (now.cpu_s - before.cpu_s) / passed_s), 1)


class StatusHistory:
    """The numbers of all ranks (memory, load) over the last minute, for the dashboard."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, Any]] = deque()

    def add(self, at_s: float, ranks: Sequence[RankStatus]) -> dict[str, Any]:
        """Add the numbers of a snapshot's ranks to the history.

        Args:
            at_s: when it was taken.
            ranks: all of them, in order.

        Returns:
            The sample: ``at_s`` and, of each series that has values, a value a rank.
        """
        if self._samples and at_s < self._samples[-1]["at_s"]:
            self._samples.clear()  # another host's clock
        while self._samples and self._samples[0]["at_s"] <= at_s - _SPAN_S:
            self._samples.popleft()
        columns = {name: [getattr(status, name) for status in ranks] for name in SERIES}
        known = {
            name: values
            for name, values in columns.items()
            if any(value is not None for value in values)
        }
        self._samples.append({"at_s": round(at_s, 2), **known})
        return self._samples[-1]

    def all(self) -> list[dict[str, Any]]:
        """Return the samples of the last minute, oldest first."""
        return list(self._samples)


class ViewHeartbeat:
    """Notes which dashboards are visible in a page: a visible one sends heartbeats.

    Silence counts only where a view could be heard: the messages of front ends without subshells
    wait for the cell that runs. True while any view is seen; used on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._silent_s: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # where messages are heard
        self._is_asked = False  # the loop was asked to count, and has not done so
        self._unheard_s = 0.0  # for so long

    def hear(self, view: str, is_seen: bool) -> bool:
        """Note the heartbeat of a view; on the thread that receives messages of the front end.

        Returns:
            Whether it is seen now and was not before.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self._lock:
            self._loop, self._is_asked, self._unheard_s = loop, False, 0.0
            if not is_seen:
                self._silent_s.pop(view, None)
                return False
            is_new = view not in self._silent_s
            if is_new and len(self._silent_s) >= MAX_VIEWS:
                return False
            self._silent_s[view] = 0.0
            return is_new

    def pass_time(self, seconds: float) -> None:
        """Count silence of views, and drop views whose heartbeats have stopped."""
        loop = self._loop
        if loop is None or loop.is_closed():  # closed with its subshell
            self._count(seconds)
            return
        if self._is_asked:
            self._unheard_s += seconds
            return
        self._is_asked = True
        with contextlib.suppress(RuntimeError):  # it has just been closed
            loop.call_soon_threadsafe(self._count, seconds)

    def _count(self, seconds: float) -> None:
        with self._lock:
            self._is_asked, self._unheard_s = False, 0.0
            silent_s = {view: silent + seconds for view, silent in self._silent_s.items()}
            self._silent_s = {
                view: silent for view, silent in silent_s.items() if silent < PATIENCE_S
            }

    def __bool__(self) -> bool:
        return bool(self._silent_s) and self._unheard_s <= UNHEARD_S
