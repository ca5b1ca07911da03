"""A supervisor to try, and what it decided in short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.messages import Done, RankReady, Relay
from cellmesh.wire.values import PullNames
from cellmesh.workers.agent.supervisor import Action, Supervisor, Up

FRAMES = encode([Parcel(PullNames(1, "x"))])
READY = Parcel(RankReady("cpu", "gloo"))
LATER = 1e6


def make(num_ranks: int = 3, backend: str = "gloo") -> Supervisor:
    return Supervisor(range(num_ranks), backend, "host", 0.0)


def pids(num_ranks: int, incarnation: int = 1) -> dict[int, int]:
    return {rank: 100 * incarnation + rank for rank in range(num_ranks)}


def started(num_ranks: int = 3) -> Supervisor:
    supervisor = make(num_ranks)
    supervisor.zygote_ready(0)
    supervisor.forked(pids(num_ranks))
    for rank in range(num_ranks):
        supervisor.from_rank(rank, READY, 0.0)
    assert supervisor.state == "ready"
    return supervisor


def of(kind: type, actions: Iterable[Action]) -> list[Any]:
    return [action for action in actions if type(action) is kind]


def up(actions: Iterable[Action]) -> list[Any]:
    """The verbs that go to the controller."""
    return [parcel.verb for action in of(Up, actions) for parcel in action.parcels]


def work(supervisor: Supervisor, run: int, ranks: Sequence[int]) -> list[Action]:
    return supervisor.relay(Relay(tuple(ranks), "work", run, len(FRAMES)), FRAMES)


def done(supervisor: Supervisor, rank: int, run: int, now: float = 0.0) -> list[Action]:
    return supervisor.from_rank(rank, Parcel(Done(run)), now)


def phases(supervisor: Supervisor) -> list[str]:
    return [info.phase for info in supervisor.report({})]
