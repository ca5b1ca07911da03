"""Watch a mesh: look at all ranks and their processes, and tell what has become of them since the
last look.

Only `look_around` asks anybody anything; the rest is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ..wire.messages import RankInfo, RankState
from .core.effects import State
from .core.mesh_state import FIRST_HEAL
from .session.session import Session

Doing = Literal["idle", "runs", "waits", "asks", "heals", "new", "starts", "silent", "dead"]

# What is drawn over time.
SERIES = ("cpu", "rss", "gpu", "gpu_memory")
_SPAN_S = 60.0
# How often an idle rank is asked again whether it is, in seconds.
_ASK_IDLE_S = 5
# So much of a call is shown, in characters.
_MAX_WHERE = 80


@dataclass(frozen=True)
class Snapshot:
    """All ranks at one moment.

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


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as it is shown.

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
        cpu: CPU time over time since the last look, in percent of a core; None if that is not
            known.
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


def look_around(session: Session, before: Snapshot | None = None) -> Snapshot | None:
    """Look at all ranks and their processes. Blocks; at most a second for ranks that do not answer.

    Args:
        session: the mesh.
        before: the look before; what idle ranks said then need not be asked again.

    Returns:
        What there is to see; None if the mesh has ended.

    Raises:
        TimeoutError: the agent does not answer.
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
    """What ranks said at the look before and would say now: that they are idle.

    Args:
        before: that look.
        infos: the ranks, as the agent knows them now.
        at_s: when it told that.
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


def read_rows(before: Snapshot | None, now: Snapshot) -> list[Row]:
    """What to show of each rank.

    Args:
        before: the look before, None if this is the first.
        now: the look.
    """
    earlier = {info.rank: info for info in before.infos} if before is not None else {}
    passed_s = now.at_s - before.at_s if before is not None else 0.0
    return [
        _read_row(info, now.states.get(info.rank), _cpu(earlier.get(info.rank), info, passed_s))
        for info in now.infos
    ]


def _read_row(info: RankInfo, state: RankState | None, cpu: float | None) -> Row:
    row = Row(
        rank=info.rank,
        doing=_doing(info, state),
        pid=info.pid,
        host=info.host,
        device=info.device,
        note=info.ending or info.predecessor_ending,
        last_output=info.last_output if info.ending or info.predecessor_ending else "",
        cpu=cpu,
        rss=info.rss_bytes if info.pid else None,
    )
    if state is None or not info.pid:
        return row
    has_gpu = state.device.startswith("cuda")
    return msgspec.structs.replace(
        row,
        cell=state.execution_count,
        line=state.line,
        where=state.where[:_MAX_WHERE],
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
    """In percent of a core; what was used between two looks, if it is the same process."""
    if before is None or not now.pid or before.pid != now.pid or passed_s <= 0:
        return None
    return round(max(0.0, 100 * (now.cpu_s - before.cpu_s) / passed_s), 1)


def find_changes(before: Iterable[Row], now: Iterable[Row]) -> list[dict[str, Any]]:
    """What a front end that knows `before` has to be told: of each rank that differs, what does.

    Args:
        before: rows that it knows; () if none.
        now: the rows.
    """
    known = {row.rank: msgspec.structs.asdict(row) for row in before}
    changes = []
    for row in now:
        old = known.get(row.rank, {})
        new = msgspec.structs.asdict(row)
        changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
        if changed:
            changes.append({**changed, "rank": row.rank})
    return changes


class History:
    """The series of all ranks over the last minute."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict[str, list[float | None]]]] = []

    def add(self, at_s: float, rows: Sequence[Row]) -> dict[str, Any]:
        """Take in a look.

        Args:
            at_s: when it was.
            rows: what it showed, all ranks in order.

        Returns:
            What to tell a front end that knows the rest: ``at_s`` and, of each series that has
            values, a value a rank.
        """
        if self._samples and at_s < self._samples[-1][0]:
            self._samples = []  # another host's clock
        columns = {name: [getattr(row, name) for row in rows] for name in SERIES}
        columns = {
            name: values for name, values in columns.items() if any(v is not None for v in values)
        }
        self._samples = [sample for sample in self._samples if sample[0] > at_s - _SPAN_S]
        self._samples.append((at_s, columns))
        return _as_message(at_s, columns)

    def all(self) -> list[dict[str, Any]]:
        """All that `add` has told of the last minute, oldest first."""
        return [_as_message(at_s, columns) for at_s, columns in self._samples]


def _as_message(at_s: float, columns: Mapping[str, list[float | None]]) -> dict[str, Any]:
    return {"at_s": round(at_s, 2), **columns}


class Attention:
    """Who looks: views say so again and again, and are forgotten when they have been silent for
    long.

    Args:
        patience_s: for how long, in seconds.
        max_views: further ones are passed over.
    """

    def __init__(self, patience_s: float = 5.0, max_views: int = 100) -> None:
        self._patience_s = patience_s
        self._max_views = max_views
        self._silent_s: dict[str, float] = {}

    def hear(self, view: str, looks: bool) -> bool:
        """A view says whether somebody looks at it.

        Returns:
            Whether it is one that has not been known to.
        """
        is_new = looks and view not in self._silent_s
        if is_new and len(self._silent_s) >= self._max_views:
            return False
        if looks:
            self._silent_s[view] = 0.0
        else:
            self._silent_s.pop(view, None)
        return is_new

    def wait(self, seconds: float) -> None:
        """Time has passed in which views could have been heard."""
        self._silent_s = {
            view: silent_s + seconds
            for view, silent_s in self._silent_s.items()
            if silent_s + seconds < self._patience_s
        }

    def __bool__(self) -> bool:
        return bool(self._silent_s)
