"""A pool of shared-memory segments in which the controller sends values to ranks; released segments
are reused.

A rank sees later writes to a segment in each page that it has not written itself. So a segment is
reused only after its run has succeeded on every rank, and each of them has reported that nothing
refers to the segment's memory any more (`Freed`). If that cannot be known (a rank died, failed, or
forked in between), the pool drops the segment, and its memory is freed once the last process has
unmapped it.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...errors import CellmeshError, MeshUsageError
from ...wire import limits, segments
from ...wire.codec import Frame, Parcel
from ...wire.messages import Done, Pickled, Ranked
from ...wire.payload import stand_in
from ...wire.segments import SegmentFrame, describe_bytes, inlined, memfd_name, open_segment
from ...wire.values import Freed
from ..run import Run

# A returned value's segment is mapped and closed if its descriptor has this number or a higher one.
MANY_DESCRIPTORS = 512


def open_value(parcel: Parcel[Any]) -> Parcel[Any]:
    """Open the segment that holds a returned value; the agent keeps the segment open until this
    message is acknowledged.

    Each open segment has a file descriptor, of which a process may have 1024. If many are open, the
    segment is mapped and its descriptor closed.

    Args:
        parcel: message from the agent.
    """
    said = parcel.verb
    if type(said) is not Ranked or type(said.verb) is not Done:
        return parcel
    value = said.verb.payload
    if value is None or not value.is_mapped:
        return parcel
    try:
        frame = open_segment(parcel.buffers[0])
        if frame.memfd.descriptor < MANY_DESCRIPTORS:
            return Parcel(said, (frame,))
        plain, buffers = inlined(value, frame)
        answer = msgspec.structs.replace(said.verb, payload=plain)
        return Parcel(Ranked(said.ranks, answer), tuple(buffers))
    except CellmeshError as error:
        lost = msgspec.structs.replace(said.verb, payload=stand_in(str(error)))
        return Parcel(Ranked(said.ranks, lost))


# Maximum size of all segments that wait for reuse, as a fraction of the machine's memory.
_FREE_PART = 1 / 8
# Maximum number of segments that ranks hold or that wait for reuse, each with a descriptor; further
# segments are not reused.
MAX_SEGMENTS = 64
# A segment is reused only for data of at least this fraction (1 / n) of its size.
_MAX_SLACK = 4


class _Segment:
    """A shared-memory segment of the pool; it is mapped on its first reuse, as writing through a
    mapping is faster than ``write``.
    """

    def __init__(self, num_bytes: int, name: str) -> None:
        self.memfd = segments.create(num_bytes, name)
        self.num_bytes = num_bytes
        self._is_warm = False
        self._memory: memoryview | None = None

    def fill(self, buffers: Sequence[Frame]) -> None:
        if not self._is_warm:
            segments.write(self.memfd, buffers)
            self._is_warm = True
            return
        if self._memory is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = memoryview(mmap.mmap(self.memfd.descriptor, self.num_bytes, flags))
        for start, buffer in zip(segments.offsets([len(b) for b in buffers]), buffers, strict=True):
            _copy(self._memory[start : start + len(buffer)], buffer)


def _copy(target: memoryview, source: Frame) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        target[:] = source
    else:  # numpy releases the GIL while it copies
        numpy.copyto(numpy.frombuffer(target, "u1"), numpy.frombuffer(source, "u1"))


class _LentFrame(SegmentFrame):
    """The message frame that names a segment of the pool; if the frame is dropped before its run is
    sent, the segment is not reused.
    """

    segment: _Segment


@dataclass
class _Loan:
    segment: _Segment
    holders: set[int]  # ranks that may refer to the segment
    has_ended: bool = False  # whether its run has ended


class SegmentPool:
    """The shared-memory segments of one mesh's controller; usable on any thread.

    Args:
        name: name of the mesh; ``/proc`` and ``cellmesh ps`` show it.
    """

    def __init__(self, name: str) -> None:
        self._name = memfd_name(name)
        self._lock = threading.Lock()
        self._free: list[_Segment] = []  # the most recently used is the last
        self._loans: dict[int, _Loan] = {}

    def lend(self, pickled: Pickled, buffers: Sequence[Frame]) -> tuple[Pickled, list[Frame]]:
        """Write a pickle's buffers into a segment, if they are large.

        Args:
            pickled, buffers: as `payload.dumps` returns them.

        Returns:
            The pickle and the frames to send; call `keep` before they are sent.

        Raises:
            MeshUsageError: there is not enough memory, or the limit on file size is lower; nothing
                has been sent.
        """
        num_bytes = segments.num_bytes_of(pickled, buffers)
        if num_bytes < segments.MIN_BYTES or not segments.are_possible():
            return pickled, list(buffers)
        mapped, parts = segments.fold_in(pickled, buffers)
        sizes = [len(part) for part in parts]
        try:
            segment = self._take(segments.span(sizes))
            segment.fill(parts)
        except OSError as e:
            raise MeshUsageError(
                f"{describe_bytes(num_bytes)} cannot be put where ranks could map it: {e.strerror} "
                "(`ulimit -f` shows the limit of files). Nothing has been sent"
            ) from e
        frame = _LentFrame.of(segment.memfd, segments.new_loan(), sizes)
        assert isinstance(frame, _LentFrame)
        frame.segment = segment
        return mapped, [frame]

    def keep(self, frame: SegmentFrame, ranks: Sequence[int]) -> None:
        """Record that a run whose arguments are in a segment is about to be sent to these ranks."""
        assert isinstance(frame, _LentFrame)
        with self._lock:
            if len(self._loans) + len(self._free) < MAX_SEGMENTS:
                self._loans[frame.ref.loan] = _Loan(frame.segment, set(ranks))

    def follow(self, run: Run[object], frame: SegmentFrame) -> None:
        """Record that a run whose arguments are in a segment was sent, and watch for its end."""
        run.on_end(lambda: self._run_ended(frame.ref.loan, not run.failed_ranks()))

    def forget(self, frame: SegmentFrame) -> None:
        """Never reuse a segment, as it is unknown whether its run was sent."""
        with self._lock:
            self._loans.pop(frame.ref.loan, None)

    def freed(self, ranks: Sequence[int], news: Freed) -> None:
        """Record that these ranks hold no reference to the memory of a segment any more."""
        with self._lock:
            loan = self._loans.get(news.loan)
            if loan is None:
                return
            if news.is_shared:
                del self._loans[news.loan]
                return
            loan.holders.difference_update(ranks)
            self._take_back(news.loan, loan)

    def rank_ended(self, rank: int) -> None:
        """Never reuse the segments of a rank that has died: processes that it forked may read
        them.
        """
        with self._lock:
            self._loans = {
                key: loan for key, loan in self._loans.items() if rank not in loan.holders
            }

    def clear(self) -> None:
        """Drop all segments: the ranks have ended, or belong to another controller."""
        with self._lock:
            self._free.clear()
            self._loans.clear()

    def _run_ended(self, key: int, went_well: bool) -> None:
        with self._lock:
            loan = self._loans.get(key)
            if loan is None:
                return
            if not went_well:  # it is unknown whether the failed rank has mapped the segment
                del self._loans[key]
                return
            loan.has_ended = True
            self._take_back(key, loan)

    def _take_back(self, key: int, loan: _Loan) -> None:
        if loan.holders or not loan.has_ended:
            return
        del self._loans[key]
        self._free.append(loan.segment)
        bound = _FREE_PART * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        while sum(segment.num_bytes for segment in self._free) > bound:
            del self._free[0]

    def _take(self, num_bytes: int) -> _Segment:
        with self._lock:
            fitting = [s for s in self._free if num_bytes <= s.num_bytes <= _MAX_SLACK * num_bytes]
            if fitting:
                segment = min(fitting, key=lambda s: s.num_bytes)
                self._free.remove(segment)
                return segment
            if num_bytes > limits.free_bytes():
                self._free.clear()
        limits.check_fits(num_bytes)
        return _Segment(num_bytes, self._name)
