"""A mesh in the midst of a recovery, and what is said in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cellmesh.controller.core.core import Answer, Change, Core, Effect, HealReport
from cellmesh.wire.attach import RunInfo, Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.groups import Describe, Heal
from cellmesh.wire.messages import Died, Done, MeshReady, Respawn, Respawned
from cellmesh.wire.status import RankInfo, RankState
from cellmesh.wire.values import PullNames

from .core_decisions import (
    FAILED,
    answer_probe,
    heal_all,
    hear,
    infos,
    lose_rank,
    of,
    only,
    ready_core,
    sent,
    told,
)
from .runs import relay

KILLED = "was killed"


def reports(effects: Iterable[Effect]) -> list[HealReport]:
    return [effect.value for effect in of(Answer, effects) if isinstance(effect.value, HealReport)]


def told_of_heals(effects: Iterable[Effect]) -> list[HealReport]:
    return [change.cause for change in of(Change, effects) if isinstance(change.cause, HealReport)]


def healed_by_user(core: Core, now: float = 0.0) -> list[Effect]:
    _, effects = core.heal(now)
    return effects


def die(core: Core, rank: int, now: float = 0.0) -> list[Effect]:
    return core.receive(Parcel(Died(rank, KILLED, "")), now)


def respawned(core: Core, *ranks: int, now: float = 0.0) -> list[Effect]:
    return core.receive(
        Parcel(Respawned(tuple(info for info in infos(4) if info.rank in ranks))), now
    )


def submit(core: Core, run: int, ranks: tuple[int, ...], now: float = 0.0) -> list[Effect]:
    return core.submit(relay(run, ranks), now)


def started(effects: Iterable[Effect]) -> list[tuple[tuple[int, ...], int]]:
    """(ranks, run) of the user's work that is sent."""
    return [(ranks, verb.run) for ranks, verb in told(effects) if type(verb) is PullNames]


def asked_of_agent(effects: Iterable[Effect], kind: type) -> list[Any]:
    return [parcel.verb for parcel in sent(effects) if type(parcel.verb) is kind]


def assert_calm(core: Core) -> None:
    """Nothing is left over: work goes out at once."""
    assert core.deadline() is None
    assert started(submit(core, 999, (0,))) == [((0,), 999)]
    hear(core, (0,), Done(999))


def healing_core(num_ranks: int = 3) -> tuple[Core, Heal]:
    """A mesh whose groups are being healed after a failure."""
    core = ready_core(num_ranks)
    submit(core, 1, tuple(range(num_ranks)))
    effects = hear(core, tuple(range(num_ranks)), FAILED)
    ranks, heal = only(Heal, answer_probe(core, effects, 0.0, is_broken=True))
    assert ranks == tuple(range(num_ranks))
    return core, heal


def state(request: int, run: int = -1, **facts: Any) -> RankState:
    return RankState(request, run, 0, 0, "", "", "cpu", 0, **facts)


def drive(core: Core, effects: list[Effect], now: float = 0.0) -> list[Effect]:
    """Ranks and agent do what is asked, until nothing more is."""
    seen: list[Effect] = []
    while True:
        effects = heal_all(core, effects, now)
        seen += effects
        orders = asked_of_agent(effects, Respawn)
        if not orders:
            return seen
        effects = respawned(core, *orders[-1].ranks, now=now)


def respawning_core(**options: Any) -> Core:
    core = ready_core(3, **options)
    lose_rank(core, Died(1, KILLED, ""))
    assert asked_of_agent(answer_probe(core, healed_by_user(core), 0.0), Respawn) == [Respawn((1,))]
    return core


def describing_core() -> tuple[Core, Any]:
    core = respawning_core()
    return core, only(Describe, answer_probe(core, respawned(core, 1), 0.0))


def attached_core(
    num_ranks: int = 2, dead: tuple[int, ...] = (), runs: tuple[RunInfo, ...] = (), **options: Any
) -> tuple[Core, list[Effect]]:
    core = Core(num_ranks, **options)
    core.receive(Parcel(Welcome(1, 2, "host", next_run=8, runs=runs)), 0.0)
    ranks = tuple(
        RankInfo(
            rank,
            1,
            "host",
            "dead" if rank in dead else "idle",
            ending=KILLED if rank in dead else "",
        )
        for rank in range(num_ranks)
    )
    return core, core.receive(Parcel(MeshReady(ranks)), 0.0)
