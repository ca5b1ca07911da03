"""Starts agents on hosts by commands on this machine: ssh, srun, or any command that runs another
command on a host.

A command starts the agent of one host or, if an engine chooses the hosts, the agents of all.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from ....errors import HostError
from ....wire.hosts import ANNOUNCEMENT, GO, WAITING, Announcement, HostPart
from ....wire.own_file import Secret, SecretBytes, to_json
from ....wire.process import FILES_A_HOST, limit_child, make_room
from ....wire.ticket import Ticket
from ...engines import ENGINES, template_for
from ...host_list import command_for
from .local import end_of

_AGENT = (sys.executable, "-m", "cellmesh", "agent", "--ticket", "-")
# How long commands and their agents may take to end before the next signal is sent.
_KILL_S = 15.0
# The error output of a command that starts the agents of all hosts, among a mesh's logs.
ALL_LOG = "agents.log"
# Interval between queries of the state of an engine's queue, and time limit of an answer.
_ASK_S, _ANSWER_S = 2.0, 5.0


@dataclass(eq=False)
class _Command:
    """A running command that starts agents, and its output.

    Attributes:
        parts: parts of the mesh whose agents it starts: one for a named host, else all.
        launch: template of its command line.
        name: name of the host; of the engine, if the command starts the agents of all hosts.
        log: file of its error output.
        queue: command that prints the state of its job; () for none.
        process: its process.
        problem: why its agents do not start; "" while they may.
        output: the unfinished last line of its output.
        text: lines of its output that are not messages of cellmesh.
        announced: announcements of its agents so far.
    """

    parts: Sequence[HostPart]
    launch: str
    name: str
    log: Path
    queue: tuple[str, ...]
    process: subprocess.Popen[bytes]
    problem: str = ""
    output: bytes = b""
    text: str = ""
    announced: list[Announcement] = field(default_factory=list)

    @property
    def is_for_all(self) -> bool:
        """Whether the command starts the agents of all hosts."""
        return not self.parts[0].name

    def read(self) -> str:
        """Read new output of the command with announcements of its agents; return the resources
        that the command waits for, "" for none.

        Output of login scripts is skipped.
        """
        assert self.process.stdout is not None
        data, waits = os.read(self.process.stdout.fileno(), 65536), ""
        *lines, self.output = (self.output + data).split(b"\n")
        for line in lines:
            if line.startswith(ANNOUNCEMENT.encode()):
                each = msgspec.json.decode(line[len(ANNOUNCEMENT) :], type=Announcement)
                self.announced.append(each)
                if each.problem:
                    host = each.host.name if self.is_for_all else ""
                    self.problem = self.problem or f"{host or self.name}: {each.problem}"
            elif line.startswith(WAITING.encode()):
                waits = line[len(WAITING) :].decode(errors="replace")
            else:
                self.text += line.decode(errors="replace") + "\n"
        if not data and not self.is_complete:
            said = end_of(self.log) or self.text[-2000:].strip()
            status = self.process.wait()
            self.problem = explain(self.name, self.launch, sys.executable, status, said)
        return waits

    @property
    def is_complete(self) -> bool:
        """Whether all agents of the command have announced themselves, or one has a problem."""
        return len(self.announced) >= len(self.parts) or bool(self.problem)

    def results(self) -> list[Announcement]:
        """Return the announcements of the command's agents, in the order of their ranks."""
        if self.problem:
            return [Announcement(self.problem)] * len(self.parts)
        return sorted(self.announced, key=lambda each: each.host.first_rank)

    def ask_queue(self) -> str:
        """Ask the scheduler's queue for the state of the command's job; return it if the job waits
        for nodes, else "".
        """
        if not self.queue or self.announced:
            return ""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(self.queue, capture_output=True, text=True, timeout=_ANSWER_S)
            job, state, *why = done.stdout.split() or ("", "")
            if state in ("PENDING", "CONFIGURING"):
                return f"job {job}: {state.lower()} ({' '.join(why)})"
        return ""


