"""Shared-memory segments (memfds), written once and mapped by the processes of a host that read
large values.

A segment is a memfd that holds the out-of-band buffers of one pickle, one after the other. A
message contains a `SegmentFrame` instead, which names a process and the descriptor under which it
has the memfd open; a receiver opens it there by ``/proc``, checks its inode, and maps it
copy-on-write. A memfd has no path: it exists as long as some process has it open or mapped.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import HostError, ProtocolError
from .codec import Frame
from .messages import Pickled

# Below this many bytes, frames through the agent are faster (docs/architecture.md has the
# measurement).
MIN_BYTES = 512 << 10
# Vector instructions want their data aligned.
_ALIGN_BYTES = 64
# Flags of mmap(2); Python has the first from 3.13 on.
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10
_WHY_NOT_OPEN = {
    errno.EMFILE: ": this process has as many files open as it may "
    "(`ulimit -n`): drop values, or raise that",
    errno.ENFILE: ": the system has as many files open as it may (sysctl fs.file-max)",
    errno.ENOENT: ": that process has ended",
    errno.EACCES: ": this process runs as another user",
    errno.EPERM: ": this process runs as another user",
}


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """Address of a shared-memory segment: a process that has it open, its descriptor there, and the
    sizes of its buffers.

    Attributes:
        pid, descriptor: the process that has the memfd open, and its descriptor there.
        inode: inode of the memfd, which reveals a reused process number or descriptor.
        loan: number of this use of the segment.
        sizes: sizes of the buffers, in bytes.
        why_missing: why a segment from another host did not arrive; "" if it did.
    """

    pid: int
    descriptor: int
    inode: int
    loan: int
    sizes: tuple[int, ...]
    why_missing: str = ""


INTERRUPTED = "the run was interrupted before its value had arrived"


class Memfd:
    """A memfd's file descriptor, closed with the last reference to this object."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class SegmentFrame(bytes):
    """The message frame that names a shared-memory segment; its memfd stays open as long as the
    frame exists.
    """

    memfd: Memfd
    ref: Ref

    @classmethod
    def of(cls, memfd: Memfd, loan: int, sizes: Sequence[int]) -> SegmentFrame:
        """Make the message frame that names this shared-memory segment.

        Args:
            memfd: the segment.
            loan: see `Ref`.
            sizes: see `Ref`.
        """
        inode = os.fstat(memfd.descriptor).st_ino
        ref = Ref(os.getpid(), memfd.descriptor, inode, loan, tuple(sizes))
        frame = cls(msgspec.msgpack.encode(ref))
        frame.memfd, frame.ref = memfd, ref
        return frame

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the buffers take in the segment, with padding."""
        return span(self.ref.sizes)


def read_ref(frame: Frame) -> Ref:
    """Decode the segment's address (`Ref`) from a received `SegmentFrame`.

    Raises:
        ProtocolError: the frame names no segment.
    """
    try:
        return msgspec.msgpack.decode(frame, type=Ref)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"a frame that is to name a segment does not decode: {e}") from e


def open_segment(frame: Frame) -> SegmentFrame:
    """Open, in this process, the shared-memory segment that a frame of another process names.

    Args:
        frame: the received frame; a `SegmentFrame` of this process is returned unchanged.

    Raises:
        HostError: the process that held the segment has ended, or access to it is denied.
        KeyboardInterrupt: the run was interrupted while the segment was sent by another host.
        ProtocolError: the frame names no segment.
    """
    if isinstance(frame, SegmentFrame):
        return frame
    ref = read_ref(frame)
    if ref.why_missing == INTERRUPTED:
        raise KeyboardInterrupt
    if ref.why_missing:
        raise HostError(ref.why_missing)
    try:
        memfd = Memfd(os.open(f"/proc/{ref.pid}/fd/{ref.descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as e:
        why = _WHY_NOT_OPEN.get(e.errno or 0, "")
        raise HostError(
            f"a value of {format_bytes(span(ref.sizes))} cannot be read from process {ref.pid}, "
            f"which wrote it ({e.strerror}){why}"
        ) from e
    status = os.fstat(memfd.descriptor)
    if status.st_ino != ref.inode or status.st_size < span(ref.sizes):
        raise HostError(f"a value is no longer where process {ref.pid} has written it")
    return SegmentFrame.of(memfd, ref.loan, ref.sizes)


@functools.cache
def are_possible() -> bool:
    """Return whether processes on this system can open each other's memfds, which a sandbox may
    forbid.
    """
    try:
        memfd = create(1, "cellmesh-probe")
        os.close(os.open(f"/proc/{os.getpid()}/fd/{memfd.descriptor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def new_loan() -> int:
    """Return a random number for one use of a segment, which no process of the mesh has used
    before.
    """
    return int.from_bytes(os.urandom(8), "big") >> 2


def create(num_bytes: int, name: str) -> Memfd:
    """Create an empty shared-memory segment (a memfd) for the buffers of one value.

    Args:
        num_bytes: size of the segment, in bytes.
        name: name of the segment in ``/proc``.

    Raises:
        OSError: the system cannot create a segment of that size.
    """
    memfd = Memfd(os.memfd_create(name, os.MFD_CLOEXEC))
    os.ftruncate(memfd.descriptor, num_bytes)
    return memfd


def write(memfd: Memfd, buffers: Sequence[Frame]) -> None:
    """Write buffers into a new shared-memory segment.

    Args:
        memfd: the segment.
        buffers: content of the segment.

    Raises:
        OSError: the memory cannot be allocated.
    """
    for at, buffer in zip(offsets([len(b) for b in buffers]), buffers, strict=True):
        write_at(memfd, buffer, at)


def write_at(memfd: Memfd, buffer: Frame, at: int) -> None:
    """Write a buffer into a segment at an offset, in bytes; raises like `write`."""
    view = memoryview(buffer)
    while view:
        count = os.pwrite(memfd.descriptor, view, at)
        view, at = view[count:], at + count


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offsets in a segment at which buffers of these sizes begin, aligned."""
    found, at = [], 0
    for size in sizes:
        found.append(at)
        at += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return found


