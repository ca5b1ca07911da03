"""Starts an agent on each of many hosts, by ssh or any command that runs another there."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from ....errors import HostError, MeshUsageError
from ....wire.curve import new_keys, public_of
from ....wire.hosts import ANNOUNCEMENT, GO, Announcement, HostPart
from ....wire.ticket import Ticket, remove_directory, write_ticket
from ...host_list import HostEntry, command_for

# How long the agents of hosts may take to end after a kill of what started them.
_KILL_S = 15.0


class HostAgents:
    """The launcher of one agent on each host.

    Args:
        ticket: of the mesh, in the notebook's runtime directory; it gets the agents' addresses.
        hosts: on which agents are started.
        template: the command line that starts them (`command_for`); "" for ssh.
        interface: the hosts' network interface; "" for that of the route to this host.
        timeout_s: how long all of them may take.

    Attributes:
        ticket: with the agents' addresses, once they have started.
    """

    def __init__(
        self,
        ticket: Ticket,
        hosts: Sequence[HostEntry],
        template: str,
        interface: str,
        timeout_s: float,
    ) -> None:
        self.ticket = msgspec.structs.replace(ticket, curve_secret=new_keys().secret)
        self._hosts = hosts
        self._timeout_s = timeout_s
        command = [sys.executable, "-m", "cellmesh", "agent", "--ticket", "-"]
        command += ["--interface", interface] if interface else []
        self._commands = [command_for(template, host.name, command) for host in hosts]
        self._is_ssh = not template
        self._processes: list[subprocess.Popen[bytes]] = []
        self._never = -1

    def start(self) -> int:
        """Start all agents at once, and wait until each has announced itself.

        Returns:
            A descriptor that is never readable: the connections tell when all agents have ended.

        Raises:
            HostError: one could not be started; those that were have been ended.
        """
        try:
            announced = self._start_all()
            _check(self._hosts, announced, self._is_ssh)
            addresses = [each.address for each in announced if each.address is not None]
            self.ticket = msgspec.structs.replace(self.ticket, agents=tuple(addresses))
            write_ticket(self.ticket)
            for process in self._processes:
                with contextlib.suppress(OSError):
                    assert process.stdin is not None
                    process.stdin.write(GO)
                    process.stdin.flush()
        except BaseException:
            for process in self._processes:
                _close(process.stdin)  # upon which an agent that waits for `GO` ends
            if not self.wait(_KILL_S):
                self.signal(signal.SIGKILL)
                self.wait(None)
            remove_directory(Path(self.ticket.directory))
            raise
        read_end, self._never = os.pipe()
        return read_end

    def _start_all(self) -> list[Announcement]:
        first = 0
        logs = self.ticket.logs
        notebook = (socket.gethostname(), *_own_addresses())
        for index, (host, command) in enumerate(zip(self._hosts, self._commands, strict=True)):
            part = HostPart(
                index=index,
                num_hosts=len(self._hosts),
                name=host.name,
                first_rank=first,
                num_ranks=host.num_ranks,
                controller_key=public_of(self.ticket.curve_secret),
                notebook=notebook,
            )
            first += host.num_ranks
            sent = msgspec.structs.replace(self.ticket, host=part, curve_secret="")
            with open(_log_of(logs, index), "wb") as log:
                try:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                    )
                except OSError as error:
                    raise HostError(
                        f"{host.name}: cannot run {command[0]}: {error.strerror}"
                    ) from error
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended: its output says why
                process.stdin.write(json.dumps(msgspec.to_builtins(sent)).encode() + b"\n")
                process.stdin.flush()
        return self._hear_all(logs)

    def _hear_all(self, logs: Path) -> list[Announcement]:
        deadline = time.monotonic() + self._timeout_s
        heard: dict[int, Announcement] = {}
        texts = dict.fromkeys(range(len(self._hosts)), b"")
        with selectors.DefaultSelector() as selector:
            for index, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, index)
            while len(heard) < len(self._hosts):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = [host.name for i, host in enumerate(self._hosts) if i not in heard]
                    raise HostError(
                        f"{', '.join(late)} did not answer within {self._timeout_s:.0f} s: "
                        f"{_end_of(_log_of(logs, min(texts.keys() - heard.keys())))}"
                    )
                for key, _ in ready:
                    index, name = key.data, self._hosts[key.data].name
                    data = os.read(key.fd, 65536)
                    texts[index] += data
                    found = _find_announcement(texts[index])
                    if found is not None and found.problem:
                        raise HostError(f"{name}: {found.problem}")
                    if found is not None:
                        heard[index] = found
                        selector.unregister(key.fileobj)
                    elif not data:
                        raise HostError(self._explain_end(index, texts[index], logs))
        return [heard[index] for index in range(len(self._hosts))]

    def _explain_end(self, index: int, output: bytes, logs: Path) -> str:
        status = self._processes[index].wait()
        said = _end_of(_log_of(logs, index)) or output.decode(errors="replace")[-2000:].strip()
        name, program = self._hosts[index].name, self._commands[index][0]
        hint = ""
        if status == 127 or "No such file" in said or "not found" in said:
            hint = f" (is cellmesh installed on {name} at {sys.executable}?)"
        elif "No module named" in said:
            hint = f" (install it on {name}: `{sys.executable} -m pip install cellmesh`)"
        return f"{name}: no agent was started ({program} exited with {status}): {said}{hint}"

    def poll(self) -> bool:
        """Whether any command that started an agent runs; it does as long as the agent."""
        return any(process.poll() is None for process in self._processes)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all commands that started agents have ended; False if they have not."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for process in self._processes:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                process.wait(left)
            except subprocess.TimeoutExpired:
                return False
        for process in self._processes:
            _close(process.stdin)
            _close(process.stdout)
        if self._never >= 0:
            os.close(self._never)
            self._never = -1
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the commands that started agents."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def describe(self) -> str:
        """Name the hosts."""
        return "agents on " + ", ".join(host.name for host in self._hosts)


class FoundHosts:
    """The launcher of agents on hosts that another process has started.

    Args:
        ticket: with their addresses.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._never = -1

    def start(self) -> int:
        """Return a descriptor that is never readable, as of `HostAgents.start`."""
        read_end, self._never = os.pipe()
        return read_end

    def poll(self) -> bool:
        """Whether the agents run is known by their connections only."""
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """Return at once: the connections have said that the agents end."""
        if self._never >= 0:
            os.close(self._never)
            self._never = -1
        return True

    def signal(self, number: int) -> None:
        """Do nothing: the agents are processes of other hosts."""

    def describe(self) -> str:
        """Name the hosts."""
        return "agents on " + ", ".join(agent.host for agent in self._ticket.agents)


