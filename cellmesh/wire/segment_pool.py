"""A pool of shared-memory segments that a process writes again, for later values.

A process that maps a segment sees later writes in each page that it has not written itself. So a
segment is written again only while the kernel grants its writer a write lease (``F_SETLEASE`` of
fcntl(2)). It does so only if the segment is neither open elsewhere, nor mapped, nor in a socket's
queue: not in the process that has received the value, in a child that this has forked, or in an
agent that keeps the value for another notebook. Where it grants no leases, no segment is reused,
unless the controller says that the reads of its value have ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import sys
import threading
from collections.abc import Collection, Sequence

from ..errors import MeshUsageError
from . import limits, segments
from .codec import Frame
from .messages import Pickled
from .segments import MIN_BYTES, Memfd, SegmentFrame, format_bytes

# Maximum size of the segments that a pool keeps, as a fraction of the memory that is free when it
# keeps its first one; the ranks of a host share one such fraction.
KEPT_PART = 1 / 8
# Maximum number of segments that a pool keeps, each with a descriptor.
MAX_SEGMENTS = 64
# A segment is reused only for data of at least this fraction (1 / n) of its size.
_MAX_SLACK = 4


class Segment:
    """A shared-memory segment that its writer may write again; it is mapped on its first reuse, as
    writing through a mapping is faster than ``write``.

    Args:
        num_bytes: size of the segment, in bytes.
        name: name of the segment in ``/proc``.

    Raises:
        OSError: the system cannot create a segment of that size.

    Attributes:
        is_new: whether the segment has not been lent yet, and may have no memory.
        loan: number of its last use; -1 before the first.
    """

    def __init__(self, num_bytes: int, name: str) -> None:
        made = segments.create(num_bytes, name)
        # Opened again, as the kernel counts no writer for `memfd_create`, and refuses the lease.
        self._memfd = _open_again(made, os.O_RDWR)
        self.num_bytes, self.is_new, self.loan = num_bytes, True, -1
        self._memory: memoryview | None = None

    def is_unread(self) -> bool:
        """Return whether no process can read the segment any more, except through its writer."""
        number = self._memfd.descriptor
        try:
            # A process that opens the segment during the lease makes the kernel send a signal; the
            # default, SIGIO, would end this process.
            fcntl.fcntl(number, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def fill(self, buffers: Sequence[Frame]) -> None:
        """Write all buffers into the segment, one after the other; raises like `write_at`."""
        for at, buffer in zip(segments.offsets([len(b) for b in buffers]), buffers, strict=True):
            self.write_at(buffer, at)

    def write_at(self, data: Frame, at: int) -> None:
        """Write a part of the value at an offset, in bytes.

        Raises:
            OSError: the memory cannot be allocated.
        """
        if self.is_new:
            segments.write_at(self._memfd, data, at)
            return
        if self._memory is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = memoryview(mmap.mmap(self._memfd.descriptor, self.num_bytes, flags))
        _copy(self._memory[at : at + len(data)], data)

    def open_frame(self, loan: int, sizes: Sequence[int]) -> SegmentFrame:
        """Open the segment for readers, and return the message frame that names it.

        Args:
            loan, sizes: see `segments.Ref`.
        """
        self.is_new, self.loan = False, loan
        return SegmentFrame.of(_open_again(self._memfd, os.O_RDONLY), loan, sizes)


def _open_again(memfd: Memfd, access: int) -> Memfd:
    return Memfd(os.open(f"/proc/self/fd/{memfd.descriptor}", access | os.O_CLOEXEC))


def _copy(target: memoryview, source: Frame) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        target[:] = source
    else:  # numpy releases the GIL while it copies
        numpy.copyto(numpy.frombuffer(target, "u1"), numpy.frombuffer(source, "u1"))


class SegmentPool:
    """The shared-memory segments of one process that it may write again; usable on any thread.

    Args:
        name: name of the segments in ``/proc``.
        num_pools: number of pools that share the bound on kept memory.
    """

    def __init__(self, name: str, num_pools: int = 1) -> None:
        self._name, self._part = name, KEPT_PART / num_pools
        self._max_bytes: float | None = None
        self._lock = threading.Lock()
        self._kept: list[Segment] = []  # the most recently used is the last
        self._pid = os.getpid()

    def take(self, num_bytes: int, ended: Collection[int] = ()) -> Segment:
        """Return a segment of at least this size, in bytes, that nobody reads: one that was lent
        before, or a new one.

        Args:
            num_bytes: the size.
            ended: numbers of uses that have ended, though readers may keep their mappings.

        Raises:
            OSError: the system cannot create a segment of that size.
        """
        with self._lock:
            if os.getpid() != self._pid:  # a forked child, whose parent goes on to write to them
                self._kept, self._pid = [], os.getpid()
            fitting = [s for s in self._kept if num_bytes <= s.num_bytes <= _MAX_SLACK * num_bytes]
            for segment in sorted(fitting, key=lambda s: s.num_bytes):
                if segment.loan in ended or segment.is_unread():
                    self._kept.remove(segment)
                    return segment
        if num_bytes >= limits.CHECKED_BYTES and num_bytes > limits.free_bytes():
            self.clear()
        return Segment(num_bytes, self._name)

    def lend(self, segment: Segment, loan: int, sizes: Sequence[int]) -> SegmentFrame:
        """Keep a segment that now holds a value, to take it again once nobody reads it; return the
        message frame that names it, and is one of its readers.

        Args:
            segment: the segment, from `take`.
            loan, sizes: see `segments.Ref`.
        """
        frame = segment.open_frame(loan, sizes)
        with self._lock:
            if self._max_bytes is None:
                self._max_bytes = self._part * limits.free_bytes()
            self._kept.append(segment)
            while (
                len(self._kept) > MAX_SEGMENTS
                or sum(each.num_bytes for each in self._kept) > self._max_bytes
            ):
                del self._kept[0]
        return frame

    def lend_pickle(
        self, pickled: Pickled, buffers: Sequence[Frame], least_bytes: int = MIN_BYTES
    ) -> tuple[Pickled, list[Frame]]:
        """Write a pickle's buffers into a segment, if they are large.

        Args:
            pickled, buffers: as `payload.dumps` returns them.
            least_bytes: size from which they are large.

        Returns:
            The pickle and the frames to send; hold these until nobody can need the segment any
            more.

        Raises:
            MeshUsageError: the limit on file size is lower; nothing has been sent.
            UnpicklableError: there is not enough memory; nothing has been sent.
        """
        num_bytes = segments.num_bytes_of(pickled, buffers)
        if num_bytes < least_bytes or not segments.are_possible():
            return pickled, list(buffers)
        mapped, parts = segments.fold_in(pickled, buffers, least_bytes)
        sizes = [len(part) for part in parts]
        try:
            segment = self.take(segments.span(sizes))
            if segment.is_new:
                limits.check_fits(segment.num_bytes)
            segment.fill(parts)
            return mapped, [self.lend(segment, segments.new_loan(), sizes)]
        except OSError as e:
            raise MeshUsageError(
                f"{format_bytes(num_bytes)} cannot be put where ranks could map it: {e.strerror} "
                "(`ulimit -f` shows the limit of files). Nothing has been sent"
            ) from e

    def clear(self) -> None:
        """Keep no segment: each is freed once nobody reads it."""
        with self._lock:
            self._kept.clear()
