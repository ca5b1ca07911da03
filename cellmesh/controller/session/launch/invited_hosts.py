"""Starts agents on hosts that announce themselves, after a person or an engine has run
``cellmesh agent`` there: ``--launch hand`` and ``--launch torchrun``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from ....errors import HostError, MeshUsageError
from ....wire import transport
from ....wire.curve import AllowList, KeyPair, PeerMonitor, new_keys, public_of
from ....wire.hosts import (
    AGAIN_S,
    ARRIVED,
    GO,
    ORDER,
    REFUSED,
    SAID,
    TICKET,
    Announcement,
    HostFacts,
    HostPart,
    Invitation,
    address_towards,
    addresses_by_interface,
)
from ....wire.own_file import Secret, SecretBytes, to_json, write_whole
from ....wire.process import wait_readable
from ....wire.ticket import Ticket, add_refused

# How long a heal waits for a host to announce itself again.
_RETURN_S = 10.0
_FILE = "join.json"
# Address for documentation (RFC 5737): no packet is sent, the kernel only looks up its route.
_ELSEWHERE = "192.0.2.1"


class InvitedHosts:
    """Starts agents on the hosts that announce themselves to this process.

    Args:
        report: shows a line of progress; called with a text and whether the text stays.
    """

    def __init__(self, report: Callable[[str, bool], None]) -> None:
        self._report = report
        self._starting: dict[int, Guest] = {}  # by the index of the host
        self._listener: Listener | None = None

    def prepare(self, ticket: Ticket) -> Ticket:
        """Start the listener to which hosts announce themselves, unless it runs already; return the
        ticket with an invitation for hosts.

        Args:
            ticket: ticket of controllers; if it has an invitation, the listener uses its endpoint.

        Raises:
            HostError: the listener cannot be bound.
        """
        if self._listener is not None:
            return ticket
        invitation, secret = ticket.invitation, ticket.invitation_secret
        if invitation is None:
            secret = new_keys().secret
            routed = address_towards(_ELSEWHERE)
            address = choose_address(ticket.address, addresses_by_interface(), routed)
            invitation = Invitation(
                ticket.name, f"tcp://{address}:*", public_of(secret), new_keys().secret
            )
        key = public_of(invitation.secret)
        self._listener = Listener(
            invitation.endpoint, secret, key, functools.partial(add_refused, ticket)
        )
        invitation = msgspec.structs.replace(invitation, endpoint=self._listener.endpoint)
        if ticket.invitation is None:
            write_whole(Path(ticket.directory) / _FILE, invitation, indent=None)
        return msgspec.structs.replace(ticket, invitation=invitation, invitation_secret=secret)

    def start(
        self, ticket: Ticket, parts: Sequence[HostPart], timeout_s: float, needs_all: bool = True
    ) -> list[Announcement]:
        """Start agents on hosts that have announced themselves; see `HostCommands.start`.

        Hosts get ranks in torchrun's order.
        """
        assert self._listener is not None
        assert ticket.invitation is not None
        # TorchElastic keeps the number of hosts of its start: agents that join are run by hand.
        joins, path = needs_all and parts[0].joins, Path(ticket.directory) / _FILE
        launch = "hand" if joins else ticket.launch
        line = agent_line(launch, parts[0].num_hosts, path)
        if needs_all:
            self._report(describe_start(launch, len(parts), path, joins), True)
        until = time.monotonic() + (timeout_s if needs_all else _RETURN_S)
        guests = self._listener.gather(
            len(parts), until, lambda found: self._show(found, len(parts))
        )
        if needs_all and len(guests) < len(parts):
            names = ", ".join(guest.facts.name for guest in guests) or "none"
            advice = f": start its agent ({line}), then resize again" if joins else ""
            raise HostError(f"{len(parts)} hosts are awaited, and {names} announced itself{advice}")
        self._starting = {part.index: guest for part, guest in zip(parts, guests, strict=False)}
        sent = msgspec.structs.replace(
            ticket,
            agents=(),
            replaced=(),
            curve_secret=Secret(""),
            invitation=None,
            invitation_secret=Secret(""),
        )
        for guest, part in zip(guests, parts, strict=False):
            key = ticket.invitation.public_key
            named = msgspec.structs.replace(part, name=guest.facts.name, invited_by=key)
            self._listener.give(guest, to_json(msgspec.structs.replace(sent, host=named)))
        deadline = time.monotonic() + (120.0 if math.isinf(timeout_s) else timeout_s)
        announced: list[Announcement] = []
        for guest in guests:
            announced.append(self._listener.hear(guest, deadline))
            if needs_all and announced[-1].problem:
                return announced
        missing = f"no host has announced itself in its place: start its agent again ({line})"
        return announced + [Announcement(missing)] * (len(parts) - len(guests))

    def _show(self, found: Sequence[Guest], num_hosts: int) -> None:
        names = ", ".join(guest.describe() for guest in found)
        self._report(f"{len(found)} of {num_hosts} hosts have announced themselves: {names}", False)

    def _refuse(self, guests: Iterable[Guest], reason: str) -> None:
        for guest in guests:
            if self._listener is not None:
                self._listener.refuse(guest, reason)

    def drop(self, index: int) -> None:
        """Refuse a host of the last `start`, which ends its agent; see `HostCommands.drop`."""
        if index in self._starting:
            self._refuse([self._starting.pop(index)], "the notebook says why")

    def let_go(self) -> None:
        """Let the agents that the last `start` has started run on, even if this process ends."""
        for guest in self._starting.values():
            if self._listener is not None:
                self._listener.order(guest, GO)
        self._starting = {}

    def end(self) -> None:
        """Refuse the hosts of the last `start`, which ends their agents, unless `let_go` was called
        for them.
        """
        self._refuse(self._starting.values(), "the mesh was not started: the notebook says why")
        self._starting = {}

    def wait(self, timeout_s: float | None) -> bool:
        """Return True, as there is no command to wait for."""
        return True

    def signal(self, number: int) -> None:
        """Send no signal, as there is no command to signal."""

    def leave(self) -> None:
        """Close the listener to which hosts announce themselves, and refuse the hosts that wait for
        a ticket.
        """
        if self._listener is not None:
            self._listener.close("the mesh has ended, or its notebook has left it")


def agent_line(launch: str, num_hosts: int, path: Path) -> str:
    """Return the command line by which a user starts an agent on a host."""
    copied = f"~/cellmesh-{path.parent.name}.json"
    if launch == "torchrun":
        # With a shared store, TorchElastic (2.13) waits forever when a host returns.
        return (
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun "
            f"--nnodes {num_hosts} --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d "
            f"--rdzv-endpoint FIRST_HOST:29400 -m cellmesh agent --ticket {copied}"
        )
    return f"{os.path.basename(sys.executable)} -m cellmesh agent --ticket {copied}"


def describe_start(launch: str, num_hosts: int, path: Path, joins: bool = False) -> str:
    """Return instructions for users: how to start the agent on each host of a new mesh, or on hosts
    that join a mesh.

    Args:
        launch: ``hand`` or ``torchrun``.
        num_hosts: number of hosts.
        path: file of the invitation.
        joins: whether the hosts join a running mesh.
    """
    copied = f"cellmesh-{path.parent.name}.json"
    where = f"On {num_hosts} more" if joins else f"On each of {num_hosts}"
    lines = [
        f"{where} host{'s' if num_hosts > 1 or not joins else ''}, start the agent:",
        f"    {agent_line(launch, num_hosts, path)}",
        f"The ticket is this file; it is secret, and only its owner may read it (0600): {path}",
        f"    scp {path} HOST:{copied}",
    ]
    if launch != "torchrun":
        lines.append("Without --ticket, the agent asks for the file's text, which is pasted there.")
    return "\n".join(lines)


def choose_address(wanted: str, by_interface: Mapping[str, Sequence[str]], routed: str) -> str:
    """Choose the address of this host at which other hosts announce themselves. Pure.

    Args:
        wanted: address or interface that the user has chosen; "" for none.
        by_interface: addresses of this host, by interface.
        routed: address of this host on the route to other networks; "" without such a route.

    Raises:
        MeshUsageError: this host does not have the chosen address, or the user must choose one.
    """
    known = {address for addresses in by_interface.values() for address in addresses}
    there = ", ".join(f"{name} {' '.join(all_)}" for name, all_ in by_interface.items() if all_)
    if wanted:
        found = by_interface.get(wanted, [wanted] if wanted in known else [])
        if not found:
            raise MeshUsageError(
                f"--address {wanted}: this host has no such address or interface ({there})"
            )
        return found[0]
    if not routed:
        raise MeshUsageError(
            "at which address do the other hosts find this one? Say it, like --address eth0 "
            f"({there})"
        )
    return routed


# A waiting host that is silent for this long counts as lost; while it starts its agent, it may be
# silent for longer.
_GONE_S = 5 * AGAIN_S
_STARTING_S = 60.0


@dataclass(eq=False)
class Guest:
    """A host that has announced itself to the notebook's `Listener`.

    Attributes:
        identity: ZeroMQ identity of its connection.
        facts: its name, addresses and place, as it has announced them.
        heard_at: time of its last message, in seconds.
        has_part: whether it was sent a ticket.
        said: announcements of its agent that have not been read yet.
    """

    identity: bytes
    facts: HostFacts
    heard_at: float
    has_part: bool = False
    said: list[Announcement] = field(default_factory=list)

    def describe(self) -> str:
        """Return the host's name and addresses, as text."""
        return f"{self.facts.name} ({', '.join(self.facts.addresses)})"


