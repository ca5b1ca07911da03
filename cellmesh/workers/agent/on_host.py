"""The command ``cellmesh agent``: runs this host's agent of a mesh on many hosts, in a process that
a launcher (ssh, srun, torchrun) has started.

It derives the agent's own ticket from the given one, starts the agent in a session of its own, so
that a broken connection of the launcher does not end it, announces the agent's address, and waits
for the agent's end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import zmq

from ...errors import HostError
from ...wire import marks, transport
from ...wire.curve import new_keys
from ...wire.environment import SOCKET_INTERFACES, choose_gpus
from ...wire.host import (
    Process,
    Versions,
    describe_mismatch,
    is_process,
    own_python,
    own_torch,
    own_version,
    own_versions,
    this_place,
)
from ...wire.hosts import (
    AGAIN_S,
    ANNOUNCEMENT,
    ARRIVED,
    GO,
    ORDER,
    REFUSED,
    SAID,
    TICKET,
    Announcement,
    Host,
    HostFacts,
    HostPart,
    Invitation,
    address_towards,
    addresses_by_interface,
    job_of_host,
    name_of_host,
    number_of_host,
    own_facts,
    parse_invitation,
)
from ...wire.marks import end_carriers, end_mesh_if_dead, is_dead, value_of
from ...wire.own_file import from_json
from ...wire.process import absolute, isolated_command, wait_readable
from ...wire.ticket import (
    Ticket,
    find_tickets,
    make_directory,
    read_ticket,
    remove_directory,
    remove_own_directory,
    runtime_root,
    write_ticket,
)
from .guardian import READY

# How long to look for the notebook after this host's agent has ended: if the mesh has ended, there
# is no listener any more.
_ENDED_S = 5.0
# Longest text of an announced problem, in characters.
_MAX_PROBLEM = 600
# Variables that torchrun sets for its processes, besides TORCHELASTIC_*.
_ENGINES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
}


@dataclass(frozen=True)
class Lines:
    """The connection from ``cellmesh agent``, over its standard input and output, to the launcher
    in the notebook, which uses it until all hosts have started.

    Args:
        stdin: stream of the launcher's orders.
    """

    stdin: IO[bytes]

    def say(self, announcement: Announcement) -> None:
        """Send the launcher an announcement on one line of at most 1,024 bytes: srun splits longer
        lines, and may put parts of other hosts' lines in between.
        """
        if text := announcement.problem:
            if len(text) > _MAX_PROBLEM:
                text = f"{text[:150]} ... {text[150 - _MAX_PROBLEM :]}"
            announcement = Announcement(text, Host(name_of_host(os.environ)))
        sys.stdout.write(ANNOUNCEMENT + msgspec.json.encode(announcement).decode() + "\n")
        sys.stdout.flush()

    def hear(self, agent: int) -> bytes:
        """Wait for an order of the launcher; return b"" if the launcher or the agent has ended.

        Args:
            agent: a descriptor that is readable once the agent has ended.
        """
        ready = wait_readable([self.stdin.fileno(), agent])
        return b"" if agent in ready else self.stdin.readline()


# How long the guardian of a killed agent may take to remove the agent's directory.
_END_S, _LOOK_S = 5.0, 0.02


def run(text: bytes, stdin: IO[bytes], address: str = "", interface: str = "") -> int:
    """Start this host's agent from a ticket (a mesh's options) or an invitation (the address of a
    notebook that will send a ticket), and wait for the agent's end.

    Args:
        text: content of the ticket or of the invitation.
        stdin: stream on which the launcher reports that every host has started.
        address: address to bind and to give to other ranks; "" for that of the interface.
        interface: network interface; "" for that of the route to the notebook's host.

    Returns:
        The exit code.

    Raises:
        HostError: this host cannot join the mesh, or the text is neither ticket nor invitation.
    """
    if (invitation := parse_invitation(text)) is not None:
        return _join(invitation, address, interface)
    try:
        return _start(text, Lines(stdin), address, interface)
    except HostError:  # it has been announced
        return 1


def _join(invitation: Invitation, address: str, interface: str) -> int:
    """Offer this host to a mesh until the mesh ends; if an agent of the mesh already runs on the
    host, wait for that agent's end first.

    When one host is lost, TorchElastic restarts its processes on every host. Agents outlive that,
    so the restarted process waits for the end of the living agent.
    """
    facts = own_facts(os.environ)
    is_elastic = "TORCHELASTIC_RUN_ID" in os.environ
    for name in [name for name in os.environ if is_engines(name)]:
        del os.environ[name]  # the agent sets those of its ranks
    patience_s = None
    while True:
        living = _find_agent(invitation)
        if living is not None:
            _print(f"the agent of {living.name} on this host lives (process {living.agent_pid})")
            Process(living.agent_pid, living.agent_ticks).wait(None)
        else:
            visit = Visit(invitation, facts)
            try:
                text = visit.receive_ticket(patience_s)
                if text is None or _start(text, visit, address, interface, is_elastic) == 0:
                    return 0  # the mesh has ended
            except HostError as error:
                if patience_s is None or visit.has_ticket:
                    raise
                _print(str(error))  # the mesh and its listener have just ended
                return 0
            finally:
                visit.close()
        _print("the agent has ended")
        patience_s = _ENDED_S


def is_engines(name: str) -> bool:
    """Return whether an environment variable is one that torchrun sets for the processes that it
    starts.
    """
    return name in _ENGINES or name.startswith("TORCHELASTIC_")


def _find_agent(invitation: Invitation) -> Ticket | None:
    here = this_place()
    for ticket in find_tickets(runtime_root()):
        part = ticket.host
        if (
            part is not None
            and part.invited_by == invitation.public_key
            and ticket.place == here
            and is_process(ticket.agent_pid, ticket.agent_ticks)
        ):
            return ticket
    return None


def _decode(text: bytes) -> Ticket:
    try:
        content = json.loads(text)
        theirs = Versions(*(str(content.get(name, "")) for name in ("version", "python", "torch")))
    except (ValueError, AttributeError) as error:
        raise HostError(
            f"what was given is no ticket ({error}): copy all of its file, which is one line"
        ) from error
    by_host = {"the notebook": theirs, socket.gethostname(): own_versions()}
    if problem := describe_mismatch(by_host):
        raise HostError(f"{problem} ({sys.executable})")
    try:
        ticket = from_json(text, Ticket)
    except ValueError as error:
        raise HostError(
            f"what was given is no ticket of cellmesh {own_version()}: {error}"
        ) from error
    if ticket.parts:
        number = number_of_host(os.environ)
        if not 0 <= number < len(ticket.parts):
            raise HostError(
                f"the command that has started this agent numbers its host {number}, of "
                f"{len(ticket.parts)}: have it start one process a host, with CELLMESH_HOST_NUMBER "
                "from 0"
            )
        part = msgspec.structs.replace(ticket.parts[number], name=name_of_host(os.environ))
        ticket = msgspec.structs.replace(ticket, host=part, parts=())
    if ticket.host is None:
        raise HostError("the ticket is of a mesh on one host, which needs no `cellmesh agent`")
    return ticket


def _own_ticket(given: Ticket, address: str, interface: str) -> Ticket:
    """Make a directory for the mesh on this host, and write the ticket (the options) of this host's
    agent to a file in it.
    """
    assert given.host is not None
    is_chosen = bool(interface or given.interface)
    address, interface = choose_address(
        given.host, address, interface or given.interface, given.launch, os.environ
    )
    sockets = dict.fromkeys(SOCKET_INTERFACES, interface) if is_chosen else {}
    part = msgspec.structs.replace(given.host, address=address, interface=interface)
    visible = choose_gpus(given.gpus, os.environ)
    name = f"{given.name}-h{part.index}"
    if not part.joins:
        _remove_dead(runtime_root() / name)
    while part.joins and (runtime_root() / name).exists():
        if not _make_way(given, runtime_root() / name / "ticket.json", part):
            name += "r"  # the lost host's directory, on a file system that hosts share
    directory = make_directory(runtime_root(), name)
    # Agents must not import modules of the user in place of their own.
    users = {given.cwd, *given.roots}
    theirs = [path for path in absolute(given.sys_path) if os.path.isdir(path)]
    ticket = msgspec.structs.replace(
        given,
        directory=str(directory),
        host=part,
        curve_secret=new_keys().secret,
        place=this_place(),
        mark=os.urandom(8).hex(),
        python=own_python(),
        torch=own_torch(),
        env={**given.env, **sockets, **visible},
        cwd=given.cwd if os.path.isdir(given.cwd) else os.path.expanduser("~"),
        sys_path=tuple(
            dict.fromkeys([*(path for path in theirs if path not in users), *absolute(sys.path)])
        ),
        notebook_path=given.sys_path,
    )
    try:
        write_ticket(ticket)
    except HostError:  # the disk is full
        remove_directory(directory)
        raise
    return ticket


def _remove_dead(directory: Path) -> None:
    """Remove the directory that an earlier agent of this mesh has left on this host because it was
    killed, or the host restarted.

    Raises:
        HostError: the agent may be alive.
    """
    try:
        old = read_ticket(directory / "ticket.json")
    except HostError:  # none, or unreadable, which is reported where the new one is made
        return
    end_mesh_if_dead(old)
    if directory.exists():
        raise HostError(
            f"{directory} is in the way: the agent of another mesh of this name may live on "
            f"{old.place.host} (process {old.agent_pid}). `cellmesh ps` shows it there; or choose "
            "another --name"
        )


def _make_way(given: Ticket, path: Path, part: HostPart) -> bool:
    """Remove the directory and the processes of the mesh's previous agent on this host; return
    False if the ticket file at this path belongs to another mesh's agent or is not readable.

    Raises:
        HostError: the previous agent is alive, and is not to be replaced.
    """
    try:
        old = read_ticket(path)
    except HostError:
        return False
    is_here = old.host is not None and old.host.name == part.name and old.place == this_place()
    if old.key != given.key or not is_here:
        return False
    if not is_dead(old):
        if not part.replaces:
            raise HostError(
                f"its agent (process {old.agent_pid}) lives there, and is not heard. `%dist_heal` "
                f"takes its ranks back once it is heard; `%dist_heal --hosts {part.name}` gives "
                "them up"
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(old.agent_pid, signal.SIGKILL)
    end_carriers(value_of(old.mark))
    deadline = time.monotonic() + _END_S
    while path.exists() and time.monotonic() < deadline:  # the agent's guardian removes it
        time.sleep(_LOOK_S)
    return remove_own_directory(old) or not path.exists()


def _start(
    text: bytes, notebook: Lines | Visit, address: str, interface: str, outlives_this: bool = False
) -> int:
    """Start an agent and wait for its end; report the problem to the notebook if the agent cannot
    start.

    Args:
        text: content of its ticket.
        notebook: connection to the notebook, which lets the agent go once every host has started.
        address, interface: as for `run`.
        outlives_this: whether an agent that was let go continues when this process is ended.

    Returns:
        0 if the agent has exited with status 0.
    """
    try:
        guardian, ticket = _spawn(_own_ticket(_decode(text), address, interface))
    except HostError as error:
        notebook.say(Announcement(str(error)))
        raise
    notebook.say(
        Announcement(
            host=ticket.agents[0],
            place=ticket.place,
            versions=own_versions(),
            job=job_of_host(os.environ),
        )
    )
    if not _is_let_go(notebook, guardian):
        _end(guardian)
    elif outlives_this:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
    return guardian.wait()


def _spawn(ticket: Ticket) -> tuple[subprocess.Popen[bytes], Ticket]:
    """Start the guardian, which forks the agent; return the guardian's process, and the ticket with
    the values that the agent has added to it.
    """
    # Read the log by descriptor: an agent that does not start removes its directory.
    with open(ticket.logs / "agent.log", "a+b") as log:
        guardian = subprocess.Popen(
            isolated_command("cellmesh.workers.agent.guardian", str(ticket.path)),
            env={marks.VARIABLE: marks.free_value(), **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        assert guardian.stdout is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: _end(guardian))
        guardian.stdout.readline()  # skip the process numbers
        if guardian.stdout.readline() != READY:
            guardian.communicate()
            log.seek(0)
            cause = log.read().decode(errors="replace")[-2000:].strip()
            raise HostError(f"the agent did not start: {cause}")
    return guardian, read_ticket(ticket.path)


def _is_let_go(notebook: Lines | Visit, guardian: subprocess.Popen[bytes]) -> bool:
    """Wait for the notebook's permission for the agent to outlive this command; return False if the
    agent must end instead.
    """
    pidfd = os.pidfd_open(guardian.pid)
    try:
        if notebook.hear(pidfd) == GO:
            return True
        return bool(wait_readable([pidfd], 0))
    finally:
        os.close(pidfd)


def _end(guardian: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the agent and its guardian; the guardian ignores the signal, and exits after
    the agent.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guardian.pid, signal.SIGTERM)


def _print(text: str) -> None:
    print(f"cellmesh agent: {text}", file=sys.stderr, flush=True)


def choose_address(
    part: HostPart, address: str, interface: str, launch: str, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Choose the agent's address and network interface.

    Args:
        part: the host's part of the mesh, with addresses of the notebook's host.
        address, interface: choices of the user; "" for none.
        launch: command line that has started the agent; "" for ssh.
        environment: environment variables; sshd sets ``SSH_CONNECTION``.

    Raises:
        HostError: there is no such interface, or it has no address.
    """
    import psutil  # not for agents of meshes on one host

    by_interface = addresses_by_interface()
    if interface and not address:
        found = by_interface.get(interface, [])
        if not found:
            there = ", ".join(name for name, addresses in by_interface.items() if addresses)
            raise HostError(
                f"{socket.gethostname()} has no interface {interface} with an address ({there})"
            )
        if not psutil.net_if_stats()[interface].isup:
            raise HostError(f"interface {interface} of {socket.gethostname()} is down")
        return found[0], interface
    dialled = _dialled_by_ssh(launch, environment)
    if not any(dialled in addresses for addresses in by_interface.values()):
        dialled = ""
    chosen = address or dialled or _route_to(part.notebook)
    if ipaddress.ip_address(chosen).is_unspecified:
        raise HostError("an agent is not bound to every address: name one of this host")
    names = [name for name, addresses in by_interface.items() if chosen in addresses]
    if not names:
        raise HostError(f"{socket.gethostname()} has no interface with the address {chosen}")
    return chosen, names[0]


