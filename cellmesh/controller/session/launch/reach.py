"""Finds a way from this process to each host's agent: straight to the agent's port, or through
ssh's own forwarding.
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
from ....wire.own_file import Secret

# How long an agent may take to answer; a firewall that drops packets answers nothing.
_PROBE_S = 2.0
_TUNNEL_S = 10.0
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
        may_forward: whether hosts are reached by ssh.
        report: shows a line that stays.
        forward: makes a forwarding to an agent.
    """

    def __init__(
        self,
        secret: Secret,
        may_forward: bool,
        report: Callable[[str], None],
        forward: Callable[[AgentAddress], Forwarding] = Tunnel,
    ) -> None:
        self._secret = secret
        self._may_forward = may_forward
        self._report = report
        self._forward = forward
        self._forwardings: list[Forwarding] = []

    def find(self, agents: Sequence[AgentAddress]) -> list[AgentAddress]:
        """Return agents that have just been started with the way by which each is reached. Blocks.

        Raises:
            HostError: there is no way to one.
        """
        num_before = len(self._forwardings)
        found, problems = self._find_each(agents)
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

        Raises:
            HostError: none is reached.
        """
        found, problems = self._find_each(agents)
        if len(problems) == len(agents):
            raise _unreached(agents[0], problems[0])
        for index in problems:  # it may be heard again where it was
            found[index] = _straight(agents[index])
        self._show([agent for index, agent in enumerate(found) if index not in problems])
        return found, tuple(problems)

    def _find_each(
        self, agents: Sequence[AgentAddress]
    ) -> tuple[list[AgentAddress], dict[int, str]]:
        """Return agents with their ways, and why some, by their places, have none."""
        with ThreadPoolExecutor(max_workers=len(agents)) as pool:
            ways = list(pool.map(self._find_one, agents))
        problems = {index: way for index, way in enumerate(ways) if isinstance(way, str)}
        found = [
            agent if isinstance(way, str) else way for agent, way in zip(agents, ways, strict=True)
        ]
        return found, problems

    def _show(self, found: Sequence[AgentAddress]) -> None:
        for line in describe_detours(found):
            self._report(line)

    def _find_one(self, agent: AgentAddress) -> AgentAddress | str:
        """Return an agent with the way by which it is reached, or why there is none."""
        if self._answers(straight := _straight(agent), _PROBE_S):
            return straight
        problem = f"{agent.endpoint} does not answer"
        if not self._may_forward:
            return problem
        try:
            return self._ssh_way(agent)
        except CellmeshError as error:
            return f"{problem}; ssh does not forward to it ({error})"

    def _ssh_way(self, agent: AgentAddress) -> AgentAddress:
        forwarding = self._forward(agent)
        reached = msgspec.structs.replace(agent, via=forwarding.endpoint)
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
            context, agent.reached_at, b"P" + os.urandom(16), keys
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
    return msgspec.structs.replace(agent, via="")


def describe_detours(agents: Sequence[AgentAddress]) -> list[str]:
    """Say by which way each agent is reached that is not reached straight."""
    return [describe_way(agent) for agent in agents if agent.via]


def _unreached(agent: AgentAddress, problem: str) -> HostError:
    port = agent.endpoint.rpartition(":")[2]
    return HostError(
        f"{agent.host}: its agent runs, and cannot be reached: {problem}. Open TCP port {port} of "
        f"{agent.address} to this host (a start takes one of net.ipv4.ip_local_port_range), or "
        "name a network that is open: --interface"
    )


def describe_way(agent: AgentAddress) -> str:
    """Say by which way an agent is reached."""
    if agent.via:
        return f"{agent.host} is reached through ssh's forwarding: its own port is closed from here"
    return f"{agent.host} is reached at {agent.endpoint}"