@dataclass(eq=False)
class HostCommands:
    """Runs commands that start agents; each command runs for as long as its agents.

    Attributes:
        first: template of the command that starts the agents of all hosts; "" if each host has a
            command of its own.
        report: shows the user a line on the resources that commands wait for.
    """

    first: str = ""
    report: Callable[[str], None] = lambda text: None
    _starting: list[_Command] = field(default_factory=list)
    _released: list[_Command] = field(default_factory=list)

    def prepare(self, ticket: Ticket) -> Ticket:
        """Return the ticket unchanged; `InvitedHosts.prepare` adds an invitation."""
        return ticket

    def start(
        self, ticket: Ticket, parts: Sequence[HostPart], timeout_s: float, needs_all: bool = True
    ) -> list[Announcement]:
        """Start the agents of several hosts at once, and wait for their announcements.

        Args:
            ticket: ticket of controllers; each agent gets one of its own.
            parts: parts of the mesh, one for each agent.
            timeout_s: time limit for all agents in seconds, without the time in which commands
                wait for nodes.
            needs_all: whether an agent that cannot start ends the wait for the others.

        Returns:
            The announcements in the order of the parts; some may have a problem.

        Raises:
            HostError: no command can be run.
        """
        is_named = bool(parts[0].name)
        template = template_for(ticket.launch, ticket.job) if is_named else self.first
        if is_named and template and template == self.first:
            raise HostError("its command line starts the agents of all hosts")
        sent = msgspec.structs.replace(ticket, agents=(), replaced=(), curve_secret=Secret(""))
        soft = make_room(FILES_A_HOST * len(parts))
        self._starting = []
        for own in [[part] for part in parts] if is_named else [parts]:
            self._run(sent, own, template, soft)
        self._hear(timeout_s, needs_all)
        return [each for command in self._starting for each in command.results()]

    def _run(self, ticket: Ticket, parts: Sequence[HostPart], template: str, soft: int) -> None:
        """Run the command that starts the agents of these hosts (`HostPart`)."""
        name, queue = parts[0].name, tuple[str, ...]()
        if name:
            own, log = msgspec.structs.replace(ticket, host=parts[0]), f"agent{parts[0].index}.log"
        else:
            own, log = msgspec.structs.replace(ticket, parts=tuple(parts)), ALL_LOG
            name = f"{len(parts)} hosts"
            if ticket.launch in ENGINES:
                name, words = ticket.launch, ENGINES[ticket.launch].queue
                queue = tuple(word.replace("{mesh}", ticket.name) for word in words)
        argv = command_for(template, name, _AGENT, ticket.name)
        log_path = ticket.logs / log
        try:
            with open(log_path, "wb") as errors:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
        except OSError as error:
            raise HostError(f"{name}: cannot run {argv[0]}: {error.strerror}") from error
        self._starting.append(_Command(parts, template, name, log_path, queue, process))
        limit_child(process.pid, soft)
        _write(process, SecretBytes(to_json(own) + b"\n"))

    def _hear(self, timeout_s: float, needs_all: bool) -> None:
        """Read the commands' output until all agents have announced themselves, or the time is
        over.
        """
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for command in self._starting:
                assert command.process.stdout is not None
                selector.register(command.process.stdout, selectors.EVENT_READ, command)
            while left := [key.data for key in selector.get_map().values()]:
                if needs_all and any(command.problem for command in self._starting):
                    return
                left_s = max(0.0, deadline - time.monotonic())
                asks = any(command.queue and not command.announced for command in left)
                ready = selector.select(min(left_s, _ASK_S) if asks else left_s)
                waits = [key.data.read() for key, _ in ready] or [c.ask_queue() for c in left]
                for key, _ in ready:
                    if key.data.is_complete:
                        selector.unregister(key.fileobj)
                if any(waits):
                    deadline = time.monotonic() + timeout_s
                    self.report([text for text in waits if text][-1])
                elif not ready and time.monotonic() >= deadline:
                    names = ", ".join(command.name for command in left)
                    for command in left:
                        said = end_of(command.log) or f"{command.name} has printed nothing"
                        command.problem = f"{names} did not answer within {timeout_s:.0f} s: {said}"
                    return

    def drop(self, index: int) -> None:
        """End the agent of one host, which the last `start` has started.

        Args:
            index: index of its host.
        """
        dropped = [command for command in self._starting if command.parts[0].index == index]
        self._starting = [command for command in self._starting if command not in dropped]
        _end(dropped)

    def let_go(self) -> None:
        """Let the agents that the last `start` has started run on, even if this process or their
        commands end.
        """
        for command in self._starting:
            process = command.process
            _write(process, GO)
            _close(process.stdin)
            _close(process.stdout)
            # The mesh may outlive its use by this process.
            reaper = threading.Thread(target=process.wait, name="cellmesh-reaper", daemon=True)
            reaper.start()
        self._released += self._starting
        self._starting = []

    def end(self) -> None:
        """End the agents that the last `start` has started, unless `let_go` was called for them."""
        starting, self._starting = self._starting, []
        _end(starting)

    @property
    def _all(self) -> list[_Command]:
        return [*self._starting, *self._released]

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the commands that have started agents end; return False if one exceeds the
        time limit.
        """
        return _await(self._all, timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal to the commands that have started agents."""
        _signal(self._all, number)

    def leave(self) -> None:
        """Do nothing, as the pipes to commands are closed when the commands end."""


def describe_job_end(ticket: Ticket, host: str) -> str:
    """Return Slurm's message on the end of the mesh's job or the loss of a host; "" without a
    message, and on a machine that has not started the mesh.
    """
    if ticket.launch != "slurm":
        return ""
    ends = rf"error: (\*\*\* .* \*\*\*|Node failure on {host})$"
    said = re.findall(ends, end_of(ticket.logs / ALL_LOG), re.MULTILINE)
    return f"Slurm: {said[-1]} (`scontrol show job {ticket.job}`)" if said else ""


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended: its output has the reason
        process.stdin.write(line)
        process.stdin.flush()