def _dialled_by_ssh(launch: str, environment: Mapping[str, str]) -> str:
    """Return the address of this host to which the notebook's ssh has connected; "" without ssh.

    Other launchers pass on the ``SSH_CONNECTION`` of the session in which they were started (srun
    that of a login node, for example), which does not describe the route to the notebook.
    """
    words = environment.get("SSH_CONNECTION", "").split()
    is_ssh = not launch or os.path.basename(launch.split()[0]) == "ssh"
    return words[2] if is_ssh and len(words) == 4 else ""


def _route_to(addresses: tuple[str, ...]) -> str:
    """Return this host's source address on the route to one of the given addresses; the loopback
    address if there is no route.

    A name may resolve to the loopback address here and to another host there, so loopback is the
    last choice.
    """
    for name in addresses:
        address = address_towards(name)
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


# Interval of reports that the notebook does not answer.
_SILENT_S = 10.0
_LINGER_MS = 500


class Visit:
    """A connection from this host to the listener in the notebook, by which the host joins a mesh.

    Args:
        invitation: invitation with the listener's endpoint and keys.
        facts: facts of this host, which are sent to the listener.

    Attributes:
        has_ticket: whether the notebook has sent a ticket.
    """

    def __init__(self, invitation: Invitation, facts: HostFacts) -> None:
        self._invitation = invitation
        self._facts = msgspec.json.encode(facts)
        self._context: zmq.Context[transport.Socket] = zmq.Context()
        self._socket, self._monitor = transport.connect_dealer(
            self._context,
            invitation.endpoint,
            b"H" + os.urandom(16),
            (invitation.secret, invitation.public_key),
        )
        self._is_connected = self.has_ticket = False

    def receive_ticket(self, patience_s: float | None = None) -> bytes | None:
        """Wait until the notebook sends the ticket of this host's agent.

        Args:
            patience_s: seconds to wait for the listener; None to wait without limit.

        Returns:
            The ticket; None if there is no listener.

        Raises:
            HostError: the notebook has refused this host.
        """
        began = said_at = time.monotonic()
        while (found := self._next()) is None or found[0] != TICKET:
            now = time.monotonic()
            if not self._is_connected and now - said_at > _SILENT_S:
                said_at = now
                _print(
                    f"{self._invitation.endpoint} does not answer: does the notebook run, and may "
                    "this host connect to it? Waiting for it"
                )
            if not self._is_connected and patience_s is not None and now - began > patience_s:
                return None
        self.has_ticket = True
        return found[1]

    def say(self, announcement: Announcement) -> None:
        """Send an announcement of the agent to the notebook."""
        self._send(SAID, msgspec.json.encode(announcement))

    def hear(self, agent: int) -> bytes:
        """Wait for an order of the notebook; return b"" if the notebook or the agent has ended.

        Args:
            agent: a descriptor that is readable once the agent has ended.
        """
        while True:
            try:
                found = self._next(agent)
            except HostError as error:
                _print(str(error))
                return b""
            if found is not None and found[0] == ORDER:
                return found[1]
            if (found is None and wait_readable([agent], 0)) or not self._is_connected:
                return b""

    def close(self) -> None:
        """Close the connection to the notebook, after a short time for sending the last message."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    def _next(self, *watched: int) -> tuple[bytes, bytes] | None:
        """Announce this host to the notebook, and wait about a second for its next message; return
        the message, or None.
        """
        self._hear_connection()
        if self._is_connected:
            self._send(ARRIVED, self._facts)
        if not transport.readable(self._socket):
            numbers = [int(each.getsockopt(zmq.FD)) for each in (self._socket, self._monitor)]
            wait_readable([*numbers, *watched], AGAIN_S)
            self._hear_connection()
            if not transport.readable(self._socket):
                return None
        word, text = map(bytes, transport.receive(self._socket))
        if word == REFUSED:
            raise HostError(text.decode(errors="replace"))
        return word, text

    def _hear_connection(self) -> None:
        for is_new in transport.hear_connection(self._monitor):
            if is_new:
                _print(f"announced to {self._invitation.endpoint}; waiting for the other hosts")
            self._is_connected = is_new

    def _send(self, word: bytes, text: bytes) -> None:
        transport.send(self._socket, [word, text])
