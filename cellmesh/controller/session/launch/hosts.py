"""The launcher of an agent on each of many hosts, and the routes from this process to the agents:
straight to their ports, or through port forwarding by ssh.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import math
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from ....errors import HostError, MeshUsageError
from ....wire.curve import new_keys, public_of
from ....wire.host import describe_mismatch
from ....wire.hosts import Announcement, Host, HostPart, own_addresses
from ....wire.ticket import Ticket, remove_directory, write_ticket
from ...host_list import INVITING
from ..standing import ask_at
from .commands import HostCommands
from .invited_hosts import InvitedHosts
from .local import Launcher

# Time limit for the start of an agent in place of a lost one, or on a new host.
_ATTACHED_START_S = 120.0


class HostAgents(Launcher):
    """The launcher of a mesh on many hosts, which starts one agent on each host.

    Args:
        ticket: ticket of the mesh, in the notebook's runtime directory; it gets the agents'
            addresses. If it has them already, another process has started the agents.
        hosts: hosts to start agents on.
        command: command line that starts the agents of all hosts; "" if each host has its own.
        timeout_s: time limit for the start of all agents, in seconds; infinite to wait for people
            to start them.
        report: shows a line of progress; called with a text and whether the text stays.

    Attributes:
        ticket: ticket of the mesh, with the agents' addresses once they have started.
        unheard: indices of the agents that another process has started and that are out of reach.
    """

    def __init__(
        self,
        ticket: Ticket,
        hosts: Sequence[Host] = (),
        command: str = "",
        timeout_s: float = _ATTACHED_START_S,
        report: Callable[[str, bool], None] = lambda text, stays: None,
    ) -> None:
        secret = ticket.curve_secret or new_keys().secret
        super().__init__(msgspec.structs.replace(ticket, curve_secret=secret))
        self._hosts, self._timeout_s = hosts, timeout_s
        self._starter: HostCommands | InvitedHosts = (
            InvitedHosts(report)
            if ticket.launch in INVITING
            else HostCommands(command, lambda text: report(text, False))
        )
        self._reach = Reach(not ticket.launch, lambda text: report(text, True))

    def start(self) -> int:
        """Start all agents at once, and wait until each has announced itself.

        Returns:
            A file descriptor that is never readable: the connections detect the agents' end.

        Raises:
            HostError: an agent could not be started; the agents that were have been ended.
        """
        if not self.ticket.agents:
            self._start_all()
        else:
            found, problems = self._reach.find(self.ticket, self.ticket.agents)
            if len(problems) == len(found):
                raise unreached(found[0], problems[0])
            self.unheard = tuple(problems)
            self.ticket = msgspec.structs.replace(self.ticket, agents=tuple(found))
            if self.ticket.invitation is not None:
                with contextlib.suppress(HostError):  # another process or host listens already
                    self.ticket = self._starter.prepare(self.ticket)
        return os.eventfd(0, os.EFD_CLOEXEC)

    def _start_all(self) -> None:
        first_ranks = itertools.accumulate((host.num_ranks for host in self._hosts), initial=0)
        hosts = [
            msgspec.structs.replace(host, first_rank=first)
            for host, first in zip(self._hosts, first_ranks, strict=False)
        ]
        try:
            parts = [self._part(index, len(hosts), host) for index, host in enumerate(hosts)]
            write_ticket(self.ticket)  # its key marks it as one of many hosts
            announced = self._start(parts, self._timeout_s)
            found, job = self._find([each.host for each in announced]), announced[0].job
            self.ticket = msgspec.structs.replace(self.ticket, agents=tuple(found), job=job)
            write_ticket(self.ticket)
        except BaseException:
            self._starter.end()
            self.leave()
            remove_directory(Path(self.ticket.directory))
            raise

    def _start(self, parts: Sequence[HostPart], timeout_s: float) -> list[Announcement]:
        """Start agents and check their announcements; raise an error if any agent cannot start."""
        self.ticket = self._starter.prepare(self.ticket)
        announced = self._starter.start(self.ticket, parts, timeout_s)
        for each in announced:
            if each.problem:
                raise HostError(each.problem)
        check_hosts(announced, is_ssh=not self.ticket.launch)
        return announced

    def _find(self, hosts: Sequence[Host]) -> list[Host]:
        """Return hosts with the network routes to their agents; raise an error if any agent cannot
        be reached.
        """
        found, problems = self._reach.find(self.ticket, hosts)
        for index in problems:
            raise unreached(found[index], problems[index])
        return found

    def start_again(
        self, names: Mapping[int, str], given_up: Collection[int] = ()
    ) -> dict[int, HostError]:
        """Start agents in place of lost ones; see `Launcher.start_again`."""
        self._check_may_join(names[index] for index in given_up if index in names)
        parts, started, failures = [], dict[int, Host](), dict[int, HostError]()
        for index, name in names.items():
            host = msgspec.structs.replace(self.ticket.agents[index], name=name)
            part = self._part(index, len(self.ticket.agents), host)
            parts.append(msgspec.structs.replace(part, joins=True, replaces=index in given_up))
        try:
            self.ticket = self._starter.prepare(self.ticket)
            announced = self._starter.start(self.ticket, parts, _ATTACHED_START_S, needs_all=False)
            for index, each in zip(names, announced, strict=True):
                try:
                    if each.problem:
                        raise HostError(each.problem)
                    (started[index],) = self._find([each.host])
                except HostError as error:
                    failures[index] = error
                    self._starter.drop(index)
            self._starter.let_go()
        except HostError as error:
            self._starter.end()
            return dict.fromkeys(names, error)
        except BaseException:
            self._starter.end()
            raise
        if started:
            self._note_started(started)
        return failures

    def _note_started(self, started: Mapping[int, Host]) -> None:
        """Write to the ticket the agents that were started in place of lost ones."""
        agents, replaced = list(self.ticket.agents), list(self.ticket.replaced)
        for index, agent in started.items():
            if agent.name != agents[index].name:  # the lost agent may still run
                replaced.append(agents[index])
            agents[index] = agent
        self.ticket = msgspec.structs.replace(
            self.ticket,
            agents=tuple(agents),
            agents_revision=self.ticket.agents_revision + 1,
            replaced=tuple(replaced),
        )
        write_ticket(self.ticket)

    def _check_may_join(self, names: Iterable[str]) -> None:
        if self.ticket.launch == "ray" and (named := ", ".join(names)):
            raise MeshUsageError(
                f"{named}: no node joins a mesh on Ray, whose reservation keeps its size. Without "
                "--hosts its last node gets more ranks; for more nodes start the mesh again"
            )

    def start_more(self, layout: Sequence[int], hosts: Sequence[Host]) -> list[Host]:
        """Start agents on more hosts; see `Launcher.start_more`."""
        self._check_may_join(host.name for host in hosts)
        parts = []
        for index, host in enumerate(hosts, len(layout) - len(hosts)):
            host = msgspec.structs.replace(host, first_rank=sum(layout[:index]))
            part = self._part(index, len(layout), host)
            parts.append(msgspec.structs.replace(part, joins=True))
        try:
            announced = self._start(parts, _ATTACHED_START_S)
            found = self._find([each.host for each in announced])
            self._starter.let_go()
        except BaseException:
            self._starter.end()
            raise
        return found

    def note_resized(
        self, layout: Sequence[int], dims: Mapping[str, int], new: Sequence[Host]
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

    def _part(self, index: int, num_hosts: int, host: Host) -> HostPart:
        return HostPart(
            index=index,
            num_hosts=num_hosts,
            name=host.name,
            first_rank=host.first_rank,
            num_ranks=host.num_ranks,
            controller_key=public_of(self.ticket.curve_secret),
            notebook=(socket.gethostname(), *own_addresses()),
            start_timeout_s=max(
                _ATTACHED_START_S, 0 if math.isinf(self._timeout_s) else self._timeout_s
            ),
        )

    def let_go(self) -> None:
        """Let the agents run on, even if this process ends."""
        self._starter.let_go()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the commands that have started agents end; return False if one exceeds the
        time limit.
        """
        return self._starter.wait(timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal to the commands that have started agents."""
        self._starter.signal(number)

    def leave(self) -> None:
        """Close the port forwardings to the agents, and the listener to which hosts announce
        themselves, if any.
        """
        self._reach.close()
        self._starter.leave()

    def describe(self) -> str:
        """Return a line for users on how this process reaches each agent."""
        return "agents: " + "; ".join(describe_way(agent) for agent in self.ticket.agents)


def check_hosts(announced: Sequence[Announcement], is_ssh: bool) -> None:
    """Check that hosts have equal versions, are different machines, and can reach each other. Pure.

    Args:
        announced: the agents' announcements, one a host.
        is_ssh: whether hosts were named by the user, who may name one twice by mistake.

    Raises:
        MeshUsageError: two names stand for one host, or only one is reached by the loopback.
        HostError: versions differ.
    """
    hosts = [each.host for each in announced]
    names = [host.name for host in hosts]
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
    loops = [ipaddress.ip_address(host.address).is_loopback for host in hosts]
    if any(loops) and not all(loops):
        raise MeshUsageError(
            f"{names[loops.index(True)]} is reached by the loopback, which the other hosts cannot "
            "use: name it as they would, or use --interface"
        )


# Time limit of an agent's answer; a firewall that drops packets sends none.
_PROBE_S = 4.0
_TUNNEL_S = 10.0
# Pause before a broken forwarding is made again.
_PAUSE_S = 1.0


class Tunnel:
    """A port forwarding by ssh to an agent; made again when it breaks, until it is closed.

    Args:
        agent: the agent's host and endpoint.

    Attributes:
        endpoint: the forwarding's endpoint on this host.
    """

    def __init__(self, agent: Host) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._command = tunnel_command(agent, port)
        self._is_closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cellmesh-tunnel", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            with self._lock:
                if self._is_closed.is_set():
                    return
                self._process = process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            self._is_closed.wait(_PAUSE_S)

    def close(self) -> None:
        """End ssh's port forwarding to the agent."""
        self._is_closed.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        self._thread.join()


def tunnel_command(agent: Host, port: int) -> list[str]:
    """Return the ssh command that forwards a port of this host's loopback to an agent's port.

    It uses no shared connection (ControlMaster), on which the port would stay open after this
    command, in the way of the next.
    """
    return [
        *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none"),
        *("-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=3"),
        *("-L", f"127.0.0.1:{port}:{agent.endpoint.removeprefix('tcp://')}"),
        # `cat` ends with this process, whatever ends it: ssh -N would stay.
        *(agent.name, "cat"),
    ]


class Reach:
    """The routes from this process to agents: their own ports, or port forwardings by ssh.

    Args:
        may_forward: whether ssh reaches the hosts.
        report: shows the user a line that stays.
    """

    def __init__(self, may_forward: bool, report: Callable[[str], None]) -> None:
        self._may_forward, self._report = may_forward, report
        self._tunnels: list[Tunnel] = []

    def find(self, ticket: Ticket, agents: Sequence[Host]) -> tuple[list[Host], dict[int, str]]:
        """Find out how each agent can be reached now: at its own port, or through ssh. Blocks.

        Args:
            ticket: ticket of the mesh.
            agents: the agents.

        Returns:
            The agents with their routes, and index -> problem for agents that are out of reach.
        """
        found = [msgspec.structs.replace(agent, via="") for agent in agents]
        answering = ask_at(ticket, [(agent, agent.endpoint) for agent in found], _PROBE_S)
        problems = {
            index: f"{agent.endpoint} does not answer"
            for index, agent in enumerate(found)
            if agent not in answering
        }
        if not (problems and self._may_forward):
            return found, problems
        tunnels = {index: Tunnel(found[index]) for index in problems}
        self._tunnels += tunnels.values()
        ways = [(found[index], tunnel.endpoint) for index, tunnel in tunnels.items()]
        answering = ask_at(ticket, ways, _TUNNEL_S)
        for index, tunnel in tunnels.items():
            if found[index] in answering:
                found[index] = msgspec.structs.replace(found[index], via=tunnel.endpoint)
                self._report(describe_way(found[index]))
                del problems[index]
            else:
                self._end([tunnel])
                problems[index] += (
                    f"; ssh does not forward to it (no answer within {_TUNNEL_S:.0f} s)"
                )
        return found, problems

    def close(self) -> None:
        """End all port forwardings by ssh."""
        self._end(list(self._tunnels))

    def _end(self, tunnels: Sequence[Tunnel]) -> None:
        for tunnel in tunnels:
            self._tunnels.remove(tunnel)
            with contextlib.suppress(OSError):
                tunnel.close()


def unreached(agent: Host, problem: str) -> HostError:
    """Return the error to raise for an agent that runs but cannot be reached."""
    port = agent.endpoint.rpartition(":")[2]
    return HostError(
        f"{agent.name}: its agent runs, and cannot be reached: {problem}. Open TCP port {port} of "
        f"{agent.address} to this host (a start takes one of net.ipv4.ip_local_port_range), or "
        "name a network that is open: --interface"
    )


def describe_way(agent: Host) -> str:
    """Return a line for users on how an agent is reached: at its own port, or through ssh."""
    if agent.via:
        return f"{agent.name} is reached through ssh's forwarding: its own port is closed from here"
    return f"{agent.name} is reached at {agent.endpoint}"
