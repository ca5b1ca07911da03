"""Meshes on many hosts: what each host's agent runs, where controllers reach it, and what it
announces when it has started.
"""

from __future__ import annotations

import msgspec

from .host import Place, Versions
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


class AgentAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a controller reaches the agent of one host.

    Attributes:
        host: as the user named it.
        endpoint: ``tcp://address:port``.
        public_key: CURVE's, of the agent (Z85).
        first_rank, num_ranks: the ranks that it runs.
        via: the endpoint of ssh's forwarding to it on the controller's host; "" without.
    """

    host: str
    endpoint: str
    public_key: str
    first_rank: int
    num_ranks: int
    via: str = ""

    @property
    def reached_at(self) -> str:
        """Where this process meets it."""
        return self.via or self.endpoint

    @property
    def address(self) -> str:
        """The address, without the port."""
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the agent runs."""
        return tuple(range(self.first_rank, self.first_rank + self.num_ranks))


class Announcement(msgspec.Struct, frozen=True):
    """What an agent says of its host when it has started, or why it cannot.

    Attributes:
        problem: why there is no agent; "" if it runs.
        address: where it is reached; None with a problem.
        place: host, boot and PID namespace.
        pid: the agent's process.
        versions: of what the host has installed.
        host: its name, also with a problem.
        job: of the engine that has started the agent; "" without such.
    """

    problem: str = ""
    address: AgentAddress | None = None
    place: Place | None = None
    pid: int = 0
    versions: Versions | None = None
    host: str = ""
    job: str = ""
