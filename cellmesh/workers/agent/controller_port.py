"""The agent's connection to its controller (the notebook's process): only one controller is
attached at a time; while none is, a time limit (the lease) runs, after which the mesh ends.

Adds input and output to `Spool` and `Reliable`: the agent's socket for controllers, greetings, and
the lease.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from ...errors import HostError, ProtocolError
from ...wire import transport
from ...wire.attach import Detached, Hello, Inquire, Refused, SetAgents, Standing, Welcome
from ...wire.bulk import Sender
from ...wire.codec import Frame, Parcel, at_agent_from_controller, encode
from ...wire.host import (
    Versions,
    describe_mismatch,
    format_span,
    host_name,
    own_package,
    own_python,
    own_version,
)
from ...wire.limits import MAX_ANSWER_BYTES
from ...wire.messages import PROTOCOL, Died
from ...wire.reliable import Reliable
from ...wire.segments import SegmentFrame
from ...wire.ticket import Holder, Ticket, write_holder
from .events import Events, Order
from .port import Port
from .spool import Spool, Visit, size_of

# Bytes that may be unacknowledged by a controller; further messages wait in the spool, where output
# is bounded.
WINDOW_BYTES = 32 << 20
# Messages handled in a row before other descriptors have their turn.
_MAX_MESSAGES = 1000
# How long a mesh whose start has failed at once waits for its first controller, to report the
# failure to it.
_HELLO_S = 5.0

Message = Sequence[Parcel[Any]]
Dims = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass(eq=False)
class ControllerPort:
    """The agent's end of the connection to its controller; keeps each message until the controller
    has acknowledged it.
    """

    _ticket: Ticket
    _events: Events
    # Called with the verbs of the attached controller.
    _hear: Callable[[Sequence[Parcel[Any]]], None]
    # The mesh's state, its ranks' deaths and its dims, for a controller that attaches.
    _greet: Callable[[], tuple[Parcel[Any], Sequence[Died], Dims]]
    # Called with the reason when the mesh has to end for lack of a controller.
    _abandon: Callable[[str], None]
    # Called with the ranks that must not be read for now, as too many of their messages wait.
    _bound: Callable[[Collection[int]], None]
    # Called when the controller has left.
    _left: Callable[[], None]

    def __post_init__(self) -> None:
        self._unheard: Collection[int] = ()
        self._key = bytes.fromhex(self._ticket.key)
        self._decoder = at_agent_from_controller()
        self.spool = Spool()
        self._identity: bytes | None = None
        self._link = b""
        self._visit: Visit | None = None
        self.sender = Sender()  # of results, to a controller on another host
        self._since = time.monotonic()  # when a controller attached or left
        self._lease_ends: float | None = None
        self._why_left = ""
        # Reasons of dismissed controllers, by their links, in case they connect again.
        self._why_dismissed: dict[bytes, str] = {}
        self._watched: set[int] = set()
        self._num_strangers = 0  # peers that wrote to the socket without a valid key
        self._file = HolderFile(self._ticket)
        self.agents: SetAgents | None = None  # None while the agents of the start are in use
        context: zmq.Context[transport.Socket] = zmq.Context()
        self.port = Port(
            context,
            self._ticket,
            self._events,
            self._is_connected,
            self._not_heard,
            self._count_refused,
        )
        self._socket = self.port.socket
        self._reliable = self._new_reliable()
        self.may_be_readable = True
        self._events.add(int(self._socket.getsockopt(zmq.FD)), Order.SOCKET, self._note_readable)
        if not self.port.is_remote:
            self._watch(self._ticket.controller_pid)

    # ---- for the agent

    @property
    def is_attached(self) -> bool:
        """Whether a controller is attached."""
        return self._identity is not None

    def _note_readable(self, event: int) -> None:
        self.may_be_readable = True

    def _new_reliable(self) -> Reliable[Message]:
        return Reliable(self._note_acked if self.port.is_remote else self.spool.acked)

    def _note_acked(self, parcels: Message) -> None:
        self.spool.acked(parcels)
        self.sender.acked(parcels, time.monotonic())

    def serve(self) -> None:
        """Handle the messages that wait in the controllers' socket; the agent calls this while
        `may_be_readable` is set.
        """
        self.may_be_readable = False
        for _ in range(_MAX_MESSAGES):
            if not transport.readable(self._socket):
                return
            frames = transport.receive(self._socket)
            if len(frames) > 1:
                try:
                    self._receive(bytes(frames[0]), bytes(frames[1]), frames[2:])
                except BaseException:
                    self.may_be_readable = True
                    raise
        self.may_be_readable = True

    def send(self, parcels: Message) -> None:
        """Send messages to the attached controller; queue them while no controller is attached, or
        while the attached one is behind with acknowledgements.
        """
        if self._identity is None or self.spool or self._reliable.kept_bytes > WINDOW_BYTES:
            self.spool.add(parcels)
            self._flush()
            self._bound_ranks()
        else:
            self._transmit(parcels)

    def tick(self, now: float) -> None:
        """Act on the time-outs that have passed: end the mesh after the lease, or send a due
        acknowledgement.
        """
        if self._identity is not None and self._reliable.owes_ack(now):
            self._send([self._identity, self._reliable.wrap_aside()])
        self.port.tick(now)
        if self._file.write_at is not None and now >= self._file.write_at:
            self._file.write()
        if self._lease_ends is not None and now >= self._lease_ends:
            self._lease_ends = None
            self._abandon(self._why_left)

    def deadline(self) -> float | None:
        """Return when `ControllerPort.tick` must be called next; None if no time-out runs."""
        due = self._lease_ends if self._identity is None else self._reliable.ack_at
        if not self.port.is_remote and self._file.write_at is None:  # in most turns of the loop
            return due
        others = (due, self.port.deadline(), self._file.write_at)
        return min((at for at in others if at is not None), default=None)

    def is_awaiting_first(self, now: float) -> bool:
        """Return whether the process that is starting the mesh may still connect to the agent for
        the first time.
        """
        is_absent = self._identity is None and now - self._since < _HELLO_S
        return is_absent and self._file.holder.is_attached

    def close(self) -> None:
        """Send the messages queued for the controller, then close the agent's socket for
        controllers.
        """
        self._flush(everything=True)
        self.port.close()
        self._socket.close(linger=500)
        self._socket.context.term()

    # ---- receiving

    def _receive(self, identity: bytes, preamble: bytes, frames: Sequence[Frame]) -> None:
        try:
            if identity == self._identity:
                is_new = self._reliable.unwrap(preamble, sum(map(len, frames)), time.monotonic())
                if is_new:
                    self._hear(self._decoder.decode(frames))
                if self.spool:
                    self._flush()
                if self.sender:
                    self._send_chunks()
                if self._unheard or self.spool.ahead:
                    self._bound_ranks()
                if is_new:
                    return
            if frames and Reliable.is_aside(preamble):
                for verb, _ in self._decoder.decode(frames):
                    if isinstance(verb, Hello | Inquire):
                        self._meet(identity, verb)
        except ProtocolError:  # no answer to the peer, which need not be a controller
            if identity != self._identity:
                self._count_refused(1)

    def _meet(self, identity: bytes, hello: Hello | Inquire) -> None:
        if not hmac.compare_digest(hello.key, self._key):
            self._count_refused(1)
            return
        if isinstance(hello, Inquire):
            self._answer(identity, hello)
            return
        if self._identity is not None and hello.link == self._link:  # reconnected
            self._identity = identity  # each connection has an identity of its own
            self._welcome(identity, self._reliable.num_received, 0)
            for preamble, message in self._reliable.resume(hello.num_received):
                self._send([identity, preamble, *encode(message)])
            self._send_chunks()
            return
        refusal = self._find_objection(hello)
        if refusal:
            self._say_aside(identity, Refused(refusal))
            return
        if self._identity is not None:
            self.dismiss(
                f"process {hello.pid} ({hello.host or host_name()}) has taken the mesh over"
            )
        self._accept(identity, hello)

    def _answer(self, identity: bytes, inquiry: Inquire) -> None:
        """Answer a process that has the mesh's key and asks about the mesh's state, or for its end,
        without becoming its controller.
        """
        runs = self.spool.runs()
        self._say_aside(identity, Standing(os.getpid(), self._file.holder, self.agents, runs))
        if inquiry.ends:
            self._abandon("stopped from outside")

    def _find_objection(self, hello: Hello) -> str:
        if hello.link in self._why_dismissed:
            return self._why_dismissed[hello.link]
        if mismatch := find_mismatch(hello, self._ticket.torch, is_local=not self.port.is_remote):
            return mismatch
        holder = self._file.holder
        is_expected = holder.is_attached and hello.pid != holder.controller_pid
        if hello.steal or not (self._identity is not None or is_expected):
            return ""
        host = holder.host if self.port.is_remote else ""
        return describe_hold(holder.controller_pid, host, time.monotonic() - self._since)

    def _accept(self, identity: bytes, hello: Hello) -> None:
        away_s = 0.0 if self._file.holder.is_attached else time.monotonic() - self._since
        state, deaths, dims = self._greet()
        self._identity, self._link = identity, hello.link
        self._reliable = self._new_reliable()
        self._welcome(identity, 0, away_s, dims)
        self._visit = Visit(self.spool.next_run) if hello.visits else None
        self.spool.attend(state, deaths)
        if not self.port.is_remote:
            self._watch(hello.pid)
        self._since, self._lease_ends = time.monotonic(), None
        self._file.note(
            controller_pid=hello.pid, host=hello.host, notebook=hello.notebook, is_attached=True
        )
        self._flush()
        self._bound_ranks()

    def _welcome(
        self, identity: bytes, num_received: int, away_s: float, dims: Dims = ((), ())
    ) -> None:
        self.port.welcomed()
        self._say_aside(
            identity,
            Welcome(
                protocol=PROTOCOL,
                agent_pid=os.getpid(),
                host=host_name(),
                num_received=num_received,
                next_run=self.spool.next_run,
                runs=self.spool.runs(),
                mesh_dim_names=dims[0],
                mesh_shape=dims[1],
                away_s=away_s,
            ),
        )

    # ---- detaching

    def dismiss(self, reason: str) -> None:
        """Detach the controller, and send it the reason."""
        if self._identity is None:
            return
        self._why_dismissed[self._link] = reason
        self._say_aside(self._identity, Detached(reason))
        self._leave(reason)

    def _leave(self, reason: str) -> None:
        self._identity, self._link = None, b""
        kept = self._visit.take() if self._visit is not None else []
        self.spool.leave([kept, *self._reliable.take_kept()])
        self.sender = Sender()
        self._bound_ranks()
        self._since, lease_s = time.monotonic(), self._ticket.lease_s
        self._file.note(is_attached=False)
        self._lease_ends = self._since + lease_s
        self._why_left = (
            f"{reason}, and its lease of {format_span(lease_s)} is over" if lease_s else reason
        )
        self._left()

    def _not_heard(self) -> None:
        reason = "the notebook's host was not heard any longer"
        self.dismiss(reason)  # a suspended host receives this when it is reachable again
        if self._file.holder.is_attached:
            self._leave(reason)

    def _is_connected(self) -> bool:
        """Return whether the attached controller on another host has a live connection."""
        if self._identity is None:
            return False
        self.may_be_readable = True  # as in `_send`
        return transport.reaches(self._socket, [self._identity, self._reliable.wrap_aside()])

    def _count_refused(self, number: int = 0) -> None:
        """Record the number of refused connections, including those that the TCP port refused."""
        self.may_be_readable = True  # as in `_send`
        self._num_strangers += number
        self._file.count(self._num_strangers + self.port.num_refused)

    def _watch(self, pid: int) -> None:
        if pid not in self._watched:  # it is, if this controller left and attached again
            self._watched.add(pid)
            self._events.watch_process(pid, functools.partial(self._process_ended, pid))

    def _process_ended(self, pid: int) -> None:
        self._watched.discard(pid)
        holder = self._file.holder
        if pid == holder.controller_pid and holder.is_attached:
            self._leave("the notebook's process ended")

    # ---- sending

    def _flush(self, everything: bool = False) -> None:
        while (
            self._identity is not None
            and self.spool
            and (everything or self._reliable.kept_bytes <= WINDOW_BYTES)
        ):
            self._transmit(self.spool.take())

    def _bound_ranks(self) -> None:
        """Stop reading messages of ranks that have too many bytes queued for the controller."""
        unheard: Collection[int] = ()
        if self._identity is not None:
            unheard = frozenset(self.spool.ahead)
            if self.sender and self.sender.num_bytes > MAX_ANSWER_BYTES:
                unheard = frozenset(unheard) | self.sender.givers
        if unheard != self._unheard:
            self._unheard = unheard
            self._bound(unheard)

    def _transmit(self, parcels: Message) -> None:
        assert self._identity is not None
        if self._visit is not None and not (parcels := self._visit.divide(parcels)):
            return
        frames = encode(parcels)
        num_bytes = sum(map(len, frames))
        for parcel in parcels:
            if parcel.buffers and not self.port.is_remote:
                num_bytes += size_of(parcel)  # the frames hold only the segment's name
        preamble = self._reliable.wrap(parcels, num_bytes)
        self._send([self._identity, preamble, *frames])
        if self.port.is_remote:
            self._follow(parcels)

    def _follow(self, parcels: Message) -> None:
        """Send a controller on another host, in chunks, the contents of the shared-memory segments
        to which messages refer.
        """
        for verb, buffers in parcels:
            if buffers and isinstance(buffers[-1], SegmentFrame):
                self.sender.add(buffers[-1], verb.ranks)
        if self.sender:
            self._send_chunks()
            self._bound_ranks()

    def _send_chunks(self) -> None:
        while (
            self._identity is not None
            and (parcel := self.sender.next(time.monotonic())) is not None
        ):
            frames = encode([parcel])
            preamble = self._reliable.wrap([parcel], sum(map(len, frames)))
            self._send([self._identity, preamble, *frames])

    def note_new(self, ranks: Collection[int]) -> None:
        """Record that new processes replace these ranks: read their messages, even if many bytes of
        the previous processes are still queued.
        """
        if self.sender:
            self.sender.disown(ranks)
            self._bound_ranks()

    def acknowledge(self) -> None:
        """Acknowledge the received messages now, without waiting for a message to carry it."""
        if self._identity is not None:
            self._send([self._identity, self._reliable.wrap_aside()])

    def _say_aside(self, identity: bytes, verb: Any) -> None:
        preamble = Reliable[Message]().wrap_aside()
        self._send([identity, preamble, *encode([Parcel(verb)])])

    def _send(self, frames: list[Frame]) -> None:
        transport.send(self._socket, frames)
        self.may_be_readable = (
            True  # ZeroMQ's descriptor is edge-triggered, and a send may consume the edge
        )


def find_mismatch(hello: Hello, torch: str, is_local: bool) -> str:
    """Return why a controller cannot work with this agent's version; "" if it can.

    Args:
        hello: the controller's greeting.
        torch: torch version of the mesh.
        is_local: whether both are on one host, and must import cellmesh from the same directory.
    """
    if hello.protocol != PROTOCOL:
        return f"the mesh speaks protocol {PROTOCOL}, this controller {hello.protocol}"
    if is_local and hello.package != own_package():
        return (
            f"the mesh runs cellmesh of {own_package()}, and this is that of {hello.package}: use "
            "the environment that started it"
        )
    theirs = Versions(hello.version, hello.python, hello.torch)
    own = Versions(own_version(), own_python(), torch)
    return describe_mismatch({"the mesh": own, "this controller": theirs})


def describe_hold(pid: int, host: str, held_s: float) -> str:
    """Return an error message that names the process which controls the mesh, and says how another
    process can take control.

    Args:
        pid: process number of the controller.
        host: host of the controller; "" if it is the agent's host.
        held_s: seconds since the controller attached.
    """
    where = f" ({host})" if host else ""
    return (
        f"the mesh is held by process {pid}{where}, which attached {format_span(held_s)} ago: "
        "detach it there (`%dist_detach`), or take it over with `--steal`"
    )


# Least time between two writes of the count of refused peers.
_COUNT_S = 1.0


class HolderFile:
    """The `Holder` of a mesh (which process controls it, and since when), in memory and in a file.

    Args:
        ticket: ticket of the mesh.

    Attributes:
        holder: current content, which the file has or is about to have.
        write_at: time at which to call `write`, on the monotonic clock; None if the file is up to
            date.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.holder = Holder(
            controller_pid=ticket.controller_pid,
            is_attached=True,
            since=ticket.created_at,
            notebook=ticket.notebook,
        )
        self.write_at: float | None = None

    def note(self, **changes: Any) -> None:
        """Record that a controller has attached or left, and write the `Holder` to its file."""
        self.holder = msgspec.structs.replace(self.holder, since=time.time(), **changes)
        self.write()

    def count(self, num_refused: int) -> None:
        """Record how many connections the agent has refused; the file is written within about a
        second.
        """
        if num_refused > self.holder.num_refused and self.write_at is None:
            self.write_at = time.monotonic() + _COUNT_S
        if num_refused != self.holder.num_refused:
            self.holder = msgspec.structs.replace(
                self.holder, num_refused=num_refused, refused_at=time.time()
            )

    def write(self) -> None:
        """Write the `Holder` to its file now."""
        self.write_at = None
        with contextlib.suppress(HostError):  # a full disk does not concern the attached controller
            write_holder(self._ticket, self.holder)
