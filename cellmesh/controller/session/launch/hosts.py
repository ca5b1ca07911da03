"""The launcher of an agent on each of many hosts; a `Starter` starts them."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from ....errors import HostError, MeshUsageError
from ....wire.curve import new_keys, public_of
from ....wire.host import describe_mismatch
from ....wire.hosts import AgentAddress, Announcement, HostPart, own_addresses
from ....wire.ticket import Ticket, remove_directory, write_ticket
from ...host_list import INVITING, HostEntry
from .commands import HostCommands
from .invited_hosts import InvitedHosts
from .local import Launcher, Starter
from .reach import Reach, describe_way

# How long the agent that replaces a lost one may take.
_ATTACHED_START_S = 120.0


class HostAgents(Launcher):
    """The launcher of one agent on each host.

    Args:
        ticket: of the mesh, in the notebook's runtime directory; it gets the agents' addresses. If
            it has them already, the agents were started by another process.
        hosts: on which agents are started.
        command: the command line that starts the agents of all hosts; "" where each host has one.
        timeout_s: how long all of them may take; infinite to wait for people to start them.
        report: shows a line of progress; called with a text and whether the text stays.

    Attributes:
        ticket: with the agents' addresses, once they have started.
        unheard: the places of the agents that were started by another process, and not reached.
    """

    def __init__(
        self,
        ticket: Ticket,
        hosts: Sequence[HostEntry] = (),
        command: str = "",
        timeout_s: float = _ATTACHED_START_S,
        report: Callable[[str, bool], None] = lambda text, stays: None,
    ) -> None:
        secret = ticket.curve_secret or new_keys().secret
        self.ticket = msgspec.structs.replace(ticket, curve_secret=secret)
        self._hosts, self._command = hosts, command
        self._timeout_s = timeout_s
        self._report = report
        self.unheard: tuple[int, ...] = ()
        self._starter: Starter | None = None  # made when it is needed
        self._reach = Reach(secret, not ticket.launch, lambda text: report(text, True))
        self._never, self._lock = -1, threading.Lock()

    def start(self) -> int:
        """Start all agents at once, and wait until each has announced itself.

        Returns:
            A descriptor that is never readable: the connections tell when all agents have ended.

        Raises:
            HostError: one could not be started; those that were have been ended.
        """
        if not self.ticket.agents:
            self._start_all()
        else:
            found, self.unheard = self._reach.find_again(self.ticket.agents)
            self.ticket = msgspec.structs.replace(self.ticket, agents=tuple(found))
            if self.ticket.invitation is not None:
                with contextlib.suppress(HostError):  # another process, or host, listens
                    self._begin()
        read_end, self._never = os.pipe()
        return read_end

    def _start_all(self) -> None:
        first = 0
        parts = []
        try:
            for index, host in enumerate(self._hosts):
                parts.append(self._part(index, len(self._hosts), host.name, first, host.num_ranks))
                first += host.num_ranks
            write_ticket(self.ticket)  # with its key, by which it is known as one of many hosts
            starter = self._begin()
            announced = starter.start(self.ticket, parts, self._timeout_s)
            check_hosts(announced, is_ssh=not self.ticket.launch)
            addresses = [each.address for each in announced if each.address is not None]
            found = self._reach.find(addresses)
            self.ticket = msgspec.structs.replace(
                self.ticket, agents=tuple(found), job=announced[0].job
            )
            write_ticket(self.ticket)
        except BaseException:
            if self._starter is not None:
                self._starter.end()
            self.leave()
            remove_directory(Path(self.ticket.directory))
            raise

    def _begin(self) -> Starter:
        """Return what starts the agents, made at the first call."""
        if self._starter is None:
            if self.ticket.launch in INVITING:
                invited = InvitedHosts(self.ticket, self._report)
                self._starter, self.ticket = invited, invited.ticket
            else:
                self._starter = HostCommands(self._command, lambda text: self._report(text, False))
        return self._starter

    def start_again(
        self, names: Mapping[int, str], given_up: Collection[int] = ()
    ) -> dict[int, HostError]:
        """As `Launcher.start_again`."""
        parts = []
        for index, name in names.items():
            lost = self.ticket.agents[index]
            part = self._part(index, len(self.ticket.agents), name, lost.first_rank, lost.num_ranks)
            parts.append(msgspec.structs.replace(part, joins=True, replaces=index in given_up))
        started: dict[int, AgentAddress] = {}
        try:
            starter = self._begin()
        except HostError as error:
            return dict.fromkeys(names, error)
        failures: dict[int, HostError] = {}
        try:
            announced = starter.start(self.ticket, parts, _ATTACHED_START_S, failures)
            failed = {parts[place].index: error for place, error in failures.items()}
            left = [part.index for part in parts if part.index not in failed]
            for place in reversed(range(len(left))):  # as those after one that is dropped move up
                try:
                    address = announced[place].address
                    assert address is not None
                    (started[left[place]],) = self._reach.find([address])
                except HostError as error:
                    failed[left[place]] = error
                    starter.drop(place)
            starter.let_go()
        except HostError as error:
            starter.end()
            return dict.fromkeys(names, error)
        except BaseException:
            starter.end()
            raise
        if started:
            self._note_started(started)
        return failed

    def _note_started(self, started: Mapping[int, AgentAddress]) -> None:
        """Write to the ticket which agents are in place of lost ones."""
        agents, replaced = list(self.ticket.agents), list(self.ticket.replaced)
        for index, agent in started.items():
            if agent.host != agents[index].host:  # where nothing has ended the lost one
                replaced.append(agents[index])
            agents[index] = agent
        self.ticket = msgspec.structs.replace(
            self.ticket,
            agents=tuple(agents),
            agents_revision=self.ticket.agents_revision + 1,
            replaced=tuple(replaced),
        )
        write_ticket(self.ticket)

    def check_may_join(self, names: Iterable[str]) -> None:
        """As `Launcher.check_may_join`."""
        if self.ticket.launch == "ray" and (named := ", ".join(names)):
            raise MeshUsageError(
                f"{named}: no node joins a mesh on Ray, whose reservation keeps its size. Without "
                "--hosts its last node gets more ranks; for more nodes start the mesh again"
            )

    def start_more(self, layout: Sequence[int], entries: Sequence[HostEntry]) -> list[AgentAddress]:
        """As `Launcher.start_more`."""
        if not entries:
            return []
        self.check_may_join(entry.name for entry in entries)
        num_old = len(layout) - len(entries)
        parts = []
        for index, entry in enumerate(entries, num_old):
            first = sum(layout[:index])
            part = self._part(index, len(layout), entry.name, first, entry.num_ranks)
            parts.append(msgspec.structs.replace(part, joins=True))
        starter = self._begin()
        try:
            announced = starter.start(self.ticket, parts, _ATTACHED_START_S)
            check_hosts(announced, is_ssh=not self.ticket.launch)
            taken = {agent.address: agent.host for agent in self.ticket.agents}
            for part, each in zip(parts, announced, strict=True):
                if each.address and each.address.address in taken and not self.ticket.launch:
                    name = taken[each.address.address]
                    raise MeshUsageError(f"{part.name} is {name}, which has ranks of the mesh")
            addresses = [each.address for each in announced if each.address is not None]
            found = self._reach.find(addresses)
            starter.let_go()
        except BaseException:
            starter.end()
            raise
        return found

    def forget(self, agents: Sequence[AgentAddress]) -> None:
        """As `Launcher.forget`."""
        self._reach.forget(agents)

    def note_resized(
        self, layout: Sequence[int], dims: Mapping[str, int], new: Sequence[AgentAddress]
    ) -> None:
        """Write the mesh's new number of ranks and its hosts to the ticket."""
        agents = [
            msgspec.structs.replace(agent, num_ranks=num_ranks)
            for agent, num_ranks in zip([*self.ticket.agents, *new], layout, strict=False)
        ]
        ticket = msgspec.structs.replace(
            self.ticket,
            num_ranks=sum(layout),
            num_resizes=self.ticket.num_resizes + 1,
            agents=tuple(agents),
            agents_revision=self.ticket.agents_revision + 1,
            mesh_dim_names=tuple(dims),
            mesh_shape=tuple(dims.values()),
        )
        write_ticket(ticket)
        self.ticket = ticket

    def _part(
        self, index: int, num_hosts: int, name: str, first_rank: int, num_ranks: int
    ) -> HostPart:
        return HostPart(
            index=index,
            num_hosts=num_hosts,
            name=name,
            first_rank=first_rank,
            num_ranks=num_ranks,
            controller_key=public_of(self.ticket.curve_secret),
            notebook=(socket.gethostname(), *own_addresses()),
            start_timeout_s=max(
                _ATTACHED_START_S, 0 if math.isinf(self._timeout_s) else self._timeout_s
            ),
        )

    def let_go(self) -> None:
        """Have the agents go on, whatever becomes of this process."""
        if self._starter is not None:
            self._starter.let_go()

    def poll(self) -> bool:
        """Whether anything runs by which agents were started; it does as long as the agents."""
        return self._starter is not None and self._starter.poll()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all that started agents has ended; False if it has not."""
        if self._starter is not None and not self._starter.wait(timeout_s):
            return False
        # A notebook's cell and its kernel's shutdown may both end the mesh: closed twice, the
        # number may be another's by then, a socket of the kernel's.
        with self._lock:
            never, self._never = self._never, -1
        if never >= 0:
            os.close(never)
        return True

    def signal(self, number: int) -> None:
        """Send a signal to what started agents."""
        if self._starter is not None:
            self._starter.signal(number)

    def leave(self) -> None:
        """Close what this process has open for the agents."""
        self._reach.close()
        if self._starter is not None:
            self._starter.leave()

    def describe(self) -> str:
        """Name the hosts."""
        return "agents: " + "; ".join(describe_way(agent) for agent in self.ticket.agents)


def check_hosts(announced: Sequence[Announcement], is_ssh: bool) -> None:
    """Check that hosts have the same versions, are different ones, and can reach each other. Pure.

    Args:
        announced: one a host.
        is_ssh: two names may stand for one host, by mistake.

    Raises:
        MeshUsageError: two names stand for one host, or one is reached by the loopback only.
        HostError: versions differ.
    """
    addresses = [each.address for each in announced if each.address is not None]
    names = [address.host for address in addresses]
    versions = {
        name: each.versions
        for name, each in zip(names, announced, strict=True)
        if each.versions is not None
    }
    if problem := describe_mismatch(versions):
        raise HostError(problem)
    known: dict[object, str] = {}
    for name, each in zip(names, announced, strict=True):
        if is_ssh and each.place in known:
            raise MeshUsageError(
                f"{known[each.place]} and {name} are one host: name it once, with all its ranks"
            )
        known[each.place] = name
    loops = [ipaddress.ip_address(address.address).is_loopback for address in addresses]
    if any(loops) and not all(loops):
        raise MeshUsageError(
            f"{names[loops.index(True)]} is reached by the loopback, which the other hosts cannot "
            "use: name it as they would, or use --interface"
        )
