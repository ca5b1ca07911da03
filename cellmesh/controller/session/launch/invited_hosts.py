"""Starts agents on hosts that announce themselves, as a person or an engine has started
``cellmesh agent`` there: ``--launch hand`` and ``--launch torchrun``.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ....errors import HostError, MeshUsageError
from ....wire.curve import new_keys, public_of
from ....wire.host import describe_mismatch, own_versions
from ....wire.hosts import GO, Announcement, HostPart
from ....wire.own_file import Secret, to_json
from ....wire.rendezvous import Invitation, addresses_by_interface
from ....wire.ticket import Ticket, add_refused
from .rendezvous import Guest, Rendezvous

# How long a heal waits for a host that has announced itself again.
_RETURN_S = 10.0
_FILE = "join.json"
# Of the documentation (RFC 5737): no packet is sent, the kernel looks up its route.
_ELSEWHERE = "192.0.2.1"


class InvitedHosts:
    """The hosts that announce themselves to this process.

    Args:
        ticket: the controllers'. With an invitation, the listener is bound where it was.
        report: shows a line of progress; called with a text and whether the text stays.

    Attributes:
        ticket: with the invitation.

    Raises:
        HostError: the listener cannot be bound.
    """

    def __init__(self, ticket: Ticket, report: Callable[[str, bool], None]) -> None:
        self.ticket = ticket
        self._report, self._num_refused = report, 0
        self._starting: list[Guest] = []
        invitation, secret = ticket.invitation, ticket.invitation_secret
        if invitation is None:
            secret, address = new_keys().secret, choose_own_address(ticket.address)
            invitation = Invitation(
                ticket.name, f"tcp://{address}:*", public_of(secret), new_keys().secret
            )
        self._rendezvous = Rendezvous(
            invitation.endpoint, secret, public_of(invitation.secret), self._note_refused
        )
        invitation = msgspec.structs.replace(invitation, endpoint=self._rendezvous.endpoint)
        self.ticket = msgspec.structs.replace(
            self.ticket, invitation=invitation, invitation_secret=secret
        )
        self._path = Path(ticket.directory) / _FILE
        if ticket.invitation is None:
            try:
                write_invitation(self._path, invitation)
            except BaseException:
                self.leave()
                raise

    def start(
        self,
        ticket: Ticket,
        parts: Sequence[HostPart],
        timeout_s: float,
        failures: dict[int, HostError] | None = None,
    ) -> list[Announcement]:
        """Wait until hosts have announced themselves; give them ranks in torchrun's order."""
        # TorchElastic has as many hosts as it was started with: those that join start by hand.
        joins = failures is None and parts[0].joins
        launch = "hand" if joins else ticket.launch
        line = agent_line(launch, parts[0].num_hosts, self._path)
        if failures is None:
            self._report(describe_start(launch, len(parts), self._path, joins), True)
        until = time.monotonic() + (timeout_s if failures is None else _RETURN_S)
        try:
            guests = self._rendezvous.gather(
                len(parts),
                until,
                lambda found: self._show(found, len(parts)),
                at_least=None if failures is None else 0,
            )
        except HostError as error:
            if not joins:
                raise
            raise HostError(f"{error}: start its agent ({line}), then resize again") from None
        if failures is not None:
            text = f"no host has announced itself in its place: start its agent again ({line})"
            failures.update((place, HostError(text)) for place in range(len(guests), len(parts)))
        self._check_versions(guests)
        self._starting = guests
        for guest, part in zip(guests, parts, strict=False):
            key = ticket.invitation.public_key if ticket.invitation is not None else ""
            named = msgspec.structs.replace(part, name=guest.facts.name, invited_by=key)
            sent = msgspec.structs.replace(
                ticket,
                host=named,
                agents=(),
                replaced=(),
                curve_secret=Secret(""),
                invitation=None,
                invitation_secret=Secret(""),
            )
            self._rendezvous.give(guest, to_json(sent))
        deadline = time.monotonic() + (120.0 if math.isinf(timeout_s) else timeout_s)
        announced = []
        for place, guest in enumerate(guests):
            try:
                announced.append(self._hear(guest, deadline))
            except HostError as error:
                if failures is None:
                    raise
                failures[place] = error
        for place in sorted((failures or {}).keys() & set(range(len(guests))), reverse=True):
            self.drop(place)
        return announced

    def _note_refused(self, number: int) -> None:
        """Write for `cellmesh ps` how many peers the listener has refused."""
        more, self._num_refused = number - self._num_refused, number
        add_refused(self.ticket, more)

    def _show(self, found: Sequence[Guest], num_hosts: int) -> None:
        names = ", ".join(guest.describe() for guest in found)
        self._report(f"{len(found)} of {num_hosts} hosts have announced themselves: {names}", False)

    def _check_versions(self, guests: Sequence[Guest]) -> None:
        versions = {"the notebook": msgspec.structs.replace(own_versions(), nccl="")}
        versions.update((guest.facts.name, guest.facts.versions) for guest in guests)
        if problem := describe_mismatch(versions):
            for guest in guests:
                self._rendezvous.refuse(guest, problem)
            raise HostError(problem)

    def _hear(self, guest: Guest, deadline: float) -> Announcement:
        announced = self._rendezvous.hear(guest, deadline)
        if announced.problem:
            raise HostError(f"{guest.facts.name}: {announced.problem}")
        return announced

    def drop(self, index: int) -> None:
        """As `Starter.drop`."""
        self._rendezvous.refuse(self._starting.pop(index), "the notebook says why")

    def let_go(self) -> None:
        """As `Starter.let_go`."""
        for guest in self._starting:
            self._rendezvous.order(guest, GO)
        self._starting = []

    def end(self) -> None:
        """As `Starter.end`."""
        for guest in self._starting:
            self._rendezvous.refuse(guest, "the mesh was not started: the notebook says why")
        self._starting = []

    def poll(self) -> bool:
        """As `Starter.poll`: nothing of this process started them."""
        return False

    def wait(self, timeout_s: float | None) -> bool:
        """As `Starter.wait`."""
        return True

    def signal(self, number: int) -> None:
        """As `Starter.signal`."""

    def leave(self) -> None:
        """As `Starter.leave`."""
        self._rendezvous.close("the mesh has ended, or its notebook has left it")


