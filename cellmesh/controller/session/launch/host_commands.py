"""Starts agents on hosts by commands of this process: ssh, srun, or any that runs another there."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from ....errors import HostError
from ....wire.descriptors import FILES_A_HOST, limit_child, make_room
from ....wire.hosts import ANNOUNCEMENT, GO, Announcement, HostPart
from ....wire.own_file import Secret, SecretBytes, to_json
from ....wire.ticket import Ticket
from ...host_list import command_for, has_stdin
from .host_failure import explain

# How long the agents of hosts may take to end after a kill of what started them.
_KILL_S = 15.0


@dataclass(eq=False)
class _Command:
    """A command that starts an agent, with what it has printed and nobody has read."""

    name: str
    launch: str
    process: subprocess.Popen[bytes]
    log: Path
    output: bytes = b""

    def take_announcement(self) -> Announcement | None:
        """Return the next announcement in the output; what login scripts print is left out."""
        *lines, rest = self.output.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(ANNOUNCEMENT.encode()):
                self.output = b"\n".join([*lines[number + 1 :], rest])
                return msgspec.json.decode(line[len(ANNOUNCEMENT) :], type=Announcement)
        return None

    def explain_end(self) -> str:
        """Say how the command ended, and why."""
        status = self.process.wait()
        said = _end_of(self.log) or self.output.decode(errors="replace")[-2000:].strip()
        return explain(self.name, self.launch, sys.executable, status, said)


@dataclass(eq=False)
class HostCommands:
    """Runs one command for each host, which stays for as long as the host's agent does."""

    _starting: list[_Command] = field(default_factory=list)
    _released: list[_Command] = field(default_factory=list)

    def start(
        self,
        ticket: Ticket,
        parts: Sequence[HostPart],
        timeout_s: float,
        failures: dict[int, HostError] | None = None,
    ) -> list[Announcement]:
        """As `Starter.start`."""
        self._starting = []
        files: list[Path] = []  # that hold the mesh's key
        try:
            self._run(ticket, parts, files)
            heard = self._hear(self._starting, timeout_s, failures)
        finally:
            for file in files:
                file.unlink(missing_ok=True)
        for place in sorted(failures or (), reverse=True):
            self.drop(place)
        return heard

    def _run(self, ticket: Ticket, parts: Sequence[HostPart], files: list[Path]) -> None:
        """Run a command for each host; add to `files` what they read the ticket from."""
        soft = make_room(FILES_A_HOST * len(parts))
        for part in parts:
            sent = msgspec.structs.replace(
                ticket, host=part, agents=(), replaced=(), curve_secret=Secret("")
            )
            text = SecretBytes(to_json(sent) + b"\n")
            path = None
            if not has_stdin(ticket.launch):
                path = _write_file(text)
                files.append(path)
            argv = command_for(ticket.launch, part.name, _agent_command(ticket, path), str(path))
            log_path = ticket.logs / f"agent{part.index}.log"
            with open(log_path, "wb") as log:
                try:
                    process = subprocess.Popen(
                        argv,
                        stdin=subprocess.PIPE if path is None else subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                    )
                except OSError as error:
                    raise HostError(
                        f"{part.name}: cannot run {argv[0]}: {error.strerror}"
                    ) from error
            limit_child(process.pid, soft)
            self._starting.append(_Command(part.name, ticket.launch, process, log_path))
            _write(process, text)

    def _hear(
        self,
        commands: Sequence[_Command],
        timeout_s: float,
        failures: dict[int, HostError] | None = None,
    ) -> list[Announcement]:
        """Wait until the agent that each command started has announced itself, or has failed."""
        deadline = time.monotonic() + timeout_s
        heard: dict[int, Announcement] = {}
        failed = {} if failures is None else failures
        with selectors.DefaultSelector() as selector:
            for index, command in enumerate(commands):
                assert command.process.stdout is not None
                selector.register(command.process.stdout, selectors.EVENT_READ, index)
            while selector.get_map():
                if failed and failures is None:  # all are needed
                    raise next(iter(failed.values()))
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(key.data for key in selector.get_map().values())
                    together = [late] if failures is None else [[index] for index in late]
                    for indexes in together:
                        names = ", ".join(commands[index].name for index in indexes)
                        said = _end_of(commands[indexes[0]].log) or (
                            f"{commands[indexes[0]].name} has printed nothing"
                        )
                        text = f"{names} did not answer within {timeout_s:.0f} s: {said}"
                        failed.update(dict.fromkeys(indexes, HostError(text)))
                    break
                for key, _ in ready:
                    command = commands[key.data]
                    data = os.read(key.fd, 65536)
                    command.output += data
                    found = command.take_announcement()
                    if found is None and data:
                        continue
                    selector.unregister(key.fileobj)
                    if found is None:
                        failed[key.data] = HostError(command.explain_end())
                    elif found.problem:
                        failed[key.data] = HostError(f"{command.name}: {found.problem}")
                    else:
                        heard[key.data] = found
        if failed and failures is None:
            raise next(iter(failed.values()))
        return [heard[index] for index in sorted(heard)]

    def drop(self, index: int) -> None:
        """As `Starter.drop`."""
        _end([self._starting.pop(index)])

    def let_go(self) -> None:
        """As `Starter.let_go`."""
        for command in self._starting:
            process = command.process
            _write(process, GO)
            _close(process.stdin)
            _close(process.stdout)
            # The mesh may outlive the interest of this process in it.
            reaper = threading.Thread(target=process.wait, name="cellmesh-reaper", daemon=True)
            reaper.start()
        self._released += self._starting
        self._starting = []

    def end(self) -> None:
        """As `Starter.end`."""
        starting, self._starting = self._starting, []
        _end(starting)

    def poll(self) -> bool:
        """As `Starter.poll`."""
        return any(command.process.poll() is None for command in self._released)

    def wait(self, timeout_s: float | None) -> bool:
        """As `Starter.wait`."""
        return _await(self._released, timeout_s)

    def signal(self, number: int) -> None:
        """As `Starter.signal`."""
        _signal(self._released, number)

    def leave(self) -> None:
        """As `Starter.leave`: what is open closes with the commands."""


