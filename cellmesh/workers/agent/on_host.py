"""Runs this host's agent of a mesh on many hosts, for the engine that has started the process:
``cellmesh agent``.

It makes the agent's own ticket of the one that it was given, starts the agent in a session of its
own, so that the loss of the engine's connection costs nothing, says where the agent is reached, and
stays as long as the agent does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

import msgspec

from ...errors import HostError
from ...wire.curve import new_keys
from ...wire.environment import choose_gpus, gpus_of
from ...wire.host import fits, own_python, own_torch, own_version, same_release, this_place
from ...wire.hosts import ANNOUNCEMENT, GO, Announcement, HostPart
from ...wire.interpreter import absolute, isolated_command
from ...wire.ticket import Ticket, make_directory, read_ticket, runtime_root, write_ticket
from .guardian import READY


def run(text: bytes, stdin: IO[bytes] | None, address: str = "", interface: str = "") -> int:
    """Start the agent of a ticket, and wait for its end.

    Args:
        text: of the ticket.
        stdin: where the launcher says that every host has started; None if nothing is said.
        address: to bind, and for other ranks; "" for that of the interface.
        interface: the network interface; "" for that of the route to the notebook's host.

    Returns:
        The exit code.
    """
    try:
        given = _decode(text)
        ticket = _own_ticket(given, address, interface)
        return _supervise(ticket, stdin)
    except HostError as error:
        _say(Announcement(problem=str(error)))
        return 1


def _decode(text: bytes) -> Ticket:
    try:
        content = json.loads(text)
        versions = {name: str(content.get(name, "")) for name in ("version", "python", "torch")}
    except (ValueError, AttributeError) as error:
        raise HostError(f"what was given is no ticket: {error}") from error
    for what, theirs, own, agrees in (
        ("cellmesh", versions["version"], own_version(), versions["version"] == own_version()),
        ("Python", versions["python"], own_python(), fits(versions["python"], own_python())),
        ("torch", versions["torch"], own_torch(), same_release(versions["torch"], own_torch())),
    ):
        if not agrees:
            raise HostError(
                f"{socket.gethostname()} has {what} {own or '(none)'}, and the notebook {theirs}: "
                f"install the same version on both ({sys.executable})"
            )
    try:
        ticket = msgspec.convert(content, Ticket)
    except msgspec.MsgspecError as error:
        raise HostError(
            f"what was given is no ticket of cellmesh {own_version()}: {error}"
        ) from error
    if ticket.host is None:
        raise HostError("the ticket is of a mesh on one host, which needs no `cellmesh agent`")
    return ticket


def _own_ticket(given: Ticket, address: str, interface: str) -> Ticket:
    """Make a directory for the mesh on this host, and write the agent's own ticket there."""
    assert given.host is not None
    address, interface = choose_address(given.host, address, interface, os.environ)
    part = msgspec.structs.replace(given.host, address=address, interface=interface)
    visible = choose_gpus(gpus_of(given.gpus, part.name), os.environ)
    directory = make_directory(runtime_root(), f"{given.name}-h{part.index}")
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
        env={**given.env, **visible},
        cwd=given.cwd if os.path.isdir(given.cwd) else os.path.expanduser("~"),
        sys_path=tuple(dict.fromkeys([*theirs, *absolute(sys.path)])),
    )
    write_ticket(ticket)
    return ticket


def choose_address(
    part: HostPart, address: str, interface: str, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Choose the address of the agent and its interface.

    Args:
        part: says where the notebook's host is.
        address, interface: as the user has chosen; "" for none.
        environment: may have ``SSH_CONNECTION`` of sshd.

    Raises:
        HostError: there is no such interface, or it has no address.
    """
    import psutil  # not for agents of meshes on one host

    by_interface = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
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
    ssh = environment.get("SSH_CONNECTION", "").split()
    chosen = address or (ssh[2] if len(ssh) == 4 else "") or _route_to(part.notebook)
    if ipaddress.ip_address(chosen).is_unspecified:
        raise HostError("an agent is not bound to every address: name one of this host")
    names = [name for name, addresses in by_interface.items() if chosen in addresses]
    if not names:
        raise HostError(f"{socket.gethostname()} has no interface with the address {chosen}")
    return chosen, names[0]


def _route_to(addresses: tuple[str, ...]) -> str:
    for name in addresses:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((name, 9))  # no packet is sent: the kernel looks up the route
            return str(way.getsockname()[0])
    return "127.0.0.1"


def _supervise(ticket: Ticket, stdin: IO[bytes] | None) -> int:
    with open(ticket.logs / "agent.log", "ab") as log:
        guardian = subprocess.Popen(
            isolated_command("cellmesh.workers.agent.guardian", str(ticket.path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert guardian.stdout is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end(guardian))
    guardian.stdout.readline()  # the processes' numbers
    if guardian.stdout.readline() != READY:
        guardian.wait()
        text = (ticket.logs / "agent.log").read_text(errors="replace")[-2000:].strip()
        raise HostError(f"the agent did not start: {text}")
    signed = read_ticket(ticket.path)
    _say(
        Announcement(address=signed.agents[0], place=signed.place, pid=signed.agent_pid),
    )
    if stdin is not None and not _hears_go(stdin, guardian):
        _end(guardian)
    status = guardian.wait()
    if ticket.host is not None and ticket.host.release_command:
        subprocess.run(ticket.host.release_command, capture_output=True)
    return status


def _hears_go(stdin: IO[bytes], guardian: subprocess.Popen[bytes]) -> bool:
    """Wait until the launcher says that every host has started; False if it ends before."""
    pidfd = os.pidfd_open(guardian.pid)
    try:
        ready, _, _ = select.select([stdin.fileno(), pidfd], [], [])
        return pidfd in ready or stdin.readline() == GO
    finally:
        os.close(pidfd)


def _end(guardian: subprocess.Popen[bytes]) -> None:
    """End the agent in an orderly way; its guardian, which ends after it, ignores the signal."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guardian.pid, signal.SIGTERM)


def _say(announcement: Announcement) -> None:
    sys.stdout.write(ANNOUNCEMENT + msgspec.json.encode(announcement).decode() + "\n")
    sys.stdout.flush()
