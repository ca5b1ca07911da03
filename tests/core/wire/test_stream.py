"""Frames over real socketpairs: whatever the pieces in which they come, messages come out whole, in
order.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import ProtocolError
from cellmesh.wire.stream import Channel, QueuedChannel, StreamReader

from ...support.examples import examples

WAIT_S = 10.0


@contextlib.contextmanager
def socketpair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(WAIT_S)
        theirs.settimeout(WAIT_S)
        yield ours, theirs


@contextlib.contextmanager
def in_thread(function: Any, *args: Any) -> Iterator[None]:
    """Run a function beside the block; what it raises is raised at the block's end."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        thread.join(WAIT_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def on_the_wire(messages: Sequence[Sequence[bytes]]) -> bytes:
    """What `Channel.send` writes, as the module's docstring has it."""
    return b"".join(head_of(map(len, frames)) + b"".join(frames) for frames in messages)


def head_of(sizes: Iterable[int]) -> bytes:
    sizes = list(sizes)
    return b"cmsh" + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)


def plain(messages: Sequence[Sequence[Any]]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in frames] for frames in messages]


MESSAGES = st.lists(st.lists(st.binary(max_size=200), max_size=4), max_size=6)


@given(messages=MESSAGES, data=st.data())
@examples(50)
def test_messages_are_whole_for_any_split(messages: list[list[bytes]], data: st.DataObject) -> None:
    reader = StreamReader()
    received: list[Any] = []
    rest = on_the_wire(messages)
    with socketpair() as (ours, theirs):
        while rest:
            count = data.draw(st.integers(1, len(rest)))
            ours.sendall(rest[:count])
            rest = rest[count:]
            received += reader.read_from(theirs) or []
    assert plain(received) == messages


@pytest.mark.parametrize("size", [0, 16_383, 16_384, 65_536, 65_537, 3_000_000])
def test_frames_of_every_size_arrive_among_small_ones(size: int) -> None:
    large = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    many = [b"%d" % number for number in range(3000)]  # more than one system call takes
    messages = [[b"before"], [b"head", large, b"", b"tail"], many, [large, large], [b"after"]]
    with socketpair() as (ours, theirs):
        sender, receiver = Channel(ours), Channel(theirs)
        with in_thread(lambda: [sender.send(frames) for frames in messages]):
            received = [receiver.receive() for _ in messages]
    assert plain(received) == messages
    head, *others = received[1]
    memoryview(head)[0:1] = b"z"  # arrays are rebuilt on this memory, which no frame shares
    assert plain([others]) == [[large, b"", b"tail"]]


# ---- the end


@pytest.mark.parametrize("kept", [0, 2, 10, 80_000])
def test_a_message_cut_off_by_the_end_is_not_delivered(kept: int) -> None:
    with socketpair() as (ours, theirs):
        ours.sendall(on_the_wire([[b"first"]]) + on_the_wire([[b"x" * 100_000]])[:kept])
        ours.close()
        receiver = Channel(theirs)
        assert plain([receiver.receive()]) == [[b"first"]]
        with pytest.raises(EOFError):
            receiver.receive()


def test_a_queued_channel_reads_what_is_there_and_gives_up_on_a_peer_that_left() -> None:
    with socketpair() as (ours, theirs):
        channel = QueuedChannel(theirs)
        assert channel.read() == []
        Channel(ours).send([b"last"])
        ours.close()
        assert plain(channel.read()) == [[b"last"]]
        assert channel.read() == []
        assert channel.send([b"x"])
        assert channel.send([b"y" * 1_000_000])


# ---- what is no message

NO_MESSAGES = {
    "text": b"hello from the child\n",
    "too many frames": b"cmsh" + b"\xff" * 4,
    "a huge frame": head_of([2**63]),
    "a huge frame among small ones": head_of([3, 2**60, 5]),
    "rubbish after a message": on_the_wire([[b"good"]]) + b"rubbish!",
}


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
@pytest.mark.parametrize("kind", [Channel, QueuedChannel])
def test_invalid_message_is_refused_before_memory_is_allocated(data: bytes, kind: Any) -> None:
    with socketpair() as (ours, theirs):
        channel = kind(theirs)
        read = channel.receive if kind is Channel else channel.read
        ours.sendall(data)
        with pytest.raises(ProtocolError):
            read()


# ---- a reader that is slow


@given(
    sizes=st.lists(st.integers(0, 300_000), max_size=8),
    reads=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
@examples(40)
def test_a_queued_channel_keeps_the_order_whenever_it_is_read(
    sizes: list[int], reads: list[int]
) -> None:
    messages = [[bytes((number % 256,)) * size] for number, size in enumerate(sizes)]
    received: list[Any] = []
    with socketpair() as (ours, theirs):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * 1024)
        sender, receiver = QueuedChannel(ours), QueuedChannel(theirs)
        for turn, frames in enumerate(messages):
            sender.send(frames)  # without waiting for the reader
            for _ in range(reads[turn % len(reads)]):
                received += receiver.read()
        while not sender.flush() or len(received) < len(messages):
            received += receiver.read()
    assert plain(received) == messages


def test_queued_buffer_may_be_changed_after_its_send() -> None:
    with socketpair() as (ours, theirs):
        sender, receiver = QueuedChannel(ours), QueuedChannel(theirs)
        frame = bytearray(b"x" * 1000)
        assert sender.send([frame])
        frame[:] = b"y" * 1000
        assert plain(receiver.read()) == [[b"x" * 1000]]
        frame.extend(b"longer")  # no view of it is left
