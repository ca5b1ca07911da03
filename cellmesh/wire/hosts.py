"""Data of meshes on many hosts: each agent's part, its address and the announcement of its start;
and the messages that bring the user's modules to the hosts.

A host that an engine, or a person, has started without a ticket of its own connects to the
notebook's listener (`Invitation`) by TCP, with CURVE. Each message is a word and a text::

    host -> notebook    arrived    `HostFacts`; once a second until it is released
                        said       `Announcement`
    notebook -> host    ticket     the agent's ticket
                        order      a line, such as `GO`
                        refused    the reason, for a person

The set of files beside the notebook has a name, the hash of their contents (`name_of`). The
controller sends agents an archive (`PlaceFiles`), which turns the set of one name into the set of
another; each agent answers with the name of the set that its host then has (`FilesAnswer`). Files
are sent as bytes: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping

import msgspec

from ..errors import HostError
from .host import Place, Versions, host_name, this_place
from .own_file import Secret, from_json
from .verbs import Verb

# Prefix of the output line with an agent's announcement; output of login scripts precedes the line.
ANNOUNCEMENT = "cellmesh-agent: "
# Prefix of the output line in which a command that allocates nodes describes its wait.
WAITING = "cellmesh-waiting: "
# Line that the launcher writes to an agent's standard input once the mesh is ready.
GO = b"go\n"
# Both ends of a connection send a heartbeat this often, and each closes the connection when it has
# received nothing for `SILENT_S`: a loss is reported within the sum of both, plus one interval if
# only the direction to the host is broken.
HEARTBEAT_S = 0.3
SILENT_S = 1.7
# Time that a host may then be without a connection before its ranks count as lost.
HOST_LEASE_S = 10.0


class ReadClock(Verb, frozen=True):
    """Ask an agent for its host's clock (`ClockReading`); `sent_s` is the clock of the sender."""

    sent_s: float


class ClockReading(Verb, frozen=True):
    """Answer to `ReadClock`: `host_s` is the host's monotonic clock."""

    sent_s: float
    host_s: float


class HostPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a mesh on many hosts that one agent runs: the ranks and addresses of its host.

    Attributes:
        index: index of the host among the hosts of the mesh.
        num_hosts: number of hosts of the mesh.
        name: name of the host, as given by the user; "" if the host names itself.
        first_rank: lowest of the host's ranks, which are consecutive.
        num_ranks: number of ranks on this host.
        controller_key: CURVE's public key of the controllers that the agent accepts (Z85).
        notebook: addresses of the notebook's host, to which a route is chosen.
        address: address of the agent for controllers and other ranks; "" until the agent has
            chosen it.
        interface: network interface that has the address.
        joins: whether the mesh is ready already and the agent replaces a lost one: it forks its
            ranks when the controller asks for them.
        replaces: whether the agent ends an earlier agent of the mesh that still runs on its host
            and is unreachable.
        invited_by: public key of the listener to which the host has announced itself; "" if the
            notebook has started the agent.
        start_timeout_s: time limit for the start of all hosts, in seconds.
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
    """One host of a mesh, and the endpoint at which controllers reach its agent.

    Attributes:
        name: name that the user gave; "" if the host names itself, or for this machine alone.
        endpoint: endpoint of its agent, ``tcp://address:port``; "" until the agent has started.
        public_key: CURVE's public key of the agent (Z85).
        first_rank, num_ranks: lowest rank and number of ranks of the host.
        via: endpoint on the controller's host that ssh forwards to the agent; "" without ssh.
    """

    name: str
    endpoint: str = ""
    public_key: str = ""
    first_rank: int = 0
    num_ranks: int = 0
    via: str = ""

    @property
    def reached_at(self) -> str:
        """The endpoint at which this process connects to the agent."""
        return self.via or self.endpoint

    @property
    def address(self) -> str:
        """The IP address of the agent, without its port."""
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the agent runs."""
        return tuple(range(self.first_rank, self.first_rank + self.num_ranks))


class Announcement(msgspec.Struct, frozen=True):
    """An agent's message that it has started, with its address, or that it cannot start.

    Attributes:
        problem: reason why the agent cannot start; "" if it runs.
        host: host and endpoint of the agent; with a problem, only the host's name.
        place: host, boot and PID namespace of the agent.
        versions: versions that the host has installed.
        job: job of the engine that has started the agent; "" without a job.
    """

    problem: str = ""
    host: Host = Host("")
    place: Place | None = None
    versions: Versions | None = None
    job: str = ""


# Length of the hash of a file's content.
DIGEST_BYTES = 16


class CodeFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of the user's modules, in an archive that is sent to other hosts.

    Attributes:
        path: index of its directory in `Ticket.roots`, and its path in that directory:
            ``0/package/module.py``.
        mtime_ns: modification time of the file, in nanoseconds since the epoch.
        content: content of the file.
    """

    path: str
    mtime_ns: int
    content: bytes


