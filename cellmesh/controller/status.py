"""The status of all ranks of a mesh: snapshots for the live dashboard, and Python stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ..errors import NoMeshError
from ..wire.ranks import describe_ranks, group_ranks
from ..wire.status import RankInfo, RankState, Stacks, StackText
from .core.effects import State
from .core.mesh_state import FIRST_HEAL
from .core.sweeps import SWEEP_S
from .core.verdict import find_verdict
from .session.session import Session

# Most that is read of a log, from its end.
LOG_BYTES = 1 << 20

Activity = Literal["idle", "runs", "waits", "asks", "heals", "new", "starts", "silent", "dead"]


class Snapshot(msgspec.Struct, frozen=True):
    """The processes and activities of all ranks of a mesh at one moment.

    Attributes:
        at_s: time of the agent's monotonic clock, in seconds.
        state: state of the mesh, such as ``ready``.
        dims: dims of the DeviceMesh, name -> size.
        infos: process, device and memory of each rank, as the agent reports them.
        states: rank -> its activity; without ranks that are dead or did not answer.
    """

    at_s: float
    state: State
    dims: Mapping[str, int]
    infos: Sequence[RankInfo] = ()
    states: Mapping[int, RankState] = msgspec.field(default_factory=dict)


def take_snapshot(session: Session) -> Snapshot | None:
    """Ask the agent and all ranks for their states. Blocks, at most a second for silent ranks.

    Returns:
        The snapshot; None if the mesh has ended.

    Raises:
        HostError: the agent does not answer.
    """
    host = session.ask_host()
    if host is None:
        return None
    # Starting ranks cannot answer yet.
    ranks = [info.rank for info in host.ranks]
    states = session.states(ranks) if session.state == "ready" else {}
    return Snapshot(host.at_s, session.state, dict(session.dims), host.ranks, states)


def find_trouble(snapshot: Snapshot) -> str:
    """Return the reason for which ranks of a snapshot wait forever; "" if none is known."""
    dead = {info.rank for info in snapshot.infos if info.phase == "dead"}
    verdict = find_verdict(snapshot.states, (), len(snapshot.infos), SWEEP_S, dead)
    return verdict.text if verdict is not None else ""


def activity_of(info: RankInfo, state: RankState | None) -> Activity:
    """Return a rank's activity; ``new`` if it is idle, has replaced a dead rank and is empty."""
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


def stacks_of(
    session: Session, ranks: Sequence[int], all_threads: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return ranks' Python stacks, each with the ranks that have it."""
    dead = session.dead_ranks
    living = [rank for rank in ranks if rank not in dead]
    answers: Mapping[int, StackText] | None = session.ask(
        lambda core, now: core.ask(living, lambda number: Stacks(number, all_threads), now)
    )
    shown = dict.fromkeys(ranks, "  did not answer: it is stopped, or too busy to")
    shown |= dict.fromkeys(dead.intersection(ranks), "  dead")
    shown |= {rank: answer.text.rstrip("\n") for rank, answer in (answers or {}).items()}
    return group_ranks(shown)


def show_stacks(groups: Mapping[str, Sequence[int]]) -> str:
    """Return Python stacks (`stacks_of`) as one text, each below its ranks."""
    return "\n\n".join(f"{describe_ranks(ranks)}:\n{text}" for text, ranks in groups.items())


def show_log(session: Session, rank: int, num_lines: int) -> str:
    """Return the last lines of a rank's log, below a line that says where they are from.

    Raises:
        NoMeshError: the mesh has ended.
    """
    log = session.ask_log(rank, LOG_BYTES)
    if log is None:
        raise NoMeshError("the mesh has ended, and its logs with it")
    lines = log.text.splitlines()
    head = f"---- rank {rank}: last {min(num_lines, len(lines))} lines of {log.place}"
    return "\n".join([head, *lines[-num_lines:]])
