"""A segment is written again once nobody can read it, and not before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cellmesh.wire import limits, segment_pool, segments
from cellmesh.wire.segment_pool import MAX_SEGMENTS, SegmentPool
from cellmesh.wire.segments import SegmentFrame, map_joined, map_private, open_segment

pytestmark = pytest.mark.filterwarnings("ignore:This process")  # pytest may have threads
SIZE = 1 << 20


@pytest.fixture
def pool() -> SegmentPool:
    return SegmentPool("cellmesh-pool-test")


def lend(pool: SegmentPool, data: bytes = b"x" * SIZE) -> SegmentFrame:
    segment = pool.take(len(data))
    segment.fill([data])
    return pool.lend(segment, 1, [len(data)])


def number_of(frame: SegmentFrame) -> int:
    return os.fstat(frame.memfd.descriptor).st_ino


def reused(pool: SegmentPool, inode: int) -> bool:
    return number_of(lend(pool, b"y" * SIZE)) == inode


@contextlib.contextmanager
def queued(frame: SegmentFrame) -> Iterator[None]:
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"x"], [frame.memfd.descriptor])
        yield


@contextlib.contextmanager
def forked(frame: SegmentFrame) -> Iterator[None]:
    """A child that has inherited a mapping, which this process gives up."""
    memory = map_private(frame)
    del frame
    pid = os.fork()
    if not pid:
        signal.pause()
    del memory
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


READERS: dict[str, Callable[[SegmentFrame], Any]] = {
    "frame": lambda frame: contextlib.nullcontext(frame),
    "opened by another": lambda frame: contextlib.nullcontext(open_segment(bytes(frame))),
    "mapping": lambda frame: contextlib.nullcontext(map_private(frame)),
    "slice": lambda frame: contextlib.nullcontext(map_private(frame)[0][5:]),
    "joined": lambda frame: contextlib.nullcontext(map_joined([frame])),
    "socket's queue": queued,
    "child": forked,
}


def test_segment_with_a_mapping_is_written_once_its_use_has_ended(pool: SegmentPool) -> None:
    (memory,) = map_private(lend(pool))
    number = pool._kept[0].loan
    assert pool.take(SIZE, ended=[number + 1]).is_new
    segment = pool.take(SIZE, ended=[number])
    segment.fill([b"y" * SIZE])
    assert bytes(memory[:3]) == b"yyy"


@pytest.mark.parametrize("reader", READERS)
def test_segment_with_a_reader_is_not_written(reader: str, pool: SegmentPool) -> None:
    frame = lend(pool)
    inode = number_of(frame)
    reading = READERS[reader](frame)
    with reading:
        del frame
        assert not reused(pool, inode)
        assert not reused(pool, inode)
    del reading
    assert reused(pool, inode)


def test_all_bytes_are_written_again(pool: SegmentPool) -> None:
    for round_number in range(4):
        parts = [bytes([round_number + k]) * (SIZE + k) for k in range(3)]
        segment = pool.take(segments.span([len(part) for part in parts]))
        assert segment.is_new is (round_number == 0)
        segment.fill(parts)
        frame = pool.lend(segment, 1, [len(part) for part in parts])
        del segment
        assert [bytes(part) for part in map_private(frame)] == parts
        del frame


def test_no_segment_is_reused_where_the_kernel_grants_no_lease(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert not reused(pool, number_of(lend(pool)))


def test_process_that_opens_a_segment_during_the_check_ends_nobody(pool: SegmentPool) -> None:
    pid = os.fork()
    if not pid:
        try:
            memfd = (segment := pool.take(SIZE))._memfd
            real = fcntl.fcntl
            fcntl.fcntl = lambda number, what, arg: arg == fcntl.F_UNLCK or real(number, what, arg)
            assert segment.is_unread()
            os.open(f"/proc/self/fd/{memfd.descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        except BlockingIOError:  # as the lease is not given up yet
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_forked_child_writes_to_no_segment_of_its_parent(pool: SegmentPool) -> None:
    inode = number_of(lend(pool))
    pid = os.fork()
    if not pid:
        os._exit(reused(pool, inode))
    assert os.waitpid(pid, 0)[1] == 0
    assert reused(pool, inode)


def test_small_value_does_not_hold_a_large_segment(pool: SegmentPool) -> None:
    inode = number_of(lend(pool, bytes(9 * SIZE)))
    assert not reused(pool, inode)
    assert number_of(lend(pool, bytes(3 * SIZE))) == inode


def test_least_recently_lent_segments_are_given_back(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: 16 * 3 * SIZE)
    shared = SegmentPool("cellmesh-pool-test", 2)  # half of it, which is 3 segments
    for each, most in (shared, 3), (pool, 6):
        frames = [lend(each) for _ in range(8)]
        assert [s.num_bytes for s in each._kept] == [SIZE] * most
        inodes = [number_of(frame) for frame in frames]
        del frames
        assert {number_of(lend(each)) for _ in range(8)} <= set(inodes[-most:])


def test_number_of_kept_segments_is_bounded(pool: SegmentPool) -> None:
    frames = [lend(pool) for _ in range(MAX_SEGMENTS + 3)]
    assert len(pool._kept) == MAX_SEGMENTS
    del frames
    pool.clear()
    assert not [link for link in open_files() if "cellmesh-pool-test" in link]


def open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the directory
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_unread_segments_make_room_for_a_value_that_does_not_fit(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend(pool)
    monkeypatch.setattr(segment_pool.limits, "CHECKED_BYTES", 2 * SIZE)
    monkeypatch.setattr(limits, "free_bytes", lambda: SIZE)
    pool.take(2 * SIZE - 1)
    assert pool._kept
    pool.take(2 * SIZE)
    assert not pool._kept
