"""What a `Supervisor` decides that the agent does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...wire.codec import Frame, Parcel
from ...wire.messages import Channel


class Fork(msgspec.Struct, frozen=True):
    """Action: the agent forks these ranks; without a zygote, it starts one first."""

    ranks: tuple[int, ...]
    incarnation: int  # how often all ranks have been forked
    rejoin: bool = False  # they replace dead ones, and join the living ranks' process groups later


class KillRanks(msgspec.Struct, frozen=True):
    """Action: the agent sends SIGKILL to these ranks and to what they started."""

    ranks: tuple[int, ...]


class AskToLeave(msgspec.Struct, frozen=True):
    """Action: the agent asks these ranks to exit."""

    ranks: tuple[int, ...]


class ToRanks(msgspec.Struct, frozen=True):
    """Action: the agent writes frames to the sockets of ranks."""

    ranks: tuple[int, ...]
    channel: Channel
    frames: Sequence[Frame]


class Up(msgspec.Struct, frozen=True):
    """Action: the agent sends messages to the controller."""

    parcels: Sequence[Parcel[Any]]


Action = Fork | KillRanks | AskToLeave | ToRanks | Up