class PlaceFiles(Verb, frozen=True):
    """Ask an agent to write files of the user's modules; the frame that follows is a part of their
    archive.

    Attributes:
        request: number of the request, which is answered (`FilesAnswer`) after the last part.
        name: name of the resulting set of files.
        base: name of the set of files that the archive changes; "" if it has all files.
        removed: paths of files of `base` that no longer exist.
        is_last: whether no part of the archive follows.
        num_buffers: number of buffers that follow, always 1.
    """

    request: int
    name: str
    base: str
    removed: tuple[str, ...] = ()
    is_last: bool = True
    num_buffers: int = 1


class FilesAnswer(Verb, frozen=True):
    """An agent's answer to `PlaceFiles`: the set of files that its host has, or the problem.

    Attributes:
        request: number of the answered request.
        name: name of the set of files that the host has.
        problem: why the files cannot be written; "" if they can.
    """

    request: int
    name: str = ""
    problem: str = ""


def digest_of(content: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of a file's content."""
    import hashlib  # 10 ms, and only for meshes on many hosts

    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def name_of(files: Iterable[tuple[str, int, bytes]]) -> str:
    """Return the name of a set of files: a hash of each file's path, modification time and
    digest.
    """
    return digest_of(msgspec.msgpack.encode(sorted(files))).hex()


def is_inside(path: str) -> bool:
    """Return whether a relative path stays inside the directory that it is relative to."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not {"", ".", ".."} & set(parts)


ARRIVED, SAID, TICKET, ORDER, REFUSED = b"arrived", b"said", b"ticket", b"order", b"refused"
# Interval at which a waiting host repeats its announcement, in seconds.
AGAIN_S = 1.0
# Variables in which engines number their hosts: cellmesh's Ray driver or another command, torchrun,
# Kubernetes (an Indexed Job), Slurm, Open MPI, other MPIs.
_NUMBERS = (
    *("CELLMESH_HOST_NUMBER", "GROUP_RANK", "JOB_COMPLETION_INDEX", "SLURM_PROCID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)
_NAMES = ("CELLMESH_HOST_NAME", "SLURMD_NODENAME")
_JOBS = ("CELLMESH_JOB", "SLURM_JOB_ID")


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ticket by which hosts join a mesh: address and key of the notebook's listener.

    Any process that has it may take a host's part in the mesh.

    Attributes:
        mesh: name of the mesh.
        endpoint: endpoint of the notebook's listener, ``tcp://address:port``.
        public_key: CURVE's public key of the listener (Z85).
        secret: CURVE's secret key of the hosts that announce themselves (Z85).
    """

    mesh: str
    endpoint: str
    public_key: str
    secret: Secret


class HostFacts(msgspec.Struct, frozen=True):
    """Name, addresses and index of a host, which it reports when it joins a mesh.

    Attributes:
        name: name of the host.
        place: host, boot and PID namespace of the process that announces the host.
        addresses: IPv4 addresses of the host's interfaces.
        number: index of the host in the mesh, if its engine numbers hosts; -1 if not.
    """

    name: str
    place: Place
    addresses: tuple[str, ...]
    number: int = -1


def parse_invitation(text: bytes) -> Invitation | None:
    """Parse the text of an `Invitation`; return None if the text is another kind of ticket.

    Raises:
        HostError: a key is cut or has more characters.
    """
    try:
        invitation = from_json(text, Invitation)
    except ValueError:
        return None
    if {len(invitation.public_key), len(invitation.secret)} != {40}:
        raise HostError("the ticket is damaged: copy all of its file, which is one line")
    return invitation


def own_facts(environment: Mapping[str, str]) -> HostFacts:
    """Return the name, addresses and index that this host reports when it joins a mesh.

    Args:
        environment: environment variables of this process.
    """
    return HostFacts(
        host_name(),
        this_place(),
        tuple(own_addresses()),
        number_of_host(environment),
    )


def number_of_host(environment: Mapping[str, str]) -> int:
    """Return this host's index in the mesh, if its launcher (such as torchrun or Slurm) numbers
    hosts; -1 if not.
    """
    numbers = (environment[name] for name in _NUMBERS if environment.get(name, "").isdecimal())
    return int(next(numbers, -1))


def name_of_host(environment: Mapping[str, str]) -> str:
    """Return the name that a job scheduler (Slurm, Ray) has for this host, else its host name."""
    return next((environment[name] for name in _NAMES if environment.get(name)), host_name())


def job_of_host(environment: Mapping[str, str]) -> str:
    """Return the job, of Slurm or Ray, that starts this host's agent; "" without a job."""
    return next((environment[name] for name in _JOBS if environment.get(name)), "")


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses, except the loopback's."""
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
    """Return the address from which this host reaches another one; "" without a route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # no packet is sent: the kernel looks up the route
        return str(way.getsockname()[0])
    return ""
