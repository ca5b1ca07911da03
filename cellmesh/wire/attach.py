"""Messages with which a controller attaches to a mesh's agent, and leaves the agent again."""

from __future__ import annotations

import msgspec

from .hosts import Host
from .ticket import Holder
from .verb import Verb


class Hello(Verb, frozen=True):
    """First message of a controller to an agent; until the agent accepts it, the agent reads no
    other message of that peer.

    `link` names one controller's link, also across connections that break; `num_received` is how
    many messages it has taken in from this agent (0 for a new one). `steal` takes the mesh from who
    holds it. `notebook`: as of `Ticket`.
    """

    key: bytes
    protocol: int
    pid: int
    version: str = ""
    python: str = ""
    link: bytes = b""
    num_received: int = 0
    steal: bool = False
    package: str = ""
    torch: str = ""
    host: str = ""
    notebook: str = ""

    def __repr__(self) -> str:
        return f"<Hello of process {self.pid}>"  # the key is no log's and no traceback's


class Inquire(Verb, frozen=True):
    """A process that has the mesh's key asks how the mesh stands, or `ends` it, without being its
    controller.
    """

    key: bytes
    ends: bool = False

    def __repr__(self) -> str:
        return f"<Inquire, ends={self.ends}>"


class Detach(Verb, frozen=True):
    """Message to the agent: the controller leaves; the ranks live on for the lease."""


class RunInfo(msgspec.Struct, frozen=True, array_like=True):
    """A run in flight, as the agent describes it to a controller that attaches."""

    run: int
    ranks: tuple[int, ...]
    title: str
    execution_count: int = 0


class Welcome(Verb, frozen=True):
    """Answer to `Hello`: the agent accepts the controller, and says what happened before.

    `num_received` is how many messages the agent has received from this link; `next_run` is above
    every run that the mesh has seen; `runs` are in flight; `num_dropped_bytes` of output were
    dropped while no controller was attached. The kept messages follow.
    """

    protocol: int
    agent_pid: int
    host: str
    num_received: int = 0
    next_run: int = 1
    runs: tuple[RunInfo, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    num_dropped_bytes: int = 0
    away_s: float = 0.0


class Standing(Verb, frozen=True):
    """What an agent answers to `Inquire`, with the `SetAgents` that it was sent last, and the runs
    in flight.
    """

    agent_pid: int
    holder: Holder
    agents: SetAgents | None = None
    runs: tuple[RunInfo, ...] = ()


class SetAgents(Verb, frozen=True):
    """Note where the agents of the mesh are, for controllers whose copy of the ticket is older.

    `revision`: how often they have changed; `num_resizes`: as of the ticket.
    """

    agents: tuple[Host, ...]
    revision: int
    num_resizes: int = 0


class Refused(Verb, frozen=True):
    """Answer to `Hello`: the agent does not accept the controller, for this reason."""

    reason: str


class Detached(Verb, frozen=True):
    """The agent has detached the controller: at its request, or because another controller took
    over (`reason`).
    """

    reason: str