def _check(hosts: Sequence[HostEntry], announced: Sequence[Announcement], is_ssh: bool) -> None:
    """Check that the hosts are different ones that can reach each other.

    Raises:
        MeshUsageError: two names stand for one host, or one is reached by the loopback only.
    """
    names: dict[object, str] = {}
    for host, each in zip(hosts, announced, strict=True):
        if is_ssh and each.place in names:
            raise MeshUsageError(
                f"{names[each.place]} and {host.name} are one host: name it once, with all its "
                "ranks"
            )
        names[each.place] = host.name
    loops = {
        host.name: ipaddress.ip_address(each.address.address).is_loopback
        for host, each in zip(hosts, announced, strict=True)
        if each.address is not None
    }
    if any(loops.values()) and not all(loops.values()):
        name = next(name for name, is_loop in loops.items() if is_loop)
        raise MeshUsageError(
            f"{name} is reached by the loopback, which the other hosts cannot use: name it as they "
            "would, or use --interface"
        )


def _find_announcement(output: bytes) -> Announcement | None:
    for line in output.splitlines(keepends=True):
        if line.startswith(ANNOUNCEMENT.encode()) and line.endswith(b"\n"):
            return msgspec.json.decode(line[len(ANNOUNCEMENT) :], type=Announcement)
    return None


def _own_addresses() -> list[str]:
    import psutil  # only where there are other hosts

    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET
    ]
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def _log_of(logs: Path, index: int) -> Path:
    return logs / f"agent{index}.log"


def _end_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-2000:].strip()
    except OSError:
        return ""


def _close(file: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        if file is not None:
            file.close()
