"""The status of all ranks of a mesh: snapshots for the live dashboard, and where ranks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..wire.ranks import describe_ranks, group_ranks
from ..wire.status import RankInfo, RankState, Stacks, StackText
from .core.effects import State
from .core.mesh_state import FIRST_HEAL
from .core.sweeps import SWEEP_S
from .core.verdict import find_verdict
from .session.session import Session

Activity = Literal["idle", "runs", "waits", "asks", "heals", "new", "starts", "silent", "dead"]


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
    # Ranks that start cannot answer yet.
    ranks = [info.rank for info in host.ranks]
    states = session.states(ranks) if session.state == "ready" else {}
    return Snapshot(host.at_s, session.state, dict(session.dims), host.ranks, states)


def find_trouble(snapshot: Snapshot) -> str:
    """Return why some ranks of a snapshot can never go on; "" if they can, as far as is known."""
    dead = {info.rank for info in snapshot.infos if info.phase == "dead"}
    verdict = find_verdict(snapshot.states, (), len(snapshot.infos), SWEEP_S, dead)
    return verdict.text if verdict is not None else ""


def activity_of(info: RankInfo, state: RankState | None) -> Activity:
    """Return a rank's activity; ``new``: it is idle, has replaced another and holds nothing."""
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


def show_stacks(session: Session, ranks: Sequence[int], all_threads: bool = False) -> str:
    """Return ranks' Python stacks as one text, equal stacks once, below the ranks that have
    them.
    """
    dead = session.dead_ranks
    living = [rank for rank in ranks if rank not in dead]
    answers: Mapping[int, StackText] | None = session.ask(
        lambda core, now: core.ask(living, lambda number: Stacks(number, all_threads), now)
    )
    shown = dict.fromkeys(ranks, "  did not answer: it is stopped, or too busy to")
    shown |= dict.fromkeys(dead.intersection(ranks), "  dead")
    shown |= {rank: answer.text.rstrip("\n") for rank, answer in (answers or {}).items()}
    return "\n\n".join(
        f"{describe_ranks(group)}:\n{text}" for text, group in group_ranks(shown).items()
    )
