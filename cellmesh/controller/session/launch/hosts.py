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
import threading
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
# How long the agent that replaces a lost one may take.
_ATTACHED_START_S = 120.0


class HostAgents:
    """The launcher of one agent on each host.

    Args:
        ticket: of the mesh, in the notebook's runtime directory; it gets the agents' addresses. If
            it has them already, the agents were started by another process.
        hosts: on which agents are started.
        timeout_s: how long all of them may take.

    Attributes:
        ticket: with the agents' addresses, once they have started.
    """

    def __init__(
        self,
        ticket: Ticket,
        hosts: Sequence[HostEntry] = (),
        timeout_s: float = _ATTACHED_START_S,
    ) -> None:
        secret = ticket.curve_secret or new_keys().secret
        self.ticket = msgspec.structs.replace(ticket, curve_secret=secret)
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._never = -1

    def start(self) -> int:
        """Start all agents at once, and wait until each has announced itself.

        Returns:
            A descriptor that is never readable: the connections tell when all agents have ended.

        Raises:
            HostError: one could not be started; those that were have been ended.
        """
        if not self.ticket.agents:
            self._start_all()
        read_end, self._never = os.pipe()
        return read_end

    def _start_all(self) -> None:
        first = 0
        parts = []
        for index, host in enumerate(self._hosts):
            parts.append(self._part(index, len(self._hosts), host.name, first, host.num_ranks))
            first += host.num_ranks
        try:
            announced = self._start(parts)
            _check(self._hosts, announced, is_ssh=not self.ticket.launch)
            addresses = [each.address for each in announced if each.address is not None]
            self.ticket = msgspec.structs.replace(self.ticket, agents=tuple(addresses))
            write_ticket(self.ticket)
            self._let_go(self._processes)
        except BaseException:
            self._end(self._processes)
            self._processes = []
            remove_directory(Path(self.ticket.directory))
            if self.ticket.release_command:
                subprocess.run(self.ticket.release_command, capture_output=True)
            raise

    def start_again(self, index: int, name: str = "") -> None:
        """Start an agent in place of a lost one, and put its address into `ticket`. Blocks.

        Args:
            index: the host that is lost.
            name: the host to start it on; "" for the same one.

        Raises:
            HostError: it could not be started there.
        """
        lost = self.ticket.agents[index]
        part = msgspec.structs.replace(
            self._part(
                index, len(self.ticket.agents), name or lost.host, lost.first_rank, lost.num_ranks
            ),
            joins=True,
        )
        before = list(self._processes)
        self._processes = []
        try:
            (announced,) = self._start([part])
            self._let_go(self._processes)
        except BaseException:
            self._end(self._processes)
            self._processes = []
            raise
        finally:
            self._processes = [*before, *self._processes]
        assert announced.address is not None
        agents = list(self.ticket.agents)
        agents[index] = announced.address
        spares = tuple(spare for spare in self.ticket.spares if spare != name)
        self.ticket = msgspec.structs.replace(self.ticket, agents=tuple(agents), spares=spares)
        write_ticket(self.ticket)

    def _let_go(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Have agents go on, whatever becomes of this process or of the commands."""
        for process in processes:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.write(GO)
                process.stdin.flush()
            _close(process.stdin)
            _close(process.stdout)
            # The mesh may outlive the interest of this process in it.
            reaper = threading.Thread(target=process.wait, name="cellmesh-reaper", daemon=True)
            reaper.start()

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            _close(process.stdin)  # upon which an agent that waits for `GO` ends
        if not _await(processes, _KILL_S):
            self.signal(signal.SIGKILL)
            _await(processes, None)

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
            notebook=(socket.gethostname(), *_own_addresses()),
            release_command=self.ticket.release_command,
        )

    def _start(self, parts: Sequence[HostPart]) -> list[Announcement]:
        """Start the agents of some hosts at once, and wait for what they announce."""
        command = [sys.executable, "-m", "cellmesh", "agent", "--ticket", "-"]
        command += ["--interface", self.ticket.interface] if self.ticket.interface else []
        commands = [command_for(self.ticket.launch, part.name, command) for part in parts]
        for part, command in zip(parts, commands, strict=True):
            sent = msgspec.structs.replace(
                self.ticket, host=part, agents=(), spares=(), curve_secret=""
            )
            with open(_log_of(self.ticket.logs, part.index), "wb") as log:
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
                        f"{part.name}: cannot run {command[0]}: {error.strerror}"
                    ) from error
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended: its output says why
                process.stdin.write(json.dumps(msgspec.to_builtins(sent)).encode() + b"\n")
                process.stdin.flush()
        return self._hear_all(parts, commands)

    def _hear_all(
        self, parts: Sequence[HostPart], commands: Sequence[Sequence[str]]
    ) -> list[Announcement]:
        deadline = time.monotonic() + self._timeout_s
        heard: dict[int, Announcement] = {}
        texts = dict.fromkeys(range(len(parts)), b"")
        with selectors.DefaultSelector() as selector:
            for index, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, index)
            while len(heard) < len(parts):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = [part for i, part in enumerate(parts) if i not in heard]
                    raise HostError(
                        f"{', '.join(part.name for part in late)} did not answer within "
                        f"{self._timeout_s:.0f} s: "
                        f"{_end_of(_log_of(self.ticket.logs, late[0].index))}"
                    )
                for key, _ in ready:
                    index, name = key.data, parts[key.data].name
                    data = os.read(key.fd, 65536)
                    texts[index] += data
                    found = _find_announcement(texts[index])
                    if found is not None and found.problem:
                        raise HostError(f"{name}: {found.problem}")
                    if found is not None:
                        heard[index] = found
                        selector.unregister(key.fileobj)
                    elif not data:
                        status = self._processes[index].wait()
                        log = _end_of(_log_of(self.ticket.logs, parts[index].index))
                        said = log or texts[index].decode(errors="replace")[-2000:].strip()
                        raise HostError(_explain(name, commands[index][0], status, said))
        return [heard[index] for index in range(len(parts))]

    def poll(self) -> bool:
        """Whether any command that started an agent runs; it does as long as the agent."""
        return any(process.poll() is None for process in self._processes)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until all commands that started agents have ended; False if they have not."""
        if not _await(self._processes, timeout_s):
            return False
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
        return "agents on " + ", ".join(agent.host for agent in self.ticket.agents)


def _await(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None) -> bool:
    """Wait until processes have ended, and close what leads to them; False if they go on."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    for process in processes:
        _close(process.stdin)
        _close(process.stdout)
    return True


def _explain(name: str, program: str, status: int, said: str) -> str:
    hint = ""
    if status == 127 or "No such file" in said or "not found" in said:
        hint = f" (is cellmesh installed on {name} at {sys.executable}?)"
    elif "No module named" in said:
        hint = f" (install it on {name}: `{sys.executable} -m pip install cellmesh`)"
    return f"{name}: no agent was started ({program} exited with {status}): {said}{hint}"


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
