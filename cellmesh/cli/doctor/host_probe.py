"""Answers questions about one of many hosts, in a process that is started there as an agent would
be: ``python -m cellmesh.cli.doctor.host_probe``.

A question is a line of JSON on standard input, and its answer a line on standard output that
begins with `MARK`, as login scripts print too.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Literal

import msgspec

from ...errors import HostError
from ...wire.host import Place, this_place
from ...wire.hosts import HostPart
from ...wire.versions import Versions, own_versions
from ...workers.agent.own_address import choose_address
from .facts import Facts, gather

MARK = "cellmesh-doctor: "
_CONNECT_S = 3.0


class Look(msgspec.Struct, frozen=True, tag=True):
    """Ask a host for its facts (`HostFacts`).

    Attributes:
        num_ranks: that are meant to run there.
        notebook: addresses of the notebook's host.
        launch: the command line that has started this process; "" for ssh.
        interface: that the user has named; "" for none.
        cwd: the notebook's directory.
        marker: a file in it; "" if none could be made.
    """

    num_ranks: int
    notebook: tuple[str, ...]
    launch: str
    interface: str
    cwd: str
    marker: str


class Peer(msgspec.Struct, frozen=True):
    """A host's name, and where it accepts a connection."""

    name: str
    address: str
    port: int


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Ask a host to connect to others (`Reached`)."""

    peers: tuple[Peer, ...]


class Reached(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Reach`: name of a host -> why it was not reached."""

    failures: Mapping[str, str]


class ReadClock(msgspec.Struct, frozen=True, tag=True):
    """Ask for the host's system clock (`ClockReading`); `sent_s` is the asking host's."""

    sent_s: float


class ClockReading(msgspec.Struct, frozen=True, tag=True):
    """Answer to `ReadClock`."""

    sent_s: float
    host_s: float


class HostFacts(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Look`.

    Attributes:
        host_name: as the host calls itself.
        place: which host it is.
        versions: of its packages.
        address, interface: that an agent would use.
        address_error: why there is none.
        port: on which it accepts a connection there; 0 for none.
        folder: whether the notebook's directory is there: the same one, another one of that name,
            or none.
        facts: of the host by itself.
    """

    host_name: str
    place: Place
    versions: Versions
    address: str
    interface: str
    address_error: str
    port: int
    folder: Literal["shared", "other", "none"]
    facts: Facts


Question = Look | Reach | ReadClock
Answer = HostFacts | Reached | ClockReading


def reach(peers: tuple[Peer, ...]) -> dict[str, str]:
    """Connect to other hosts; return the name of each that was not reached, and why."""
    failures = {}
    for peer in peers:
        try:
            socket.create_connection((peer.address, peer.port), timeout=_CONNECT_S).close()
        except OSError as error:
            failures[peer.name] = error.strerror or str(error)
    return failures


def listen(address: str) -> socket.socket:
    """Return a socket on any port of an address; its kernel accepts connections."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _look(question: Look) -> tuple[HostFacts, socket.socket | None]:
    address = interface = error = ""
    server = None
    part = HostPart(0, 1, "", 0, question.num_ranks, "", notebook=question.notebook)
    try:
        address, interface = choose_address(
            part, "", question.interface, question.launch, os.environ
        )
        server = listen(address)
    except (HostError, OSError) as failure:
        error = str(failure)
    folder: Literal["shared", "other", "none"] = "none"
    if os.path.isdir(question.cwd):
        folder = "shared" if os.path.exists(question.marker) else "other"
    facts = HostFacts(
        host_name=socket.gethostname(),
        place=this_place(),
        versions=own_versions(),
        address=address,
        interface=interface,
        address_error=error,
        port=server.getsockname()[1] if server is not None else 0,
        folder=folder,
        facts=gather(question.num_ranks, False, lambda text: None),
    )
    return facts, server


def main() -> None:
    """Answer questions until standard input ends."""
    servers = []
    for line in iter(sys.stdin.buffer.readline, b""):
        question = msgspec.json.decode(line, type=Question)
        answer: Answer
        if isinstance(question, ReadClock):
            answer = ClockReading(question.sent_s, time.time())
        elif isinstance(question, Reach):
            answer = Reached(reach(question.peers))
        else:
            answer, server = _look(question)
            servers.append(server)
        sys.stdout.write(MARK + msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
