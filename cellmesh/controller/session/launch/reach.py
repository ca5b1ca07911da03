"""Finds a way from this process to each host's agent: straight to the agent's port, or through
ssh's own forwarding.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

import msgspec

from ....errors import HostError
from ....wire.hosts import Host
from ....wire.ticket import Ticket
from ..standing import ask_at

# How long an agent may take to answer; a firewall that drops packets answers nothing.
_PROBE_S = 2.0
_TUNNEL_S = 10.0
# How long a forwarding that broke is left before it is made again.
_PAUSE_S = 1.0


class Tunnel:
    """ssh's forwarding to an agent's port; made again when it breaks, until it is closed.

    Args:
        agent: where it leads.

    Attributes:
        endpoint: of this host.
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
        """End ssh."""
        self._is_closed.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        self._thread.join()


def tunnel_command(agent: Host, port: int) -> list[str]:
    """Return the ssh command that forwards a port of this host's loopback to an agent's.

    It has a connection of its own: the port of a shared one (ControlMaster) would stay open after
    this command, and be in the way of the next.
    """
    return [
        *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlPath=none"),
        *("-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=3"),
        *("-L", f"127.0.0.1:{port}:{agent.endpoint.removeprefix('tcp://')}"),
        # `cat` ends with this process, whatever ends it: ssh -N would stay.
        *(agent.name, "cat"),
    ]


class Reach:
    """The ways from this process to agents.

    Args:
        may_forward: whether hosts are reached by ssh.
        report: shows a line that stays.
    """

    def __init__(self, may_forward: bool, report: Callable[[str], None]) -> None:
        self._may_forward, self._report = may_forward, report
        self._tunnels: list[Tunnel] = []

    def find(self, ticket: Ticket, agents: Sequence[Host]) -> tuple[list[Host], dict[int, str]]:
        """Return agents with the way by which each is reached now, and why some, by their places,
        are not reached. Blocks.
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

    def forget(self, agents: Sequence[Host]) -> None:
        """End the forwardings to agents."""
        ways = {agent.via for agent in agents}
        self._end([each for each in self._tunnels if each.endpoint in ways])

    def close(self) -> None:
        """End the forwardings."""
        self._end(list(self._tunnels))

    def _end(self, tunnels: Sequence[Tunnel]) -> None:
        for tunnel in tunnels:
            self._tunnels.remove(tunnel)
            with contextlib.suppress(OSError):
                tunnel.close()


def describe_detours(agents: Sequence[Host]) -> list[str]:
    """Say by which way each agent is reached that is not reached straight."""
    return [describe_way(agent) for agent in agents if agent.via]


def unreached(agent: Host, problem: str) -> HostError:
    """Return the error to raise for an agent that runs and is needed, and is not reached."""
    port = agent.endpoint.rpartition(":")[2]
    return HostError(
        f"{agent.name}: its agent runs, and cannot be reached: {problem}. Open TCP port {port} of "
        f"{agent.address} to this host (a start takes one of net.ipv4.ip_local_port_range), or "
        "name a network that is open: --interface"
    )


def describe_way(agent: Host) -> str:
    """Say by which way an agent is reached."""
    if agent.via:
        return f"{agent.name} is reached through ssh's forwarding: its own port is closed from here"
    return f"{agent.name} is reached at {agent.endpoint}"
