"""The agent's ends of the two pipes and three sockets that connect it to one rank."""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import select
import socket
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec

from ...errors import CellmeshError, ProtocolError
from ...wire.bulk import Arrivals
from ...wire.codec import Frame, Parcel
from ...wire.messages import Channel, Done, Failed, Relay
from ...wire.payload import stand_in
from ...wire.segment_pool import SegmentPool
from ...wire.segments import INTERRUPTED, Memfd, SegmentFrame, open_segment, read_ref
from ...wire.stream import QueuedChannel
from ...wire.verbs import StreamName
from ..linux_process import receive_descriptors
from .events import Events, Order

_PIPE_BYTES = 64 * 1024
_MAX_NEWS_BYTES = 8 * 1024


class RankLink:
    """The agent's end of its connection to one rank: two pipes (the rank's descriptors 1 and 2)
    and three socketpairs (work, control, large values).

    Make it before the rank is forked, pass `theirs` to the rank, then call `start`.

    Args:
        events: the agent's event loop.
        on_text: receives text from the rank's descriptor 1 or 2, and its bytes as in `Output`.
        on_message: receives the messages of its sockets.
        on_broken: called with the error if a socket's stream is invalid, with None if one is
            closed.
    """

    def __init__(
        self,
        events: Events,
        on_text: Callable[[StreamName, str, bytes], None],
        on_message: Callable[[Sequence[Frame]], None],
        on_broken: Callable[[Exception | None], None],
    ) -> None:
        self._events = events
        self._on_text, self._on_message, self._on_broken = on_text, on_message, on_broken
        self._reads: dict[StreamName, int] = {}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}
        self._channels: dict[Channel, QueuedChannel] = {}
        out, err = os.pipe(), os.pipe()
        work, control = socket.socketpair(), socket.socketpair()
        self._reads["stdout"], self._reads["stderr"] = out[0], err[0]
        self._channels["work"] = QueuedChannel(work[0])
        self._channels["control"] = QueuedChannel(control[0])
        segments = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        segments[0].setblocking(False)
        self._segments = segments[0]
        self._given: dict[int, Memfd] = {}  # run -> segment of its value
        self._is_heard = True
        self.theirs = (out[1], err[1], *(pair[1].detach() for pair in (work, control, segments)))

    def close_theirs(self) -> None:
        """Close the agent's copies of the rank's ends of the pipes and sockets, once the zygote has
        received these.
        """
        for number in self.theirs:
            os.close(number)
        self.theirs = ()

    def start(self) -> None:
        """Start to read the rank's sockets and pipes."""
        for stream, number in self._reads.items():
            os.set_blocking(number, False)
            self._events.add(number, Order.PIPE, functools.partial(self._read_pipe, stream))
        for channel in self._channels.values():
            self._events.add(
                channel.connection.fileno(), Order.SOCKET, functools.partial(self._serve, channel)
            )
        self._events.add(self._segments.fileno(), Order.SOCKET, self._hear_segments)

    def send(self, channel: Channel, packed: Sequence[Frame]) -> None:
        """Send a message packed by `wire.stream.pack`; queue the part that does not fit."""
        queued = self._channels.get(channel)
        if queued is not None and not queued.send_packed(packed):
            self._want(queued, True)

    def hear(self, is_heard: bool) -> None:
        """Start or stop reading the rank's pipes, and its work and large-value sockets; while they
        are not read, the rank blocks once their buffers are full.
        """
        if is_heard != self._is_heard:
            self._is_heard = is_heard
            for queued in self._channels.values():
                self._want(queued, not queued.flush())
            for number in (self._segments.fileno(), *self._reads.values()):
                self._events.want(number, is_heard, False)

    def take_given(self, run: int) -> Memfd | None:
        """Remove and return the shared-memory segment in which the rank has passed a run's result;
        None if there is none.
        """
        if run not in self._given:
            self._hear_segments(select.EPOLLIN)
        return self._given.pop(run, None)

    def read_pipes(self) -> None:
        """Read all that the rank has written to its pipes before a message that has arrived."""
        for stream in list(self._reads) if self._is_heard else ():
            self._read_pipe(stream)

    def finish(self) -> None:
        """Read the last messages of a rank that has ended, then close its sockets and pipes."""
        for stream in list(self._reads):
            while self._reads.get(stream) is not None and self._read_pipe(stream):
                pass
        for channel in self._channels.values():
            with contextlib.suppress(ProtocolError):
                for frames in channel.read_all():
                    self._on_message(frames)
        self.close()

    def close(self) -> None:
        """Close the rank's sockets and pipes without reading them."""
        for stream in list(self._reads):
            self._close_pipe(stream)
        for channel in self._channels.values():
            self._events.remove(channel.connection.fileno())
            channel.connection.close()
        self._channels.clear()
        if self._segments.fileno() >= 0:
            self._events.remove(self._segments.fileno())
            self._segments.close()
        self._given.clear()

    def _read_pipe(self, stream: StreamName, event: int = 0) -> bool:
        """Read one of the rank's pipes once; return whether more may follow."""
        try:
            data = os.read(self._reads[stream], _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(stream)
            return False
        text = self._decoders[stream].decode(data)
        self._on_text(stream, text, b"" if text.encode() == data else data)
        return True

    def _close_pipe(self, stream: StreamName) -> None:
        number = self._reads.pop(stream, None)
        if number is not None:
            self._events.remove(number)
            os.close(number)

    def _hear_segments(self, event: int) -> None:
        while self._segments.fileno() >= 0:
            try:
                data, descriptors = receive_descriptors(self._segments, _MAX_NEWS_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:  # closed by the rank or its end, which the other sockets report
                self._events.remove(self._segments.fileno())
                return
            if descriptors:  # none if this process has as many files open as it may
                self._given[int.from_bytes(data, "little", signed=True)] = Memfd(descriptors[0])

    def _serve(self, channel: QueuedChannel, event: int) -> None:
        number = channel.connection.fileno()
        if event & select.EPOLLOUT and channel.flush():
            self._want(channel, False)
        if event & select.EPOLLIN:
            try:
                for frames in channel.read():
                    self._on_message(frames)
            except ProtocolError as error:
                self._events.remove(number)
                self._on_broken(error)
        if channel.has_ended or event & (select.EPOLLHUP | select.EPOLLERR) == event:
            self._events.remove(number)
            self._on_broken(None)

    def _want(self, channel: QueuedChannel, write: bool) -> None:
        """Watch a socket for writing if `write`, and for reading unless reading of the rank is
        paused.
        """
        is_heard = self._is_heard or channel is not self._channels.get("work")
        self._events.want(channel.connection.fileno(), is_heard, write)


class Lending:
    """The shared-memory segments of values that travel to or from ranks; the agent keeps each open,
    so that a value is not lost when the process that wrote it dies.

    A segment that a controller lends to ranks stays open until the run has ended on all of them; a
    segment that a rank gives to the controller, until the controller has acknowledged the message.

    Attributes:
        pool: segments that are used again for values from another host.
        arrivals: segments that a controller on another host is sending.
        lent: run -> its segment, and the ranks that use it.
    """

    def __init__(self) -> None:
        self.pool = SegmentPool("cellmesh-value")
        self.arrivals = Arrivals(INTERRUPTED, self.pool)
        self.lent: dict[int, tuple[SegmentFrame, set[int]]] = {}

    def lend(
        self, order: Relay, frames: Sequence[Frame], living: Container[int]
    ) -> tuple[Frame, ...]:
        """Open the shared-memory segment named by the last frame of a work message, and return the
        frames with the open segment in its place; if the value is missing, return the frames
        unchanged, and the ranks will fail the run.
        """
        try:
            if not isinstance(frames[-1], SegmentFrame) and read_ref(frames[-1]).why_missing:
                return tuple(frames)
            frame = open_segment(frames[-1])
        except CellmeshError:
            return tuple(frames)
        ranks = {rank for rank in order.ranks if rank in living}
        if ranks:
            self.lent[order.run] = frame, ranks
        return (*frames[:-1], frame)

    def note(self, rank: int, parcel: Parcel[Any], link: RankLink | None) -> Parcel[Any]:
        """Process a rank's answer to a run: drop the rank's use of the segment that it was lent,
        and put the segment of a large result into the message.
        """
        verb = parcel.verb
        if type(verb) not in (Done, Failed):
            return parcel
        self._end(verb.run, rank)
        is_mapped = verb.payload is not None and verb.payload.is_mapped
        if not is_mapped and type(verb) is Done:
            return parcel
        # Also of a failed run: an interrupt may have arrived after the rank gave its value.
        memfd = link.take_given(verb.run) if link is not None else None
        if not is_mapped:
            return parcel
        try:
            ref = read_ref(parcel.buffers[0])
            if memfd is not None:
                return Parcel(verb, (SegmentFrame.of(memfd, ref.loan, ref.sizes),))
        except CellmeshError:
            pass
        lost = stand_in("the value has not arrived: ask for it again (mesh.pull)")
        return Parcel(msgspec.structs.replace(verb, payload=lost))

    def forget(self, rank: int) -> list[Parcel[Relay]]:
        """Drop a dead rank's use of all segments; return orders to other ranks that no longer have
        to wait behind the dead rank's orders.
        """
        for run in list(self.lent):
            self._end(run, rank)
        return self.arrivals.forget(rank)

    def _end(self, run: int, rank: int) -> None:
        if run in self.lent:
            self.lent[run][1].discard(rank)
            if not self.lent[run][1]:
                del self.lent[run]
