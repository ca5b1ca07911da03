"""Transfers shared-memory segments between hosts, in chunks that the receiver joins.

The message that names a segment travels first, and waits at its destination until the whole segment
has arrived. The chunks follow, no more in flight than arrive within a fraction of a second, so that
they delay no other message for long. Later messages to or from the same ranks wait behind that
message; messages of other ranks and control messages do not.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ..errors import HostError
from . import limits, segments
from .codec import Frame, Parcel, at_rank_for_control
from .messages import Interrupt, Release
from .segment_pool import Segment, SegmentPool
from .segments import SegmentFrame, format_bytes
from .values import Chunk

# Least and largest size of the window: bytes that may be in flight.
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 64 << 10, 16 << 20
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 32 << 10, 1 << 20
# Delay of an acknowledgement beyond that of an idle link: below the first the window grows, above
# the second it shrinks.
_LATE_S, _LATER_S = 0.1, 0.2


class Window:
    """The bound on the bytes of chunks in flight, adapted so that they delay messages behind them
    by about a tenth of a second.

    Args:
        most_bytes: the largest that it may be.

    Attributes:
        num_bytes: the bound, in bytes.
    """

    def __init__(self, most_bytes: int = MAX_WINDOW_BYTES) -> None:
        self._most_bytes = most_bytes
        self.begin()

    def begin(self) -> None:
        """Reset the bound to its minimum, as no bytes are in flight and the connection may have
        changed.
        """
        self.num_bytes = MIN_WINDOW_BYTES
        self._least_s = math.inf

    def note(self, num_bytes: int, took_s: float) -> None:
        """Adapt the bound to the time that the receiver took to acknowledge these bytes."""
        self._least_s = min(self._least_s, took_s)
        late_s = took_s - self._least_s
        if late_s > _LATER_S:
            self.num_bytes = max(MIN_WINDOW_BYTES, self.num_bytes - num_bytes // 2)
        elif late_s < _LATE_S:
            self.num_bytes = min(self._most_bytes, self.num_bytes + num_bytes)


class _Transfer(msgspec.Struct):
    frame: SegmentFrame
    memory: memoryview | None  # None if this process has no address space left for it
    ranks: tuple[int, ...]
    num_left: int


class Sender:
    """Cuts shared-memory segments into chunks for another host, and sends one chunk of each segment
    in turn.

    Each chunk is a message of a `Reliable`, which sends it again after a broken connection and
    reports its acknowledgement.

    Args:
        most_bytes: as of `Window`.
    """

    def __init__(self, most_bytes: int = MAX_WINDOW_BYTES) -> None:
        self._transfers: dict[int, _Transfer] = {}
        self._under_way: dict[tuple[int, int], tuple[int, float]] = {}
        self._num_under_way = 0
        self._window = Window(most_bytes)

    def __bool__(self) -> bool:
        return bool(self._transfers)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of segments that are still to be sent."""
        return sum(transfer.num_left for transfer in self._transfers.values())

    @property
    def givers(self) -> frozenset[int]:
        """The ranks that send, or will read, the segments that are not sent in full yet."""
        return frozenset(rank for each in self._transfers.values() for rank in each.ranks)

    def add(self, frame: SegmentFrame, ranks: tuple[int, ...]) -> None:
        """Queue a segment, to be sent in chunks.

        Args:
            frame: frame that names the segment and keeps it open.
            ranks: the rank that sends the segment, or the ranks that will read it.
        """
        memory = None
        with contextlib.suppress(HostError):
            memory = segments.map_whole(frame)
        self._transfers[frame.ref.loan] = _Transfer(frame, memory, ranks, frame.num_bytes)

    def next(self, now: float) -> Parcel[Chunk] | None:
        """Return the next chunk to send; None if enough bytes are in flight, or none is left."""
        if not self._transfers or self._num_under_way >= self._window.num_bytes:
            return None
        if not self._under_way:
            self._window.begin()
        loan = next(iter(self._transfers))
        transfer = self._transfers.pop(loan)
        most = max(_MIN_CHUNK_BYTES, min(_MAX_CHUNK_BYTES, self._window.num_bytes // 4))
        at = transfer.frame.num_bytes - transfer.num_left
        end = at + min(transfer.num_left, most)
        transfer.num_left -= end - at
        if transfer.num_left:
            self._transfers[loan] = transfer  # behind the others
        self._under_way[loan, at] = end - at, now
        self._num_under_way += end - at
        if transfer.memory is not None:
            data: Frame = transfer.memory[at:end]
        else:
            data = os.pread(transfer.frame.memfd.descriptor, end - at, at)
        return Parcel(Chunk(loan, at, transfer.num_left), (data,))

    def acked(self, parcels: Sequence[Parcel[Any]], now: float) -> None:
        """Record that the receiver has acknowledged these messages, some of which may be chunks."""
        for verb, _ in parcels:
            if type(verb) is Chunk and (verb.loan, verb.at) in self._under_way:
                num_bytes, sent_at = self._under_way.pop((verb.loan, verb.at))
                self._num_under_way -= num_bytes
                self._window.note(num_bytes, now - sent_at)

    def disown(self, ranks: Collection[int]) -> None:
        """Remove ranks that were replaced from the owners of the segments that are being sent."""
        for transfer in self._transfers.values():
            transfer.ranks = tuple(rank for rank in transfer.ranks if rank not in ranks)

    def drop(self, loan: int) -> None:
        """Send no more chunks of a segment."""
        self._transfers.pop(loan, None)


class _Item(msgspec.Struct):
    parcel: Parcel[Any]
    ranks: set[int]
    run: int
    loan: int | None  # number of the segment that it waits for


class _Arriving(msgspec.Struct):
    segment: Segment
    sizes: tuple[int, ...]
    item: _Item
    has_begun: bool = False


class Arrivals:
    """Joins chunks from another host into segments, and holds back each message until its segment
    and those of earlier messages of its ranks are complete.

    Args:
        why_interrupted: text of the error for a segment whose run was interrupted.
        pool: makes the segments.
    """

    def __init__(self, why_interrupted: str, pool: SegmentPool) -> None:
        self._why_interrupted, self._pool = why_interrupted, pool
        self._control = at_rank_for_control()
        self._items: list[_Item] = []
        self._arriving: dict[int, _Arriving] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def admit(
        self, parcel: Parcel[Any], ranks: Collection[int], run: int = -1, has_segment: bool = False
    ) -> list[Parcel[Any]]:
        """Take in a message; hold it back until its segment and those of earlier messages of its
        ranks are complete.

        Args:
            parcel: the message.
            ranks: the message stays behind earlier messages of these ranks.
            run: number of the message's run; -1 for none.
            has_segment: whether its last frame names a segment that has yet to arrive.

        Returns:
            The messages that need not wait: this one, or none.
        """
        if not (has_segment or self._items):
            return [parcel]
        item = _Item(parcel, set(ranks), run, None)
        self._items.append(item)
        if has_segment:
            ref = segments.read_ref(parcel.buffers[-1])
            item.loan = ref.loan
            try:
                segment = self._pool.take(segments.span(ref.sizes))
                self._arriving[ref.loan] = _Arriving(segment, ref.sizes, item)
            except OSError as error:
                self._fail(item, f"a value cannot be received: {error.strerror}")
        return self._pop()

    def take(self, verb: Chunk, data: Frame) -> list[Parcel[Any]] | None:
        """Add a chunk to its segment; return the messages that this completes, or None if no
        message needs the segment.
        """
        if verb.loan not in self._arriving:
            return None
        arriving = self._arriving[verb.loan]
        is_first, arriving.has_begun = not arriving.has_begun, True
        needs_memory = is_first and arriving.segment.is_new
        if needs_memory and (why := _why_not(verb.num_left + len(data))):
            self._fail(arriving.item, why)
            return self._pop()
        try:
            arriving.segment.write_at(data, verb.at)
            if verb.num_left:
                return []
            frame = self._pool.lend(arriving.segment, verb.loan, arriving.sizes)
        except OSError as error:
            self._fail(arriving.item, f"a value cannot be received: {error.strerror}")
            return self._pop()
        del self._arriving[verb.loan]
        _finish(arriving.item, frame)
        return self._pop()

    def interrupt(self, frames: Sequence[Frame]) -> list[Parcel[Any]]:
        """Stop waiting for segments of the runs that a control message interrupts or releases;
        return the messages that are no longer held back.
        """
        verbs = [verb for verb, _ in self._control.decode(frames)]
        runs = {verb.run for verb in verbs if isinstance(verb, Interrupt | Release)}
        return self._abandon([item for item in self._items if item.run in runs], "")

    def holds(self, run: int) -> bool:
        """Return whether a message of a run is held back."""
        return any(item.run == run for item in self._items)

    def abandon(self, why: str, run: int | None = None) -> list[Parcel[Any]]:
        """Give up waiting for all segments, or those of a run, which will not arrive; return the
        messages that are no longer held back.
        """
        return self._abandon([item for item in self._items if run in (None, item.run)], why)

    def forget(self, rank: int) -> list[Parcel[Any]]:
        """Drop the messages of a dead rank; return the messages that waited only behind these."""
        for item in self._items:
            item.ranks.discard(rank)
            if not item.ranks and item.loan is not None:
                self._arriving.pop(item.loan, None)
        self._items = [item for item in self._items if item.ranks]
        return self._pop()

    def _abandon(self, items: Sequence[_Item], why: str) -> list[Parcel[Any]]:
        for item in items:
            if item.loan is not None:
                self._fail(item, why or self._why_interrupted)
        return self._pop()

    def _fail(self, item: _Item, why: str) -> None:
        assert item.loan is not None
        self._arriving.pop(item.loan, None)
        ref = segments.read_ref(item.parcel.buffers[-1])
        missing = msgspec.structs.replace(ref, pid=0, descriptor=-1, why_missing=why)
        _finish(item, msgspec.msgpack.encode(missing))

    def _pop(self) -> list[Parcel[Any]]:
        """Remove and return, in order, the messages that are no longer held back."""
        blocked: set[int] = set()
        waiting: list[_Item] = []
        ready: list[Parcel[Any]] = []
        for item in self._items:
            if item.loan is None and blocked.isdisjoint(item.ranks):
                ready.append(item.parcel)
            else:
                blocked |= item.ranks
                waiting.append(item)
        self._items = waiting
        return ready


def _finish(item: _Item, frame: Frame) -> None:
    item.parcel = Parcel(item.parcel.verb, (*item.parcel.buffers[:-1], frame))
    item.loan = None


def _why_not(num_bytes: int) -> str:
    """Return why a value of this many bytes is not accepted for lack of memory; "" if it is
    accepted.
    """
    if num_bytes < limits.CHECKED_BYTES or num_bytes <= (free := limits.free_bytes()):
        return ""
    return (
        f"a value of {format_bytes(num_bytes)} does not fit where it was to go: "
        f"{format_bytes(free)} of memory are free"
    )
