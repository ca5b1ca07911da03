"""Meshes on many hosts: what each host's agent runs, where controllers reach it, and what it
announces when it has started; the messages by which the user's modules get there.

A host that an engine, or a person, has started without a ticket of its own connects to the
notebook's listener (`Invitation`) by TCP, with CURVE. Each message is a word and a text::

    host -> notebook    arrived    `HostFacts`; once a second until the agent is let go
                        said       `Announcement`
    notebook -> host    ticket     the agent's ticket
                        order      a line, such as `GO`
                        refused    why, for a person

The files beside the notebook have one name, the hash of all their contents (`name_of`). The
controller sends agents an archive (`PlaceFiles`), which leads from the files of one name to those
of another; each agent answers with the name of the files that its host has then (`FilesAnswer`).
Files are bytes on their way: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..errors import HostError
from .host import Place, Versions, host_name, this_place
from .own_file import Secret, from_json
from .verb import Verb

# An agent's announcement is the line of its output that begins so; what login scripts print comes
# before it.
ANNOUNCEMENT = "cellmesh-agent: "
# What a command that gets nodes waits for; a line of its output.
WAITING = "cellmesh-waiting: "
# What the launcher writes to an agent's standard input once the mesh is ready.
GO = b"go\n"
# Both ends of a connection send a heartbeat this often, and each closes the connection when it has
# received nothing for `SILENT_S`: a loss is reported within the sum, and once more the interval
# where heartbeats still arrive from a host that hears none.
HEARTBEAT_S = 0.3
SILENT_S = 1.7
# How long a host may then be without a connection before its ranks count as lost.
HOST_LEASE_S = 10.0


class ReadClock(Verb, frozen=True):
    """Ask an agent for its host's clock (`ClockReading`); `sent_s` is the asking host's."""

    sent_s: float


class ClockReading(Verb, frozen=True):
    """Answer to `ReadClock`: `host_s` is the host's monotonic clock."""

    sent_s: float
    host_s: float


class HostPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one agent of a mesh on many hosts runs.

    Attributes:
        index: the host's place among the mesh's hosts.
        num_hosts: of the mesh.
        name: the host, as the user named it; "" where it names itself.
        first_rank: the lowest of its ranks, which are consecutive.
        num_ranks: on this host.
        controller_key: CURVE's public key of the controllers that the agent accepts (Z85).
        notebook: addresses of the notebook's host, to which a route is chosen.
        address: the agent's own, for controllers and other ranks; "" until the agent has chosen it.
        interface: the network interface that has the address.
        joins: the mesh is ready, and the agent takes the place of one that is lost: its ranks are
            forked when the controller asks for them.
        replaces: an agent of the mesh that is still there, and is not heard, is ended.
        invited_by: public key of the listener that the host has announced itself to; "" where the
            notebook has started the agent.
        start_timeout_s: how long the mesh's hosts may take to start, which the agent waits for.
    """

    index: int
    num_hosts: int
    name: str
    first_rank: int
    num_ranks: int
    controller_key: str
    notebook: tuple[str, ...] = ()
    address: str = ""
    interface: str = ""
    joins: bool = False
    replaces: bool = False
    invited_by: str = ""
    start_timeout_s: float = 120.0


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One host of a mesh, and where controllers reach its agent.

    Attributes:
        name: as the user named it; "" for one that names itself, or for this machine alone.
        endpoint: of its agent, ``tcp://address:port``; "" until that has started.
        public_key: CURVE's, of the agent (Z85).
        first_rank, num_ranks: the ranks that it runs.
        via: the endpoint of ssh's forwarding to the agent on the controller's host; "" without.
    """

    name: str
    endpoint: str = ""
    public_key: str = ""
    first_rank: int = 0
    num_ranks: int = 0
    via: str = ""

    @property
    def reached_at(self) -> str:
        """Where this process meets the agent."""
        return self.via or self.endpoint

    @property
    def address(self) -> str:
        """The agent's address, without the port."""
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the agent runs."""
        return tuple(range(self.first_rank, self.first_rank + self.num_ranks))


class Announcement(msgspec.Struct, frozen=True):
    """What an agent says of its host when it has started, or why it cannot.

    Attributes:
        problem: why there is no agent; "" if it runs.
        host: where the agent is reached; with a problem, only the host's name.
        place: host, boot and PID namespace.
        pid: the agent's process.
        versions: of what the host has installed.
        job: of the engine that has started the agent; "" without such.
    """

    problem: str = ""
    host: Host = Host("")
    place: Place | None = None
    pid: int = 0
    versions: Versions | None = None
    job: str = ""


# Of a file's content.
DIGEST_BYTES = 16


class CodeFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of an archive.

    Attributes:
        path: the number of its directory among the mesh's (`Ticket.roots`), and its path in that:
            ``0/package/module.py``.
        mtime_ns: of the file.
        content: of the file.
    """

    path: str
    mtime_ns: int
    content: bytes