def agent_line(launch: str, num_hosts: int, path: Path) -> str:
    """Return the command line that starts an agent on a host."""
    copied = f"~/cellmesh-{path.parent.name}.json"
    if launch == "torchrun":
        # With a store that it shares, TorchElastic (2.13) waits without end when a host returns.
        return (
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun "
            f"--nnodes {num_hosts} --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d "
            f"--rdzv-endpoint FIRST_HOST:29400 -m cellmesh agent --ticket {copied}"
        )
    return f"{os.path.basename(sys.executable)} -m cellmesh agent --ticket {copied}"


def describe_start(launch: str, num_hosts: int, path: Path, joins: bool = False) -> str:
    """Say what a person has to do on each host; on more hosts, if they join a mesh."""
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


def write_invitation(path: Path, invitation: Invitation) -> None:
    """Write the file that hosts get, mode 0600.

    Raises:
        HostError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(to_json(invitation) + b"\n")
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}") from error


def choose_own_address(wanted: str) -> str:
    """Choose the address of this host at which other hosts announce themselves.

    Args:
        wanted: an address, or an interface; "" for that of the route to other networks.

    Raises:
        MeshUsageError: this host has no such address, or several and none was chosen.
    """
    return choose_address(wanted, addresses_by_interface(), route_address())


def choose_address(wanted: str, by_interface: Mapping[str, Sequence[str]], routed: str) -> str:
    """Choose an address. Pure.

    Args:
        wanted: an address or an interface, as the user has said; "" for none.
        by_interface: this host's addresses.
        routed: that of the route to other networks; "" without such a route.

    Raises:
        MeshUsageError: there is no such address, or several, and none was chosen.
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
    if routed:
        return routed
    others = [
        address for name, addresses in by_interface.items() if name != "lo" for address in addresses
    ]
    if len(others) != 1:
        raise MeshUsageError(
            "at which address do the other hosts find this one? Say it, like --address eth0 "
            f"({there})"
        )
    return others[0]


def route_address() -> str:
    """Return this host's address on its way to other networks; "" if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((_ELSEWHERE, 9))
        return str(way.getsockname()[0])
    return ""