def span(sizes: Sequence[int]) -> int:
    """Return the length in bytes of a segment that holds buffers of these sizes."""
    return sum(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)


def fold_in(
    pickled: Pickled, buffers: Sequence[Frame], least_bytes: int = MIN_BYTES
) -> tuple[Pickled, list[Frame]]:
    """Return a pickle and its buffers as they are sent in a segment, where a pickle stream of at
    least so many bytes becomes the last buffer.
    """
    if len(pickled.stream) < least_bytes:
        return Pickled(pickled.stream, 1, True), list(buffers)
    return Pickled(b"", 1, True), [*buffers, pickled.stream]


def num_bytes_of(pickled: Pickled, buffers: Sequence[Frame]) -> int:
    """Return the total size of a pickle and its buffers, in bytes."""
    return len(pickled.stream) + sum(map(len, buffers))


def map_private(frame: SegmentFrame) -> tuple[memoryview, ...]:
    """Map a segment copy-on-write, and return its buffers; writes to them stay in this process.

    Args:
        frame: frame of a segment that is open in this process.

    Raises:
        HostError: the process's address space or number of mappings is used up.
    """
    view, sizes = map_whole(frame), frame.ref.sizes
    return tuple(view[at : at + size] for at, size in zip(offsets(sizes), sizes, strict=True))


def map_whole(frame: SegmentFrame) -> memoryview:
    """Map a segment copy-on-write, and return all its bytes; raises like `map_private`."""
    return _map(frame.num_bytes, [(frame.memfd.descriptor, 0, frame.num_bytes)])


def inlined(value: Pickled, frame: SegmentFrame) -> tuple[Pickled, Sequence[Frame]]:
    """Convert a value whose buffers are in a segment into one whose buffers are frames of a
    message, which map the segment.

    Raises:
        HostError: see `map_private`.
    """
    *buffers, last = mapped = map_private(frame)
    if value.stream:
        return Pickled(value.stream, len(mapped)), mapped
    return Pickled(bytes(last), len(buffers)), buffers


def map_joined(frames: Sequence[SegmentFrame]) -> memoryview | None:
    """Map several segments, of one buffer each, into one contiguous range of memory, copy-on-write.

    Args:
        frames: frames of segments that are open in this process.

    Returns:
        The memory; None if the buffers would not be adjacent: each but the last must fill its
        pages.

    Raises:
        HostError: the process's address space or number of mappings is used up.
    """
    sizes = [frame.ref.sizes[0] for frame in frames]
    if any(size % mmap.PAGESIZE for size in sizes[:-1]):
        return None
    parts = [(frame.memfd.descriptor, 0, size) for frame, size in zip(frames, sizes, strict=True)]
    return _map(sum(sizes), parts)


def _map(num_bytes: int, parts: Sequence[tuple[int, int, int]]) -> memoryview:
    """Map parts of files, copy-on-write, into one contiguous range of memory, which is unmapped
    once nothing refers to it.

    Args:
        num_bytes: size of all parts, in bytes.
        parts: descriptor, offset and number of bytes of each part.
    """
    import ctypes  # takes 2 ms, and only processes that map segments need it

    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
    try:
        # Owned from the first moment, so that an interrupt at any instant leaves no mapping behind.
        # The files are mapped over it: before Python 3.13, an `mmap` of a file keeps a descriptor
        # open.
        memory = mmap.mmap(-1, num_bytes, flags | mmap.MAP_ANONYMOUS, access)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for descriptor, start, size in parts:
            if _libc().mmap(at, size, access, flags | _MAP_FIXED, descriptor, start) != at:
                raise OSError(number := ctypes.get_errno(), os.strerror(number))
            at += size
    except (OSError, ValueError) as e:
        raise HostError(
            f"a value of {format_bytes(num_bytes)} cannot be mapped: {getattr(e, 'strerror', e)} "
            "(`ulimit -v` shows the limit of its address space)"
        ) from e
    return memoryview(memory)


def memfd_name(mesh: str) -> str:
    """Return the name under which ``/proc`` shows the segments of a mesh's controller."""
    return f"cellmesh {mesh}"


def format_bytes(number: float) -> str:
    """Format a number of bytes for users: ``12 kB``, ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit in ("B", "kB") else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


@functools.cache
def _libc() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    return libc
