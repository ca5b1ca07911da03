"""A controller's core to try, and what it decided in short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cellmesh.controller.core.core import Core, Effect, Send
from cellmesh.wire.attach import Welcome
from cellmesh.wire.codec import Parcel, at_rank_for_control, at_rank_for_work
from cellmesh.wire.groups import Blueprint, Describe, GroupCount, Heal
from cellmesh.wire.messages import Done, Failed, MeshReady, Progress, Ranked, Relay, Resume
from cellmesh.wire.status import Probe, RankInfo, RankState

from .runs import relay


def failed(run: int, type_name: str = "ValueError", text: str = "") -> Failed:
    return Failed(run, type_name, text, "", 0)


def infos(num_ranks: int) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(rank, 100 + rank, "host", "idle") for rank in range(num_ranks))


def ready_core(num_ranks: int = 4, **options: Any) -> Core:
    core = Core(num_ranks, **options)
    core.receive(Parcel(Welcome(1, 2, "host")), 0.0)
    core.receive(Parcel(Progress("forking ranks", 0)), 0.0)
    core.receive(Parcel(MeshReady(infos(num_ranks))), 0.0)
    assert core.state == "ready"
    return core


def running_core(num_ranks: int, *runs: tuple[int, ...], **options: Any) -> Core:
    """A core that has given ranks their runs, which are numbered from 1, at 0.0 s."""
    core = ready_core(num_ranks, **options)
    for number, ranks in enumerate(runs, 1):
        core.submit(relay(number, ranks), 0.0)
    return core


def hear(
    core: Core, ranks: Sequence[int], verb: Any, now: float = 0.0, buffers: Any = ()
) -> list[Effect]:
    return core.receive(Parcel(Ranked(tuple(ranks), verb), buffers), now)


def heal_all(core: Core, effects: Iterable[Effect], now: float = 0.0) -> list[Effect]:
    """Have idle ranks do what a recovery asks of them, until nothing more is asked; its other
    effects.
    """
    rest: list[Effect] = []
    waiting = list(effects)
    while waiting:
        effect = waiting.pop(0)
        if type(effect) is not Send or type(effect.parcel.verb) is not Relay:
            rest.append(effect)
            continue
        order, frames = effect.parcel
        codec = at_rank_for_control() if order.channel == "control" else at_rank_for_work()
        for verb, _ in codec.decode(frames):
            match verb:
                case Probe(request):
                    waiting += hear(
                        core, order.ranks, RankState(request, -1, 0, 0, "", "", "cpu", 0), now
                    )
                case Describe(request):
                    waiting += hear(core, order.ranks, Blueprint(request, b"groups"), now)
                case Heal():
                    waiting += hear(core, order.ranks, Done(verb.run), now)
                case Resume():
                    pass
                case _:
                    rest.append(effect)
    return rest


def of(kind: type, effects: Iterable[Effect]) -> list[Any]:
    return [effect for effect in effects if type(effect) is kind]


def sent(effects: Iterable[Effect]) -> list[Parcel[Any]]:
    return [effect.parcel for effect in of(Send, effects)]


def control_sent(effects: Iterable[Effect]) -> list[tuple[tuple[int, ...], Any]]:
    """(ranks, verb) of what goes to control threads."""
    found = []
    for order, frames in sent(effects):
        assert order.channel == "control"
        assert order.run == -1
        found += [(order.ranks, verb) for verb, _ in at_rank_for_control().decode(frames)]
    return found


def told(effects: Iterable[Effect]) -> list[tuple[tuple[int, ...], Any]]:
    """(ranks, verb) of what goes to ranks, on either channel."""
    found = []
    for order, frames in sent(effects):
        if type(order) is Relay:
            codec = at_rank_for_control() if order.channel == "control" else at_rank_for_work()
            found += [(order.ranks, verb) for verb, _ in codec.decode(frames)]
    return found


def only(kind: type, effects: Iterable[Effect]) -> tuple[tuple[int, ...], Any]:
    """The one verb of a kind that goes to ranks."""
    [found] = [(ranks, verb) for ranks, verb in told(effects) if type(verb) is kind]
    return found


def counted(
    number: int, ranks: tuple[int, ...] = (), name: str = "world", **messages: Any
) -> tuple[Any, ...]:
    """A rank's counts with this many collectives on one group."""
    return (GroupCount(name, ranks, number, **messages),)
