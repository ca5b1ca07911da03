"""The way from a rank to others to which it has no socket, as these are on different hosts:
messages travel as `Routed`, by way of the agents and the notebook's process. Large values follow
their messages in chunks, of which so few are under way that they delay nothing else for long.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import CellmeshError
from ...stdlib import os, time
from ...wire.bulk import Arrivals, Sender
from ...wire.codec import Frame, Parcel, encode
from ...wire.handles import PeerCall, PeerCancel, at_rank_from_rank
from ...wire.messages import Done, Failed, Pickled
from ...wire.peer_calls import NO_ACTORS, Routed
from ...wire.segment_pool import SegmentPool
from ...wire.segments import INTERRUPTED, SegmentFrame
from ...wire.values import Chunk, Taken, Unwanted
from .peer_connections import Connection

_CODEC = at_rank_from_rank()
# Smaller values travel in their message.
_CHUNKED_BYTES = 32 << 10
# Chunks from one rank to another that may be under way, wherever they are: the notebook's process
# holds no more.
MAX_UNDER_WAY_BYTES = 4 << 20


class Relayed(Connection):
    """A connection to one rank.

    Args:
        context: the objects of this rank (`RankContext`).
        mark, rank: the other rank.
    """

    def __init__(self, context: Any, mark: str, rank: int) -> None:
        self.peer, self.rank, self._mark, self._context = f"rank {rank}", rank, mark, context
        self.pending, self.known, self.is_open = {}, set(), True
        self._sending = threading.RLock()  # a finalizer of user code may send, too
        self._begin()

    def _begin(self) -> None:
        self._sender = Sender(MAX_UNDER_WAY_BYTES)
        self._arrivals = Arrivals(INTERRUPTED, self._context.segments.pool)

    @property
    def number(self) -> int:
        """Descriptor of its socket: none."""
        return -1

    def lend(self, pickled: Pickled, buffers: list[Frame]) -> tuple[Pickled, list[Frame]]:
        """Return a value as all connections of this kind send it: a large one in a segment."""
        if pickled.is_mapped:  # by another connection
            return pickled, buffers
        pool: SegmentPool = self._context.segments.pool
        return pool.lend_pickle(pickled, buffers, _CHUNKED_BYTES)

    def send(self, *parcels: Parcel[Any]) -> None:
        """Send messages, and the chunks that are due, on any thread; in place of a result for which
        there is no memory, send the error.
        """
        parcels = tuple(map(self._lend_result, parcels))
        with self._context.interrupts, self._sending:
            if not self.is_open:
                return
            if parcels:
                self._post(encode(parcels))
            for _, buffers in parcels:
                if buffers and isinstance(buffers[-1], SegmentFrame):
                    self._sender.add(buffers[-1], ())
            while (chunk := self._sender.next(time.monotonic())) is not None:
                self._post(encode([chunk]))

    def _lend_result(self, parcel: Parcel[Any]) -> Parcel[Any]:
        verb, buffers = parcel
        if type(verb) not in (Done, Failed) or verb.payload is None:
            return parcel
        try:
            pickled, frames = self.lend(verb.payload, [*buffers])
        except CellmeshError as error:
            text = str(error)
            return Parcel(Failed(verb.run, type(error).__name__, text, text, 0))
        return Parcel(msgspec.structs.replace(verb, payload=pickled), tuple(frames))

    def admit(self, parcel: Parcel[Any]) -> Sequence[Parcel[Any]]:
        """Take in a message, on the thread that reads; return those that are complete."""
        verb, ready = parcel.verb, list[Parcel[Any]]()
        match verb:
            case Chunk():
                taken = self._arrivals.take(verb, parcel.buffers[0])
                unwanted = [Parcel(Unwanted(verb.loan))] if taken is None else []
                self.send(Parcel(Taken(verb.loan, verb.at)), *unwanted)
                return taken or ()
            case Taken() | Unwanted():
                with self._sending:
                    if type(verb) is Taken:
                        self._sender.acked([Parcel(Chunk(verb.loan, verb.at, 0))], time.monotonic())
                    else:
                        self._sender.drop(verb.loan)
                self.send()
                return ()
            case PeerCancel():
                ready = self._arrivals.abandon("", verb.run)
        run = verb.link.run if type(verb) is PeerCall else -1
        # Calls keep their order while they wait for their values; answers wait for no other ones.
        behind: tuple[int, ...] = ()
        if type(verb) is PeerCall or (type(verb) is PeerCancel and self._arrivals.holds(verb.run)):
            behind = (0,)
        elif type(verb) in (Done, Failed):
            behind = (1 + verb.run,)
        is_mapped = getattr(getattr(verb, "payload", None), "is_mapped", False)
        return [*ready, *self._arrivals.admit(parcel, behind, run, is_mapped)]

    def refuse(self) -> None:
        """Tell the other rank that this one has no actors."""
        self._post((), NO_ACTORS)

    def _post(self, frames: Sequence[Any], why_lost: str = "") -> None:
        message = Routed(self._mark, self.rank, len(frames), why_lost)
        with self._context.interrupts:
            self._context.post(Parcel(message, tuple(frames)))

    def close(self) -> None:
        """End the connection, and drop the values that are under way."""
        self.is_open = False
        with self._sending:
            self._begin()


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
                    continue
                for each in connection.admit(parcel):
                    handles.take(connection, each)


def hear(context: Any, message: Routed, frames: Sequence[Any]) -> None:
    """Handle a message of another rank, on the control thread."""
    if "handles" in vars(context):
        context.handles.relays.arrived.append((message, frames))
        context.handles.wake()
    elif not message.why_lost:
        Relayed(context, message.mark, message.rank).refuse()
