"""Guests: commands of a terminal (`acts`) that a mesh's holder carries out for them, so that it
stays in charge, and runs keep their order.

A guest connects to a socket file in the mesh's directory, on the holder's host, and sends the
mesh's key with its act; then it may send a byte to interrupt its run. The holder sends output and
the answer. The holder's link watches the socket, so that there is no thread before the first guest.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import queue
import socket
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...errors import CellmeshError
from ...wire.waiting import is_own_peer
from ..acts import Answer, AnyAct, Caller, perform
from ..mesh import Mesh
from ..output.console import ConsoleSink
from .link import warn
from .session import Session

NAME = "guest.sock"
# A guest sends its request at once; a holder whose interpreter is busy may answer late.
_REQUEST_S, ANSWER_S = 5.0, 10.0
# Output that waits for a guest which does not read; more is left out.
_MAX_BYTES = 64 << 20
_LONG_S = 1e9


class Request(msgspec.Struct, frozen=True):
    """The first line of a guest; `has_colours`: its error output is a terminal."""

    key: str
    pid: int
    act: AnyAct
    has_colours: bool = False

    def __repr__(self) -> str:
        return f"<Request of process {self.pid}>"  # keeps the key out of tracebacks


class Event(msgspec.Struct, frozen=True):
    """A line of the holder.

    `taken`: the act is carried out; `turn`: it is not, as the holder is a command as well, which
    leaves soon (the connection then ends); `out` and `err`: output; `answer`: the end of the act;
    `left`: there is no answer, as the holder has left the mesh, or ended it.
    """

    kind: Literal["taken", "turn", "out", "err", "answer", "left"]
    text: str = ""
    answer: Answer | None = None


def accept_guests(mesh: Mesh, visits: bool = False) -> None:
    """Let commands act on a mesh that this process controls, as long as it does.

    Args:
        mesh: the mesh.
        visits: whether this process is a command itself, which will not wait for runs of others.
    """
    path = Path(mesh.rank_set.session.ticket.directory) / NAME
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
    except OSError:  # the disk is full, or the mesh has ended: no guests then
        listener.close()
        return

    def meet() -> bool:
        guest, _ = listener.accept()
        threading.Thread(
            target=_serve, args=(mesh, guest, visits), name="cellmesh-guest", daemon=True
        ).start()
        return True

    mesh.rank_set.session.watch(listener, meet)


class _Outbox(msgspec.Struct):
    """Events on their way to a guest, which must not hold up the link if it does not read them."""

    session: Session
    events: queue.SimpleQueue[Event] = msgspec.field(default_factory=queue.SimpleQueue)
    num_bytes: int = 0
    is_cut: bool = False

    def put(self, event: Event) -> None:
        """Queue an event; output is dropped while too much of it waits."""
        if self.session.core.state == "ended":  # the answer would be on an unreachable mesh
            if event.kind != "answer":
                return
            event = Event("left")
        elif self.num_bytes > _MAX_BYTES and event.kind in ("out", "err"):
            self.is_cut = True
            return
        if self.is_cut and event.kind == "answer":
            self.events.put(Event("err", "... output is left out: it was not read in time\n"))
        self.num_bytes += len(event.text)
        self.events.put(event)

    def send(self, guest: socket.socket) -> None:
        """Send all events to the guest, up to the last."""
        is_there, kind = True, ""
        while kind not in ("answer", "left"):
            event = self.events.get()
            kind = event.kind
            if is_there:
                try:
                    guest.sendall(msgspec.json.encode(event) + b"\n")
                except OSError:  # it has ended; its run goes on
                    is_there = False
            self.num_bytes -= len(event.text)


class _Stream(io.TextIOBase):
    """A text file whose text is sent to a guest."""

    def __init__(self, outbox: _Outbox, kind: Literal["out", "err"], has_colours: bool) -> None:
        self._outbox, self._kind, self._has_colours = outbox, kind, has_colours

    def write(self, text: str) -> int:
        self._outbox.put(Event(self._kind, text))
        return len(text)

    def isatty(self) -> bool:
        return self._has_colours


def _serve(mesh: Mesh, guest: socket.socket, visits: bool) -> None:
    """Carry out the act of one guest."""
    with guest, contextlib.suppress(OSError, ValueError, CellmeshError):
        guest.settimeout(_REQUEST_S)
        with guest.makefile("rb") as lines:
            request = msgspec.json.decode(lines.readline(), type=Request)
        key = mesh.rank_set.session.ticket.key
        if not is_own_peer(guest) or not hmac.compare_digest(request.key, key):
            return
        guest.settimeout(None)
        act = request.act
        if act.is_run and visits:
            guest.sendall(msgspec.json.encode(Event("turn")) + b"\n")
            guest.recv(1)  # until one of both ends
            return
        if act.verb:
            command = type(act).__name__.lower()
            warn(f"`cellmesh {command}` (process {request.pid}) {act.verb}: {act.subject}")
        _carry_out(mesh, guest, request)


def _carry_out(mesh: Mesh, guest: socket.socket, request: Request) -> None:
    session = mesh.rank_set.session
    outbox = _Outbox(session)
    outbox.put(Event("taken"))
    out: Any = _Stream(outbox, "out", False)  # no TextIO in name, as it lacks most of it
    err: Any = _Stream(outbox, "err", request.has_colours)
    caller = Caller(ConsoleSink(out, err, mesh.name), _LONG_S)

    def hear() -> bool:
        """Interrupt the guest's run at its request; return False once the guest has ended."""
        with contextlib.suppress(OSError):
            if guest.recv(1):
                if caller.run is not None:
                    caller.run.interrupt()
                return True
        return False

    def act() -> None:
        outbox.put(Event("answer", answer=perform(mesh, request.act, caller)))

    session.watch(guest.dup(), hear)  # the link closes its own
    threading.Thread(target=act, name="cellmesh-act", daemon=True).start()
    outbox.send(guest)
    with contextlib.suppress(OSError):
        guest.shutdown(socket.SHUT_RDWR)