def _agent_command(ticket: Ticket, path: Path | None) -> list[str]:
    given = ["-"] if path is None else [str(path), "--remove"]
    interface = ["--interface", ticket.interface] if ticket.interface else []
    return [sys.executable, "-m", "cellmesh", "agent", "--ticket", *given, *interface]


def _write_file(text: SecretBytes) -> Path:
    descriptor, path = tempfile.mkstemp(prefix="cellmesh-", suffix=".json")  # mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    return Path(path)


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    if process.stdin is None:  # it has its ticket in a file, and waits for no order
        return
    with contextlib.suppress(OSError):  # it has ended: its output says why
        process.stdin.write(line)
        process.stdin.flush()


def _end(commands: Sequence[_Command]) -> None:
    for command in commands:
        _close(command.process.stdin)  # upon which an agent that waits for `GO` ends
        if command.process.stdin is None and command.process.poll() is None:
            command.process.terminate()
    if not _await(commands, _KILL_S):
        _signal(commands, signal.SIGKILL)
        _await(commands, None)


def _signal(commands: Sequence[_Command], number: int) -> None:
    for command in commands:
        if command.process.poll() is None:
            command.process.send_signal(number)


def _await(commands: Sequence[_Command], timeout_s: float | None) -> bool:
    """Wait until processes have ended, and close what leads to them; False if they go on."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for command in commands:
        try:
            command.process.wait(
                None if deadline is None else max(0.0, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired:
            return False
    for command in commands:
        _close(command.process.stdin)
        _close(command.process.stdout)
    return True


def _end_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-2000:].strip()
    except OSError:
        return ""


def _close(file: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        if file is not None:
            file.close()
