"""The way from a rank to others to which it has no socket, as these are on different hosts:
messages travel as `Routed`, by way of the agents and the notebook's process.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any

from ...errors import MeshUsageError
from ...stdlib import os
from ...wire.codec import Parcel, encode
from ...wire.handles import PeerCall, at_rank_from_rank
from ...wire.messages import Failed
from ...wire.routing import MAX_ROUTED_BYTES, NO_ACTORS, Routed
from ...wire.segments import format_bytes
from .peer_connections import Connection

_CODEC = at_rank_from_rank()


class Relayed(Connection):
    """A connection to one rank.

    Args:
        context: the objects of this rank (`RankContext`).
        mark, rank: the other rank.
    """

    def __init__(self, context: Any, mark: str, rank: int) -> None:
        self.peer, self.rank, self._mark, self._context = f"rank {rank}", rank, mark, context
        self.pending, self.known, self.is_open = {}, set(), True

    @property
    def number(self) -> int:
        """Descriptor of its socket: none."""
        return -1

    def send(self, *parcels: Parcel[Any]) -> None:
        """Send messages, on any thread; in place of a result that is too large, send an error.

        Raises:
            MeshUsageError: a call's arguments are larger than `MAX_ROUTED_BYTES`.
        """
        frames = encode(parcels)
        if (num_bytes := sum(map(len, frames))) > MAX_ROUTED_BYTES:
            error = MeshUsageError(
                f"{format_bytes(num_bytes)} are too much for a call between hosts, which may have "
                f"{format_bytes(MAX_ROUTED_BYTES)}: copy weights by mesh.copy, or let the notebook "
                "call and pass the value on"
            )
            if type(parcels[0].verb) is PeerCall:
                raise error
            text = str(error)
            frames = encode([Parcel(Failed(parcels[0].verb.run, "MeshUsageError", text, text, 0))])
        self._post(frames)

    def refuse(self) -> None:
        """Tell the other rank that this one has no actors."""
        self._post((), NO_ACTORS)

    def _post(self, frames: Sequence[Any], why_lost: str = "") -> None:
        message = Routed(self._mark, self.rank, len(frames), why_lost)
        with self._context.interrupts:
            self._context.post(Parcel(message, tuple(frames)))

    def close(self) -> None:
        """End the connection."""
        self.is_open = False


class Relays:
    """The connections of a rank that go by way of the notebook.

    Args:
        context: the objects of the rank (`RankContext`).

    Attributes:
        arrived: messages that wait to be handled, each with its frames.
        wake: an eventfd that is readable while there are some.
    """

    def __init__(self, context: Any) -> None:
        self.arrived = collections.deque[tuple[Routed, Sequence[Any]]]()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context, self._lock = context, threading.Lock()
        self._all: dict[tuple[str, int], Relayed] = {}

    def to(self, mark: str, rank: int) -> Relayed:
        """Return the connection to a rank."""
        with self._lock:
            known = self._all.get((mark, rank))
            if known is None or not known.is_open:
                known = self._all[mark, rank] = Relayed(self._context, mark, rank)
            return known

    def hear(self, handles: Any) -> None:
        """Handle the messages that have arrived.

        Args:
            handles: the handles of the rank, which read on this thread.
        """
        os.eventfd_read(self.wake)
        while self.arrived:
            message, frames = self.arrived.popleft()
            if message.why_lost:
                for key, lost in [*self._all.items()]:
                    if lost.is_open and (key == (message.mark, message.rank) or not message.mark):
                        handles.lose(lost, message.why_lost)
                continue
            connection = self.to(message.mark, message.rank)
            for parcel in _CODEC.decode(frames):
                if type(parcel.verb) is PeerCall and not handles.is_listening:
                    connection.refuse()
                else:
                    handles.take(connection, parcel)


def hear(context: Any, message: Routed, frames: Sequence[Any]) -> None:
    """Handle a message of another rank, on the control thread."""
    if "handles" in vars(context):
        context.handles.relays.arrived.append((message, frames))
        context.handles.wake()
    elif not message.why_lost:
        Relayed(context, message.mark, message.rank).refuse()
