"""A controller's core to try, and what it decided in short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cellmesh.controller.core import (
    Core,
    Effect,
    Send,
    encode_work,
)
from cellmesh.wire.framing import Parcel, at_rank_for_control
from cellmesh.wire.messages import (
    Failed,
    MeshReady,
    PullNames,
    Ranked,
    RankInfo,
    RankState,
    Welcome,
)

FRAMES = encode_work(PullNames(1, "x"))
FAILED = Failed(1, "ValueError", "no", "Traceback", 3)


def infos(num_ranks: int) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(rank, 100 + rank, "host", "idle") for rank in range(num_ranks))


def ready_core(num_ranks: int = 4) -> Core:
    core = Core(num_ranks)
    core.receive(Parcel(Welcome(1, 2, "host")), 0.0)
    core.receive(Parcel(MeshReady(infos(num_ranks))), 0.0)
    assert core.state == "ready"
    return core


def hear(core: Core, ranks: Sequence[int], verb: Any, now: float = 0.0, buffers: Any = ()) -> list[Effect]:
    return core.receive(Parcel(Ranked(tuple(ranks), verb), buffers), now)


def of(kind: type, effects: Iterable[Effect]) -> list[Any]:
    return [effect for effect in effects if type(effect) is kind]


def sent(effects: Iterable[Effect]) -> list[Parcel[Any]]:
    return [effect.parcel for effect in of(Send, effects)]


def control_sent(effects: Iterable[Effect]) -> list[tuple[tuple[int, ...], Any]]:
    """(ranks, verb) of what goes to control threads."""
    found = []
    for relay, frames in sent(effects):
        assert relay.channel == "control"
        assert relay.run == -1
        found += [(relay.ranks, verb) for verb, _ in at_rank_for_control().decode(frames)]
    return found


def state_of(request: int, run: int, line: int = 5) -> RankState:
    return RankState(request, run, 3, line, "f", "all_reduce", "cpu", 0)