class PlaceFiles(Verb, frozen=True):
    """Have an agent put files in place; the buffer that follows is a part of their archive.

    Attributes:
        request: that is answered (`FilesAnswer`) after its last part.
        name: of the files.
        base: the name of the files that the archive adds to; "" if it has all files.
        removed: paths of files of `base` that no longer exist.
        is_last: no part of the archive follows.
        num_buffers: 1.
    """

    request: int
    name: str
    base: str
    removed: tuple[str, ...] = ()
    is_last: bool = True
    num_buffers: int = 1


class FilesAnswer(Verb, frozen=True):
    """Answer `PlaceFiles`.

    Attributes:
        request: of the `PlaceFiles`.
        name: of the files that the host has.
        problem: why the files cannot be placed; "" if they can.
    """

    request: int
    name: str = ""
    problem: str = ""


def digest_of(content: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of a file's content."""
    import hashlib  # 10 ms, and only for meshes on many hosts

    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def name_of(files: Iterable[tuple[str, int, bytes]]) -> str:
    """Return the name of files, given the path, time and digest of each."""
    return digest_of(msgspec.msgpack.encode(sorted(files))).hex()


def is_inside(path: str) -> bool:
    """Whether a relative path stays inside the directory that it is relative to."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not {"", ".", ".."} & set(parts)


ARRIVED, SAID, TICKET, ORDER, REFUSED = b"arrived", b"said", b"ticket", b"order", b"refused"
# How often a host that waits says that it does.
AGAIN_S = 1.0
_KEY = r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"  # Z85
# What an engine that numbers its hosts sets: cellmesh's Ray driver or another command, torchrun,
# Kubernetes (an Indexed Job), Slurm, Open MPI, other MPIs.
_NUMBERS = (
    *("CELLMESH_HOST_NUMBER", "GROUP_RANK", "JOB_COMPLETION_INDEX", "SLURM_PROCID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)
_NAMES = ("CELLMESH_HOST_NAME", "SLURMD_NODENAME")
_JOBS = ("CELLMESH_JOB", "SLURM_JOB_ID")


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ticket by which hosts join a mesh: where they announce themselves, and the keys.

    Whoever has it may take a host's part in the mesh.

    Attributes:
        mesh: the mesh's name.
        endpoint: of the notebook's listener, ``tcp://address:port``.
        public_key: the listener's, of CURVE (Z85).
        secret: CURVE's secret key of hosts that announce themselves (Z85).
    """

    mesh: str
    endpoint: str
    public_key: str
    secret: Secret


class HostFacts(msgspec.Struct, frozen=True):
    """What a host reports of itself when it joins: its name and addresses.

    Attributes:
        name: its host name.
        place: host, boot and PID namespace.
        pid: of the process that announces it.
        addresses: of its interfaces.
        number: its place among the mesh's hosts, if its engine numbers them; -1 if not.
    """

    name: str
    place: Place
    pid: int
    addresses: tuple[str, ...]
    number: int = -1


class _Head(msgspec.Struct):
    """The fields that an invitation has and a ticket has not, of any type."""

    key: Any = msgspec.UNSET
    endpoint: Any = msgspec.UNSET


def parse_invitation(text: bytes) -> Invitation | None:
    """Read an invitation; None if the text is another kind of ticket.

    Raises:
        HostError: it is damaged.
    """
    try:
        head = from_json(text, _Head)
    except ValueError:
        return None
    if head.key is not msgspec.UNSET or head.endpoint is msgspec.UNSET:
        return None
    try:
        invitation = from_json(text, Invitation)
        for key in (invitation.public_key, invitation.secret):
            if not re.fullmatch(_KEY, key):
                raise ValueError("a key is cut or changed")
        return invitation
    except ValueError as error:
        raise HostError(
            f"the ticket is damaged ({error}): copy all of its file, which is one line"
        ) from error


def own_facts(environment: Mapping[str, str]) -> HostFacts:
    """Return the facts that this host reports of itself.

    Args:
        environment: of this process.
    """
    return HostFacts(
        host_name(),
        this_place(),
        os.getpid(),
        tuple(own_addresses()),
        number_of_host(environment),
    )


def number_of_host(environment: Mapping[str, str]) -> int:
    """Return this host's place among the mesh's hosts, as its engine numbers them; -1 if not."""
    numbers = (environment[name] for name in _NUMBERS if environment.get(name, "").isdecimal())
    return int(next(numbers, -1))


def name_of_host(environment: Mapping[str, str]) -> str:
    """Return the name that an engine has for this host, or its own."""
    return next((environment[name] for name in _NAMES if environment.get(name)), host_name())


def job_of_host(environment: Mapping[str, str]) -> str:
    """Return the engine's job that this host's agent is started in; "" without such."""
    return next((environment[name] for name in _JOBS if environment.get(name)), "")


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses, but for the loopback's."""
    return [
        address
        for name, addresses in addresses_by_interface().items()
        for address in addresses
        if name != "lo"
    ]


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each of this host's interfaces."""
    import psutil  # not for meshes on one host

    return {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


def address_towards(host: str) -> str:
    """Return this host's address on its way to another; "" if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # no packet is sent: the kernel looks up the route
        return str(way.getsockname()[0])
    return ""
