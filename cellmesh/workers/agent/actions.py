"""The actions that a `Supervisor` returns, and that the agent carries out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...wire.codec import Frame, Parcel
from ...wire.messages import Channel


class Fork(msgspec.Struct, frozen=True):
    """Fork these ranks; without a zygote, start one first, which reports when it can fork.

    Attributes:
        ranks: which.
        incarnation: how often all ranks have been forked.
        rejoin: they replace dead ones, and join the living ranks' process groups later.
    """

    ranks: tuple[int, ...]
    incarnation: int
    rejoin: bool = False


class KillRanks(msgspec.Struct, frozen=True):
    """SIGKILL these ranks and what they started."""

    ranks: tuple[int, ...]


class AskToLeave(msgspec.Struct, frozen=True):
    """Ask these ranks to exit."""

    ranks: tuple[int, ...]


class ToRanks(msgspec.Struct, frozen=True):
    """Write frames to the sockets of ranks."""

    ranks: tuple[int, ...]
    channel: Channel
    frames: Sequence[Frame]


class Up(msgspec.Struct, frozen=True):
    """Send a verb to the controller."""

    parcels: Sequence[Parcel[Any]]


class End(msgspec.Struct, frozen=True):
    """Every process of the mesh has ended: the agent removes its files and exits."""

    reason: str


Action = Fork | KillRanks | AskToLeave | ToRanks | Up | End


def join_relays(actions: Sequence[Action]) -> list[Action]:
    """Join consecutive `ToRanks` to the same ranks into one message."""
    if len(actions) < 2:
        return list(actions)
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
