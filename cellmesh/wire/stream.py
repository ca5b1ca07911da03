"""Sends and receives messages of several frames over stream sockets between an agent and its ranks.

They share a host and use a socketpair made before the fork: no other process can connect, no peer
has to authenticate itself, and no I/O thread delays a message on its way to the code that waits for
it (docs/architecture.md has the measurement that decided against ZeroMQ here).

A message is ``uint32 magic``, ``uint32 number of frames``, then a ``uint64 size`` for each, then
the frames. User code shares the rank's process and may write into its descriptors by mistake; the
magic number reveals data that is no message.
"""

from __future__ import annotations

import collections
import select
import socket
import struct
from collections.abc import Sequence

from ..errors import ProtocolError
from .codec import MAX_FRAME_BYTES, Frame
from .process import wait_readable

_HEAD = struct.Struct("<II")
_HEAD_OF_ONE = struct.Struct("<IIQ")  # of a message of one frame, as most are
_MAGIC = 0x68736D63  # "cmsh"
_MAX_FRAMES = 1 << 16
_CHUNK_BYTES = 64 * 1024
# Smaller buffers are copied into one: that costs less than to send each as a part of its own.
_JOIN_BYTES = 16 * 1024
# Parts of one sendmsg; the system's own limit (IOV_MAX) is 1024.
_MAX_PARTS = 512


def pack(frames: Sequence[Frame]) -> list[Frame]:
    """Convert a message's frames into the buffers to send: first the sizes of the frames, then the
    frames; small buffers are joined.
    """
    if len(frames) == 1 and len(frames[0]) < _JOIN_BYTES:
        return [_HEAD_OF_ONE.pack(_MAGIC, 1, len(frames[0])) + frames[0]]
    sizes = struct.pack(f"<II{len(frames)}Q", _MAGIC, len(frames), *map(len, frames))
    parts: list[Frame] = []
    small: list[Frame] = [sizes]
    for frame in frames:
        if len(frame) < _JOIN_BYTES:
            small.append(frame)
        else:
            parts += [b"".join(small), frame]
            small = []
    return [*parts, b"".join(small)] if small else parts