def _end(commands: Sequence[_Command]) -> None:
    for command in commands:
        _close(command.process.stdin)  # an agent that waits for `GO` then ends
        if command.ask_queue():
            _signal([command], signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _await(commands, _KILL_S):
            return
        _signal(commands, number)
    _await(commands, None)


def _signal(commands: Sequence[_Command], number: int) -> None:
    for command in commands:
        if command.process.poll() is None:
            # A killed command would not give its nodes back.
            is_kept = command.is_for_all and number == signal.SIGKILL
            command.process.send_signal(signal.SIGTERM if is_kept else number)


def _await(commands: Sequence[_Command], timeout_s: float | None) -> bool:
    """Wait until commands end, and close their pipes; return False at the time limit."""
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


def _close(file: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        if file is not None:
            file.close()


# Error messages of ssh, engines' commands, shells and Python (patterns), each with its meaning and
# remedy. A pattern is specific enough to match without the program's name, as behind sudo or a
# script.
_KNOWN = r"""
ssh: Could not resolve hostname
    the name does not resolve. Next: write it as DNS, /etc/hosts or ~/.ssh/config have it; {ssh}
Host key verification failed
    the host's key is not known, or another one than before. Next: connect by hand once (`ssh
    {name}`) and compare the key
Permission denied \((?:publickey|password|keyboard|gssapi|hostbased)
Too many authentication failures
    the host refuses your key. Next: `ssh-copy-id {name}`, or load the key with `ssh-add`; {ssh}
ssh: connect to host .*Connection refused
open failed: connect failed: Connection refused
    nothing listens on the host's ssh port. Next: start sshd there, or name the port in
    ~/.ssh/config; {ssh}
ssh: connect to host .*(?:timed out|No route to host|Network is unreachable)
timed out during banner exchange
    the host is not reached. Next: see that it runs, and that no firewall is between; {ssh}
Unable to allocate resources: Requested nodes are busy
    Slurm has not given the nodes in time. Next: ask for less, or wait longer (srun's --immediate);
    `squeue` shows who has them
error: (?:Unable to allocate resources|Job submit/allocate failed)
    Slurm refuses the job. Next: `sinfo` lists partitions, limits and nodes
No module named '?cellmesh\b
    its Python has no cellmesh. Next: is cellmesh installed on {name}? There: `{python} -m pip
    install cellmesh`
No module named '?(\w+)
    its Python lacks a package. Next: on {name}: `{python} -m pip install {found}`
No space left on device|Disk quota exceeded
    its disk is full. Next: free some space on {name}; `df -h` there says where
"""
_CAUSES: list[tuple[str, ...]] = [
    (patterns.strip().replace("\n", "|"), *" ".join(words.split()).split(". Next: "))
    for patterns, words in re.findall(r"((?:^\S.*\n)+)((?:^    .*\n)+)", _KNOWN, re.MULTILINE)
]


def explain(name: str, launch: str, python: str, status: int, said: str) -> str:
    """Return the error text for a host on which no agent was started: the cause and a remedy.

    Args:
        name: name of the host.
        launch: template of the command line that starts an agent; "" for ssh.
        python: path of the interpreter in the command.
        status: exit code of the command.
        said: output of the command.
    """
    text, remedy = _find_cause(name, launch, python, status, said)
    program = command_for(launch, name, ())[0]
    output = f": {said}" if said else ""
    ended = f"no agent was started, {program} exited with {status}"
    cause = f"{text} ({ended})" if text else ended
    return f"{name}: {cause}{output}. Next: {remedy}"


def _find_cause(name: str, launch: str, python: str, status: int, said: str) -> tuple[str, str]:
    """Return the cause of an agent's failed start, or "" if it is unknown, and a remedy."""
    for pattern, text, remedy in _CAUSES:
        found = re.search(pattern, said)
        if found is not None:
            word = next((group for group in found.groups() if group), "")
            ssh = f"`ssh {name} true` must work without a question"
            return text, remedy.format(name=name, python=python, found=word, ssh=ssh)
    if status == 127 or python in said:
        return (
            "the notebook's Python is not there",
            f"is cellmesh installed on {name}? There must be a {python}, as in the notebook",
        )
    return "", f"try by hand: `{command_to_try(name, launch, python)}`"


def command_to_try(name: str, launch: str, python: str) -> str:
    """Return a command line for users that tests whether an agent can be started on a host; it
    needs no ticket.
    """
    if "ray_driver" in launch:  # the reservation that it runs in has been given back
        return "ray status"
    outside = re.sub(r"^srun --jobid=\d+ ", "srun ", launch)  # of a job that may have ended
    return shlex.join(command_for(outside, name, [python, "-m", "cellmesh", "--version"]))
