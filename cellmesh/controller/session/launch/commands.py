"""Starts agents on hosts by commands of this process: ssh, srun, or any that runs another there.

A command starts the agent of one host, or, where the hosts are not known before, the agents of all.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from ....errors import HostError
from ....wire.descriptors import FILES_A_HOST, limit_child, make_room
from ....wire.hosts import ANNOUNCEMENT, GO, WAITING, Announcement, HostPart
from ....wire.own_file import Secret, SecretBytes, to_json
from ....wire.ticket import Ticket
from ...engines import ENGINES, template_for
from ...host_list import command_for, has_stdin
from .host_failure import explain

# How long the agents of hosts may take to end after a kill of what started them.
_KILL_S = 15.0
# The error output of a command that starts the agents of all hosts, among a mesh's logs.
ALL_LOG = "agents.log"
# How often the state of an engine's queue is asked for, and how long the answer may take.
_ASK_S, _ANSWER_S = 2.0, 5.0


@dataclass(eq=False)
class _Command:
    """A command that starts agents, with its output as far as it is not read.

    Attributes:
        name: of the host; of the engine, if the command starts the agents of all hosts.
        launch: its template.
        num_hosts: of which it starts the agents; 0 for the one that was named to it.
        queue: the command that prints the state of its job; () if there is none.
        output: the beginning of its next line.
        text: its lines that are no messages of cellmesh's.
    """

    name: str
    launch: str
    process: subprocess.Popen[bytes]
    log: Path
    num_hosts: int = 0
    queue: tuple[str, ...] = ()
    output: bytes = b""
    text: str = ""
    announced: list[Announcement] = field(default_factory=list)

    def read(self, data: bytes) -> str:
        """Take in output: announcements, and what the command waits for, which is returned; "" if
        nothing. The output of login scripts is left out.
        """
        waits = ""
        *lines, self.output = (self.output + data).split(b"\n")
        for line in lines:
            if line.startswith(ANNOUNCEMENT.encode()):
                text = line[len(ANNOUNCEMENT) :]
                self.announced.append(msgspec.json.decode(text, type=Announcement))
            elif line.startswith(WAITING.encode()):
                waits = line[len(WAITING) :].decode(errors="replace")
            else:
                self.text += line.decode(errors="replace") + "\n"
        return waits

    @property
    def is_complete(self) -> bool:
        """Whether each of its agents has announced itself, or one has a problem."""
        return len(self.announced) >= max(1, self.num_hosts) or bool(self.problem)

    @property
    def problem(self) -> str:
        """The problem that an agent has announced; "" if there is none."""
        found = [each for each in self.announced if each.problem]
        if not found:
            return ""
        host = found[0].host if self.num_hosts else ""
        return f"{host or self.name}: {found[0].problem}"

    def in_order(self) -> list[Announcement]:
        """Return what its agents have announced, in the order of their ranks."""
        return sorted(
            self.announced, key=lambda each: each.address.first_rank if each.address else 0
        )

    def ask_queue(self) -> str:
        """Return the state of its job while the job waits for nodes; "" if it does not."""
        if not self.queue or self.announced:
            return ""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(self.queue, capture_output=True, text=True, timeout=_ANSWER_S)
            job, state, *why = done.stdout.split() or ("", "")
            if state in ("PENDING", "CONFIGURING"):
                return f"job {job}: {state.lower()} ({' '.join(why)})"
        return ""

    def explain_end(self) -> str:
        """Say how the command ended, and why."""
        status = self.process.wait()
        said = _end_of(self.log) or self.text[-2000:].strip()
        return explain(self.name, self.launch, sys.executable, status, said)


@dataclass(eq=False)
class HostCommands:
    """Runs commands, each of which stays for as long as the agents that it has started.

    Attributes:
        first: the template of the command that starts the agents of all hosts; "" where each host
            has a command of its own.
        report: shows what is waited for.
    """

    first: str = ""
    report: Callable[[str], None] = lambda text: None
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
        sent = msgspec.structs.replace(ticket, agents=(), replaced=(), curve_secret=Secret(""))
        soft = make_room(FILES_A_HOST * len(parts))
        try:
            if parts[0].name:
                template = template_for(ticket.launch, ticket.job)
                if template and template == self.first:
                    raise HostError("its command line starts the agents of all hosts")
                for part in parts:
                    own = msgspec.structs.replace(sent, host=part)
                    self._run(own, part.name, template, f"agent{part.index}.log", soft, files)
            else:
                all_ = msgspec.structs.replace(sent, parts=tuple(parts))
                name = ticket.launch if ticket.launch in ENGINES else f"{len(parts)} hosts"
                self._run(all_, name, self.first, ALL_LOG, soft, files)
            announced = self._hear(self._starting, timeout_s, failures)
        finally:
            for file in files:
                file.unlink(missing_ok=True)
        for place in sorted(failures or (), reverse=True):
            self.drop(place)
        return announced

    def _run(
        self, ticket: Ticket, name: str, template: str, log: str, soft: int, files: list[Path]
    ) -> None:
        """Run a command; add to `files` the file that it reads the ticket from."""
        text = SecretBytes(to_json(ticket) + b"\n")
        path = None
        if not has_stdin(template):
            path = _write_file(text)
            files.append(path)
        command = _agent_command(ticket, path)
        argv = command_for(template, name, command, str(path), ticket.name)
        with open(ticket.logs / log, "wb") as errors:
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE if path is None else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise HostError(f"{name}: cannot run {argv[0]}: {error.strerror}") from error
        limit_child(process.pid, soft)
        started = _Command(name, template, process, ticket.logs / log)
        if ticket.parts:
            started.num_hosts = len(ticket.parts)
            words = ENGINES[ticket.launch].queue if ticket.launch in ENGINES else ()
            started.queue = tuple(word.replace("{mesh}", ticket.name) for word in words)
        self._starting.append(started)
        _write(process, text)

    def _hear(
        self,
        commands: Sequence[_Command],
        timeout_s: float,
        failures: dict[int, HostError] | None = None,
    ) -> list[Announcement]:
        """Wait until the agents that each command starts have announced themselves, or one has
        failed. The time does not run while a command waits for nodes.
        """
        deadline = time.monotonic() + timeout_s
        heard: dict[int, list[Announcement]] = {}
        failed = {} if failures is None else failures
        with selectors.DefaultSelector() as selector:
            for index, command in enumerate(commands):
                assert command.process.stdout is not None
                selector.register(command.process.stdout, selectors.EVENT_READ, index)
            while selector.get_map():
                if failed and failures is None:  # all are needed
                    raise next(iter(failed.values()))
                left_s = max(0.0, deadline - time.monotonic())
                asks = any(command.queue and not command.announced for command in commands)
                ready = selector.select(min(left_s, _ASK_S) if asks else left_s)
                waits = (
                    [] if ready else [text for text in map(_Command.ask_queue, commands) if text]
                )
                for key, _ in ready:
                    command = commands[key.data]
                    data = os.read(key.fd, 65536)
                    if text := command.read(data):
                        waits.append(text)
                    if not command.is_complete and data:
                        continue
                    selector.unregister(key.fileobj)
                    if command.problem:
                        failed[key.data] = HostError(command.problem)
                    elif not command.is_complete:
                        failed[key.data] = HostError(command.explain_end())
                    else:
                        heard[key.data] = command.in_order()
                if waits:
                    deadline = time.monotonic() + timeout_s
                    self.report(waits[-1])
                if not ready and time.monotonic() >= deadline:
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
        if failed and failures is None:
            raise next(iter(failed.values()))
        return [each for index in sorted(heard) for each in heard[index]]

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

    @property
    def _all(self) -> list[_Command]:
        return [*self._starting, *self._released]

    def poll(self) -> bool:
        """As `Starter.poll`."""
        return any(command.process.poll() is None for command in self._all)

    def wait(self, timeout_s: float | None) -> bool:
        """As `Starter.wait`."""
        return _await(self._all, timeout_s)

    def signal(self, number: int) -> None:
        """As `Starter.signal`."""
        _signal(self._all, number)

    def leave(self) -> None:
        """As `Starter.leave`: what is open closes with the commands."""


def describe_job_end(ticket: Ticket, host: str) -> str:
    """Return what an engine has printed of the end of its job, or of the loss of a host; "" if
    nothing, or on another host than the one that has started the mesh.
    """
    if ticket.launch != "slurm":
        return ""
    ends = rf"error: (\*\*\* .* \*\*\*|Node failure on {host})$"
    said = re.findall(ends, _end_of(ticket.logs / ALL_LOG), re.MULTILINE)
    return f"Slurm: {said[-1]} (`scontrol show job {ticket.job}`)" if said else ""


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
        if command.process.stdin is None or command.ask_queue():
            _signal([command], signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _await(commands, _KILL_S):
            return
        _signal(commands, number)
    _await(commands, None)


def _signal(commands: Sequence[_Command], number: int) -> None:
    for command in commands:
        if command.process.poll() is None:
            # One that is killed does not give its nodes back.
            is_kept = command.num_hosts and number == signal.SIGKILL
            command.process.send_signal(signal.SIGTERM if is_kept else number)


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
