"""Finds a way from this process to each host's agent: straight to the agent's port, by a port of
this host that the agent connects to, or through ssh's own forwarding.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import zmq

from ....errors import CellmeshError, HostError
from ....wire import transport
from ....wire.descriptors import wait_readable
from ....wire.hosts import AgentAddress
from ....wire.rendezvous import own_addresses
from ....wire.secret import Secret
from .own_address import choose_own_address

# How long an agent may take to answer; a firewall that drops packets answers nothing.
_PROBE_S = 2.0
_TUNNEL_S = 10.0
# How long an agent that connects to this host may take to do so again.
_DIALED_S = 5.0
# How long a forwarding that broke is left before it is made again.
_PAUSE_S = 1.0


class Forwarding(Protocol):
    """What leads from a port of this host to an agent."""

    endpoint: str

    def close(self) -> None:
        """End it."""
        ...


class Tunnel:
    """ssh's forwarding to an agent's port; made again when it breaks, until it is closed.

    Args:
        agent: where it leads.

    Attributes:
        endpoint: of this host.
    """

    def __init__(self, agent: AgentAddress) -> None:
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
        """End ssh."""
        self._is_closed.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        self._thread.join()


def tunnel_command(agent: AgentAddress, port: int) -> list[str]:
    """Return the ssh command that forwards a port of this host's loopback to an agent's.

    It has a connection of its own: the port of a shared one (ControlMaster) would stay open after
    this command, and be in the way of the next.
    """
    return [
        *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none"),
        *("-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=3"),
        *("-L", f"127.0.0.1:{port}:{agent.endpoint.removeprefix('tcp://')}"),
        # `cat` ends with this process, whatever ends it: ssh -N would stay.
        *(agent.host, "cat"),
    ]


class Reach:
    """The ways from this process to agents.

    Args:
        secret: CURVE's secret key of controllers.
        own_address: this host's, as the user has chosen it; "" to choose it.
        may_forward: whether hosts are reached by ssh.
        report: shows a line that stays.
        forward: makes a forwarding to an agent.
    """

    def __init__(
        self,
        secret: Secret,
        own_address: str,
        may_forward: bool,
        report: Callable[[str], None],
        forward: Callable[[AgentAddress], Forwarding] = Tunnel,
    ) -> None:
        self._secret = secret
        self._own_address = own_address
        self._may_forward = may_forward
        self._report = report
        self._forward = forward
        self._forwardings: list[Forwarding] = []

    def find(
        self, agents: Sequence[AgentAddress], dial: Callable[[int, str], None]
    ) -> list[AgentAddress]:
        """Return agents that have just been started with the way by which each is reached. Blocks.

        Args:
            agents: one a host.
            dial: has an agent, by its place among them, connect to an endpoint of this host; raises
                `HostError` if it cannot.

        Raises:
            HostError: there is no way to one.
        """
        num_before = len(self._forwardings)
        found, problems = self._find_each(agents, dial)
        for index in problems:
            self._end(self._forwardings[num_before:])
            raise _unreached(agents[index], problems[index])
        self._show(found)
        return found

    def find_again(
        self, agents: Sequence[AgentAddress]
    ) -> tuple[list[AgentAddress], tuple[int, ...]]:
        """Return agents that were reached before with the way by which each is reached now, and
        the places of those that are not reached, as their hosts may be lost. Blocks.

        They cannot be asked any more to connect to this host: one that was before still does.

        Raises:
            HostError: none is reached.
        """
        found, problems = self._find_each(agents, None)
        if len(problems) == len(agents):
            raise _unreached(agents[0], problems[0])
        for index in problems:  # it may be heard again where it was
            agent = agents[index]
            found[index] = _straight(agent) if _why_not_here(agent) else agent
        self._show([agent for index, agent in enumerate(found) if index not in problems])
        return found, tuple(problems)

    def _find_each(
        self, agents: Sequence[AgentAddress], dial: Callable[[int, str], None] | None
    ) -> tuple[list[AgentAddress], dict[int, str]]:
        """Return agents with their ways, and why some, by their places, have none."""
        with ThreadPoolExecutor(max_workers=len(agents)) as pool:
            ways = list(
                pool.map(lambda at: self._find_one(at, agents[at], dial), range(len(agents)))
            )
        problems = {index: way for index, way in enumerate(ways) if isinstance(way, str)}
        found = [
            agent if isinstance(way, str) else way for agent, way in zip(agents, ways, strict=True)
        ]
        return found, problems

    def _show(self, found: Sequence[AgentAddress]) -> None:
        for line in describe_detours(found):
            self._report(line)

    def _find_one(
        self, index: int, agent: AgentAddress, dial: Callable[[int, str], None] | None
    ) -> AgentAddress | str:
        """Return an agent with the way by which it is reached, or why there is none."""
        if self._answers(straight := _straight(agent), _PROBE_S):
            return straight
        problems = [f"{agent.endpoint} does not answer"]
        for name, try_ in (
            (f"{agent.host} cannot connect to this host", self._notebook_way),
            ("ssh does not forward to it", self._ssh_way),
        ):
            try:
                return try_(index, agent, dial)
            except CellmeshError as error:
                problems.append(f"{name} ({error})")
        return "; ".join(problems)

    def _notebook_way(
        self, index: int, agent: AgentAddress, dial: Callable[[int, str], None] | None
    ) -> AgentAddress:
        if dial is None:
            if problem := _why_not_here(agent):
                raise HostError(problem)
            if not self._answers(agent, _DIALED_S):
                raise HostError(f"it has not connected to {agent.via} for {_DIALED_S:.0f} s")
            return agent
        address = choose_own_address(self._own_address)
        with socket.create_server((address, 0)) as listener:
            endpoint = f"tcp://{address}:{listener.getsockname()[1]}"
            dial(index, endpoint)
        return msgspec.structs.replace(agent, way="notebook", via=endpoint)

    def _ssh_way(
        self, index: int, agent: AgentAddress, dial: Callable[[int, str], None] | None
    ) -> AgentAddress:
        if not self._may_forward:
            raise HostError("it was not started by ssh")
        forwarding = self._forward(agent)
        reached = msgspec.structs.replace(agent, way="ssh", via=forwarding.endpoint)
        if not self._answers(reached, _TUNNEL_S):
            forwarding.close()
            raise HostError(f"no answer within {_TUNNEL_S:.0f} s")
        self._forwardings.append(forwarding)
        return reached

    def _answers(self, agent: AgentAddress, timeout_s: float) -> bool:
        """Whether an agent answers on its way, with its key; the connection is closed again."""
        context: zmq.Context[transport.Socket] = zmq.Context()
        keys = (self._secret, agent.public_key)
        dealer, monitor = transport.connect_dealer(
            context, agent.reached_at, b"P" + os.urandom(16), keys, agent.way == "notebook"
        )
        try:
            deadline = time.monotonic() + timeout_s
            while (left_s := deadline - time.monotonic()) > 0:
                wait_readable([int(monitor.getsockopt(zmq.FD))], min(left_s, 0.2))
                if any(transport.hear_connection(monitor)):
                    return True
            return False
        finally:
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=0)
            context.term()

    def forget(self, agents: Sequence[AgentAddress]) -> None:
        """End the forwardings to agents."""
        ways = {agent.via for agent in agents}
        self._end([each for each in self._forwardings if each.endpoint in ways])

    def close(self) -> None:
        """End the forwardings."""
        self._end(list(self._forwardings))

    def _end(self, forwardings: Sequence[Forwarding]) -> None:
        for forwarding in forwardings:
            self._forwardings.remove(forwarding)
            with contextlib.suppress(OSError):
                forwarding.close()


def _straight(agent: AgentAddress) -> AgentAddress:
    return msgspec.structs.replace(agent, way="agent", via="")


def describe_detours(agents: Sequence[AgentAddress]) -> list[str]:
    """Say by which way each agent is reached that is not reached straight."""
    return [describe_way(agent) for agent in agents if agent.way != "agent"]


def _why_not_here(agent: AgentAddress) -> str:
    """Return why an agent that was started before does not connect to this host; "" if it may."""
    address, _, port = agent.via.removeprefix("tcp://").rpartition(":")
    if agent.way != "notebook" or address not in own_addresses():
        return "it connects to the host of the notebook that has started it"
    try:
        socket.create_server((address, int(port))).close()
    except OSError:
        return f"another process of this host has {agent.via}"
    return ""


def _unreached(agent: AgentAddress, problem: str) -> HostError:
    return HostError(
        f"{agent.host}: its agent runs, and cannot be reached: {problem}. "
        "Open one of these ways in the firewall, or choose --interface or --address"
    )


def describe_way(agent: AgentAddress) -> str:
    """Say by which way an agent is reached."""
    if agent.way == "notebook":
        return f"{agent.host} connects to this host ({agent.via}): its own port is closed from here"
    if agent.way == "ssh":
        return f"{agent.host} is reached through ssh's forwarding: no other way is open"
    return f"{agent.host} is reached at {agent.endpoint}"
