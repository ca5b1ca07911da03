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


@given(messages=MESSAGES)
@examples(30)
def test_a_channel_writes_what_the_format_says(messages: list[list[bytes]]) -> None:
    with socketpair() as (ours, theirs):
        channel = Channel(ours)
        for frames in messages:
            channel.send(frames)
        ours.shutdown(socket.SHUT_WR)
        with theirs.makefile("rb") as file:
            assert file.read() == on_the_wire(messages)


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


SIZES = [0, 1, 16_383, 16_384, 65_520, 65_536, 65_537, 200_000, 3_000_000]


@pytest.mark.parametrize("size", SIZES)
def test_frames_of_every_size_arrive_among_small_ones(size: int) -> None:
    large = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    messages = [[b"before"], [b"head", large, b"", b"tail"], [large, large], [b"after"]]
    with socketpair() as (ours, theirs):
        sender, receiver = Channel(ours), Channel(theirs)
        with in_thread(lambda: [sender.send(frames) for frames in messages]):
            received = [receiver.receive() for _ in messages]
    assert plain(received) == messages


@given(
    sizes=st.lists(st.integers(0, 150_000), max_size=5),
    cuts=st.lists(st.integers(1, 90_000), min_size=1),
)
@examples(15)
def test_large_frames_read_in_pieces_are_whole(sizes: list[int], cuts: list[int]) -> None:
    message = [bytes((index + 1,)) * size for index, size in enumerate(sizes)]
    wire = on_the_wire([message, [b"next"]])

    def send() -> None:
        at = turn = 0
        while at < len(wire):
            count = cuts[turn % len(cuts)]
            ours.sendall(wire[at : at + count])
            at, turn = at + count, turn + 1

    with socketpair() as (ours, theirs):
        receiver = Channel(theirs)
        with in_thread(send):
            received = [receiver.receive(), receiver.receive()]
    assert plain(received) == [message, [b"next"]]


def test_more_frames_than_one_system_call_takes() -> None:
    message = [bytes((number % 256,)) * 50 for number in range(3000)]
    with socketpair() as (ours, theirs):
        sender, receiver = Channel(ours), Channel(theirs)
        with in_thread(sender.send, message):
            received = receiver.receive()
    assert plain([received]) == [message]


def test_received_frames_are_writable() -> None:
    # Arrays are rebuilt on this memory.
    message = [b"small", b"y" * 100_000]
    with socketpair() as (ours, theirs):
        sender, receiver = Channel(ours), Channel(theirs)
        with in_thread(sender.send, message):
            frames = receiver.receive()
    for frame in frames:
        memoryview(frame)[0:1] = b"z"
        assert bytes(frame[:1]) == b"z"


def test_frames_of_one_message_do_not_share_memory() -> None:
    with socketpair() as (ours, theirs):
        Channel(ours).send([b"aaaa", b"bbbb"])
        receiver = Channel(theirs)
        first, second = receiver.receive()
        memoryview(first)[:] = b"zzzz"
        Channel(ours).send([b"cccc"])
        receiver.receive()
    assert bytes(first) == b"zzzz"
    assert bytes(second) == b"bbbb"


# ---- the end


@pytest.mark.parametrize("kept", [0, 2, 6, 10, 18, 80_000])
def test_a_message_cut_off_by_the_end_is_not_delivered(kept: int) -> None:
    with socketpair() as (ours, theirs):
        ours.sendall(on_the_wire([[b"first"]]) + on_the_wire([[b"x" * 100_000]])[:kept])
        ours.close()
        receiver = Channel(theirs)
        assert plain([receiver.receive()]) == [[b"first"]]
        with pytest.raises(EOFError):
            receiver.receive()


def test_a_peer_that_leaves_without_reading_counts_as_the_end() -> None:
    with socketpair() as (ours, theirs):
        receiver = Channel(theirs)
        receiver.send([b"never read"])
        ours.close()
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
    "zeros": bytes(32),
    "another order of bytes": b"hsmc" + bytes(12),
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


@given(data=st.binary(min_size=8, max_size=200).filter(lambda data: not data.startswith(b"cmsh")))
def test_random_bytes_are_no_message(data: bytes) -> None:
    with socketpair() as (ours, theirs):
        ours.sendall(data)
        with pytest.raises(ProtocolError):
            QueuedChannel(theirs).read()


# ---- a reader that is slow


def test_a_queued_channel_never_waits_for_a_slow_reader() -> None:
    messages = [[b"%d" % number, bytes((number,)) * 300_000, b"small"] for number in range(8)]
    with socketpair() as (ours, theirs):
        sender = QueuedChannel(ours)
        # Nobody reads: 2.4 MB do not fit into the socket, and nothing here blocks.
        assert not [sender.send(frames) for frames in messages][-1]
        assert not sender.flush()
        received: list[Any] = []
        receiver = QueuedChannel(theirs)
        while len(received) < len(messages):
            received += receiver.read()
            sender.flush()
        assert sender.flush()
    assert plain(received) == messages


@given(
    sizes=st.lists(st.integers(0, 80_000), max_size=12),
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
            sender.send(frames)
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


def test_two_threads_share_a_channel_one_sends_and_one_receives() -> None:
    rounds = 200
    with socketpair() as (ours, theirs):
        near, far = Channel(ours), Channel(theirs)

        def echo() -> None:
            for _ in range(rounds):
                far.send(far.receive())

        def send() -> None:
            for number in range(rounds):
                near.send([b"%d" % number])

        with in_thread(echo), in_thread(send):
            received = [near.receive() for _ in range(rounds)]
    assert plain(received) == [[b"%d" % number] for number in range(rounds)]
