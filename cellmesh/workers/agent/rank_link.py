"""The agent's ends of what connects it to one rank: two pipes and two sockets."""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import ProtocolError
from ...wire.framing import Frame
from ...wire.messages import Channel, StreamName
from ...wire.stream import QueuedChannel
from ..events import Events, Order

_PIPE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Hearing:
    """Who is told what a rank says.

    Attributes:
        text: what came through its descriptor 1 or 2.
        message: a message on one of its sockets.
        broken: one of its sockets cannot be understood any longer, or (None) has reached its end.
    """

    text: Callable[[StreamName, str], None]
    message: Callable[[Sequence[Frame]], None]
    broken: Callable[[Exception | None], None]


class RankLink:
    """Two pipes (the rank's descriptors 1 and 2) and two socketpairs (work and control).

    Made before the rank is forked; `theirs` go to it, then `start` begins to listen.

    Args:
        events: the agent's loop.
        hearing: who is told.
    """

    def __init__(self, events: Events, hearing: Hearing) -> None:
        self._events = events
        self._hearing = hearing
        self._reads: dict[StreamName, int] = {}
        self._channels: dict[Channel, QueuedChannel] = {}
        out, err = os.pipe(), os.pipe()
        work, control = socket.socketpair(), socket.socketpair()
        self._reads["stdout"], self._reads["stderr"] = out[0], err[0]
        self._channels["work"] = QueuedChannel(work[0])
        self._channels["control"] = QueuedChannel(control[0])
        self.theirs = (out[1], err[1], work[1].detach(), control[1].detach())

    def close_theirs(self) -> None:
        """Close the rank's ends here, once they have been passed on."""
        for number in self.theirs:
            os.close(number)
        self.theirs = ()  # type: ignore[assignment]

    def start(self) -> None:
        """Listen to the rank."""
        for stream, number in self._reads.items():
            os.set_blocking(number, False)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._events.add(number, Order.PIPE, functools.partial(self._read_pipe, stream, decoder))
        for channel in self._channels.values():
            self._events.add(
                channel.connection.fileno(), Order.SOCKET, functools.partial(self._serve, channel)
            )

    def send(self, channel: Channel, packed: Sequence[Frame]) -> None:
        """Send what `wire.stream.pack` gave, or queue what the rank is too slow to take."""
        queued = self._channels.get(channel)
        if queued is not None and not queued.send_packed(packed):
            self._events.want_write(queued.connection.fileno(), True)

    def finish(self) -> None:
        """The rank has ended: hear its last words, then close everything."""
        for stream in list(self._reads):
            while self._reads.get(stream) is not None and self._read_pipe(stream, None, 0):
                pass
        for channel in self._channels.values():
            with contextlib.suppress(ProtocolError):
                self._tell(channel.read_all())
        self.close()

    def close(self) -> None:
        """Close everything, whatever there may be to hear."""
        for stream in list(self._reads):
            self._close_pipe(stream)
        for channel in self._channels.values():
            self._events.remove(channel.connection.fileno())
            channel.connection.close()
        self._channels.clear()

    def _read_pipe(self, stream: StreamName, decoder: codecs.IncrementalDecoder | None, event: int) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(self._reads[stream], _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(stream)
            return False
        text = decoder.decode(data) if decoder is not None else data.decode(errors="replace")
        if text:
            self._hearing.text(stream, text)
        return True

    def _close_pipe(self, stream: StreamName) -> None:
        number = self._reads.pop(stream, None)
        if number is not None:
            self._events.remove(number)
            os.close(number)

    def _serve(self, channel: QueuedChannel, event: int) -> None:
        number = channel.connection.fileno()
        if event & select.EPOLLOUT and channel.flush():
            self._events.want_write(number, False)
        if event & select.EPOLLIN:
            try:
                self._tell(channel.read())
            except ProtocolError as error:
                self._events.remove(number)
                self._hearing.broken(error)
        if channel.has_ended or event & (select.EPOLLHUP | select.EPOLLERR) == event:
            self._events.remove(number)
            self._hearing.broken(None)

    def _tell(self, messages: Sequence[Sequence[Frame]]) -> None:
        for frames in messages:
            self._hearing.message(frames)