class StreamReader:
    """Cuts the bytes that a stream socket delivers into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._sizes: tuple[int, ...] | None = None
        self._frames: list[Frame] = []
        # A large frame is received straight into its own memory.
        self._large: bytearray | None = None
        self._num_large = 0

    def read_from(self, connection: socket.socket) -> list[list[Frame]] | None:
        """Receive from the socket once, and return the messages that this completes.

        Args:
            connection: a blocking or non-blocking socket.

        Returns:
            The messages that are now complete; None at the end of the stream.

        Raises:
            BlockingIOError: there is nothing to read.
            ProtocolError: the received bytes are no message.
        """
        if self._large is None:
            data = connection.recv(_CHUNK_BYTES)
            if not data:
                return None
            if len(data) >= _HEAD_OF_ONE.size and not self._buffer and self._sizes is None:
                magic, num_frames, size = _HEAD_OF_ONE.unpack_from(data)
                if magic == _MAGIC and num_frames == 1 and len(data) == _HEAD_OF_ONE.size + size:
                    return [[data[_HEAD_OF_ONE.size :]]]
            self._buffer += data
            return self._cut()
        view = memoryview(self._large)[self._num_large :]
        count = connection.recv_into(view)
        view.release()
        if not count:
            return None
        self._num_large += count
        if self._num_large < len(self._large):
            return []
        self._frames.append(self._large)
        self._large = None
        return self._cut()

    def _cut(self) -> list[list[Frame]]:
        messages: list[list[Frame]] = []
        buffer, at = self._buffer, 0
        while True:
            if self._sizes is None:
                if len(buffer) - at < _HEAD.size:
                    break
                magic, count = _HEAD.unpack_from(buffer, at)
                if magic != _MAGIC or count > _MAX_FRAMES:
                    raise ProtocolError("the other side of a socketpair sent what is no message")
                if len(buffer) - at < _HEAD.size + 8 * count:
                    break
                self._sizes = struct.unpack_from(f"<{count}Q", buffer, at + _HEAD.size)
                if max(self._sizes, default=0) > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame of {max(self._sizes)} bytes is announced")
                at += _HEAD.size + 8 * count
            while len(self._frames) < len(self._sizes):
                size = self._sizes[len(self._frames)]
                if len(buffer) - at < size:
                    if size > _CHUNK_BYTES:
                        self._large = bytearray(size)
                        self._num_large = len(buffer) - at
                        self._large[: self._num_large] = buffer[at:]
                        at = len(buffer)
                    break
                self._frames.append(buffer[at : at + size])
                at += size
            if len(self._frames) < len(self._sizes):
                break
            messages.append(self._frames)
            self._frames, self._sizes = [], None
        del buffer[:at]
        return messages


class Channel:
    """A rank's end of a socketpair; one thread may send while another receives, and each waits.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        # A thread that is blocked in recv(2) itself is also woken when the peer reads sent data:
        # twice per call instead of once. A socket with a time-out polls before each send, too.
        connection.setblocking(False)
        self._connection = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._reader = StreamReader()
        self._received: collections.deque[list[Frame]] = collections.deque()

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message; blocks while the other side is slow to read."""
        if len(frames) == 1 and len(frames[0]) < _JOIN_BYTES:  # as most are: without further calls
            parts: list[Frame] = [_HEAD_OF_ONE.pack(_MAGIC, 1, len(frames[0])) + frames[0]]
        else:
            parts = pack(frames)
        while parts:
            try:
                count = self._connection.sendmsg(parts[:_MAX_PARTS])
            except BlockingIOError:
                self._writable.poll()
            else:
                is_whole = len(parts) == 1 and count == len(parts[0])
                parts = [] if is_whole else _advance(parts, count)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._connection.fileno()

    @property
    def has_message(self) -> bool:
        """Whether a whole message has been received, which `receive` returns at once."""
        return bool(self._received)

    def receive(self) -> list[Frame]:
        """Return the next message; blocks until one has arrived.

        Raises:
            EOFError: the other side has closed the connection.
        """
        while not self._received:
            try:
                self._readable.poll()
                messages = self._reader.read_from(self._connection)
            except (BlockingIOError, TimeoutError):  # the latter of a signal handler of user code
                continue
            except ConnectionError as error:
                if error.errno is None:  # raised by a signal handler
                    raise
                messages = None
            if messages is None:
                raise EOFError("the agent has gone")
            self._received.extend(messages)
        return self._received.popleft()


class QueuedChannel:
    """The agent's end of a non-blocking socketpair: data that cannot be sent at once is queued.

    Args:
        connection: the socket; made non-blocking.

    Attributes:
        has_ended: whether a read has reached the end of the stream.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.has_ended = False
        self.connection = connection
        self._reader = StreamReader()
        self._unsent: list[Frame] = []

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send a message; queue the part that the socket does not take at once.

        Returns:
            Whether nothing is left in the queue; if not, call `flush` when the socket is writable.
        """
        return self.send_packed(pack(frames))

    def send_packed(self, parts: Sequence[Frame]) -> bool:
        """Send a message that `pack` has packed already, so that a message to many ranks is packed
        only once; else like `send`.
        """
        if len(parts) == 1 and not self._unsent:  # the usual case, without the queue
            try:
                sent = self.connection.send(parts[0])
            except BlockingIOError:
                sent = 0
            except OSError:  # the rank has ended; its pidfd reports that
                return True
            if sent == len(parts[0]):
                return True
            parts = _advance(parts, sent)
        self._unsent += parts
        return self.flush()

    def flush(self) -> bool:
        """Send queued data until the socket is full; return whether the queue is empty."""
        while self._unsent:
            try:
                count = self.connection.sendmsg(self._unsent[:_MAX_PARTS])
            except BlockingIOError:
                return False
            except OSError:  # the rank has ended; its pidfd reports that
                self._unsent.clear()
                return True
            self._unsent = _advance(self._unsent, count)
        return True

    def keep(self) -> None:
        """Copy the queued data, which its owner may change from now on."""
        self._unsent = [bytes(each) for each in self._unsent]  # `bytes` are not copied

    def read(self) -> list[list[Frame]]:
        """Receive from the rank's socket once, and return the messages that this completes; [] at
        the end of the stream.

        Raises:
            ProtocolError: the received bytes are no message.
        """
        try:
            messages = self._reader.read_from(self.connection)
        except (BlockingIOError, ConnectionResetError):  # reported once, before the last messages
            return []
        except OSError:
            messages = None
        self.has_ended = messages is None
        return messages or []

    def read_all(self) -> list[list[Frame]]:
        """Return all messages that have arrived, without waiting for further data."""
        messages = self.read()
        while not self.has_ended and wait_readable([self.connection.fileno()], 0):
            messages += self.read()
        return messages


def _advance(parts: Sequence[Frame], count: int) -> list[Frame]:
    """Drop the first `count` bytes, which have been sent, from a list of buffers."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[index + 1 :]]
        count -= len(part)
    return []