def choose_guests(guests: Sequence[Guest], now: float) -> list[Guest]:
    """Return the hosts that wait for a ticket, in the order of the numbers that their launcher
    (such as torchrun) gave them, or of arrival.

    Args:
        guests: all hosts in the order of arrival.
        now: current time in seconds.
    """
    waiting = [guest for guest in guests if not guest.has_part and now - guest.heard_at <= _GONE_S]
    return sorted(waiting, key=lambda guest: guest.facts.number)


class Listener:
    """The server, on a thread of its own, to which hosts announce themselves.

    Args:
        endpoint: ``tcp://address:port``, or ``tcp://address:*``.
        secret: CURVE's secret key of the listener.
        allowed: public key of the hosts that may announce themselves.
        refused: called on the thread, at most once a second, with the number of peers that were
            refused since.

    Raises:
        HostError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, secret: Secret, allowed: str, refused: Callable[[int], None]
    ) -> None:
        self._context: zmq.Context[transport.Socket] = zmq.Context()
        self._allowed = AllowList(self._context, [allowed])
        try:
            keys = KeyPair(public_of(secret), secret)
            self._socket = transport.bind_router(self._context, endpoint, keys)
        except HostError:
            self._allowed.close()
            self._context.term()
            raise
        self._monitor = PeerMonitor(self._socket)
        self._refused, self._num_refused, self._said_at = refused, 0, -math.inf
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._guests: dict[bytes, Guest] = {}
        self._changed = threading.Condition()  # also guards the sockets
        self._is_closing = False
        self._wake_read, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="cellmesh-listener", daemon=True)
        self._thread.start()

    def gather(
        self, num_hosts: int, until: float, report: Callable[[Sequence[Guest]], None]
    ) -> list[Guest]:
        """Wait until `num_hosts` hosts wait for a ticket or the time is over; return the waiting
        hosts in order.

        Args:
            num_hosts: number of hosts.
            until: when to give up, in seconds of the monotonic clock; infinite for never.
            report: called with the waiting hosts, at first and whenever they change.
        """
        reported: list[Guest] | None = None
        while True:
            with self._changed:
                now = time.monotonic()
                waiting = choose_guests(list(self._guests.values()), now)
            if waiting != reported:
                report(waiting)
                reported = waiting
            if len(waiting) >= num_hosts or now >= until:
                return waiting[:num_hosts]
            with self._changed:
                self._changed.wait(min(AGAIN_S, until - now))

    def give(self, guest: Guest, ticket: SecretBytes) -> None:
        """Send a host the ticket of its agent."""
        guest.has_part = True
        self._say(guest, TICKET, ticket)

    def order(self, guest: Guest, line: bytes) -> None:
        """Send an order, e.g. `GO`, to the agent of a host."""
        self._say(guest, ORDER, line)

    def refuse(self, guest: Guest, reason: str) -> None:
        """Refuse a host: the process that has announced it ends with the reason as its error."""
        self._say(guest, REFUSED, reason.encode())
        with self._changed:
            self._guests.pop(guest.identity, None)

    def hear(self, guest: Guest, until: float) -> Announcement:
        """Wait for the announcement of a host's agent; return an announcement with a problem if the
        agent is late or the host is lost.
        """
        name, problem = guest.facts.name, ""
        with self._changed:
            while not guest.said and not problem:
                now = time.monotonic()
                if now - guest.heard_at > _STARTING_S or guest.identity not in self._guests:
                    problem = "is not heard any longer: what started its agent ended"
                elif now >= until:
                    problem = "has not started its agent in time"
                else:
                    self._changed.wait(min(AGAIN_S, until - now))
            if not problem and not (announced := guest.said.pop(0)).problem:
                return announced
        return Announcement(f"{name} {problem}" if problem else f"{name}: {announced.problem}")

    def close(self, reason: str) -> None:
        """Refuse the hosts that wait for a ticket, and close the listener's socket."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            waiting = [guest for guest in self._guests.values() if not guest.has_part]
        for guest in waiting:
            self._say(guest, REFUSED, reason.encode())
        os.write(self._wake, b"x")
        self._thread.join()
        self._allowed.close()
        self._monitor.close()
        self._socket.close(linger=500)
        self._context.term()
        os.close(self._wake)
        os.close(self._wake_read)

    # ---- the sockets, by any thread that holds `_changed`

    def _run(self) -> None:
        numbers = [self._allowed.fileno(), self._monitor.fileno(), self._wake_read]
        numbers.append(int(self._socket.getsockopt(zmq.FD)))
        while not self._is_closing:
            # ZeroMQ's descriptors report changes only, and a send of another thread may take one.
            wait_readable(numbers, AGAIN_S)
            with self._changed:
                self._serve()
            self._count()

    def _count(self) -> None:
        self._monitor.hear()
        number, now = self._monitor.num_refused, time.monotonic()
        if number != self._num_refused and now - self._said_at >= AGAIN_S:
            more, self._num_refused, self._said_at = number - self._num_refused, number, now
            self._refused(more)

    def _say(self, guest: Guest, word: bytes, text: bytes) -> None:
        with self._changed:
            transport.send(self._socket, [guest.identity, word, text])
            self._serve()

    def _serve(self) -> None:
        self._allowed.serve()
        while transport.readable(self._socket):
            frames = [bytes(frame) for frame in transport.receive(self._socket)]
            if len(frames) == 3:
                with contextlib.suppress(msgspec.MsgspecError):  # of another version
                    self._take(*frames)
        self._changed.notify_all()

    def _take(self, identity: bytes, word: bytes, text: bytes) -> None:
        guest = self._guests.get(identity)
        now = time.monotonic()
        if word == ARRIVED:
            facts = msgspec.json.decode(text, type=HostFacts)
            if guest is not None:
                guest.heard_at = now
                return
            for other in list(self._guests.values()):
                if other.facts.place == facts.place:  # it was started once more there
                    reason = f"another process has announced {facts.name} once more"
                    frames = [other.identity, REFUSED, reason.encode()]
                    transport.send(self._socket, list(frames))
                    del self._guests[other.identity]
            self._guests[identity] = Guest(identity, facts, now)
        elif word == SAID and guest is not None:
            guest.said.append(msgspec.json.decode(text, type=Announcement))
            guest.heard_at = now
