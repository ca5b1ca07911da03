"""Messages by which a controller attaches to a mesh's agent and detaches from it."""

from __future__ import annotations

import msgspec

from .hosts import Host
from .ticket import Holder
from .verbs import Verb


class Hello(Verb, frozen=True):
    """First message of a controller to an agent, which reads no other message of that peer until it
    has accepted this one.

    `link` identifies the controller's link, also after a reconnect; `num_received` is the number of
    messages that the link has received from this agent (0 for a new link). `steal` takes the mesh
    from its current controller. `notebook`: as in `Ticket`. `visits`: it leaves soon, and the
    output of earlier runs is not for it.
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
    visits: bool = False

    def __repr__(self) -> str:
        return f"<Hello of process {self.pid}>"  # keeps the key out of logs and tracebacks


class Inquire(Verb, frozen=True):
    """Request to an agent for the state of the mesh, or to end the mesh (`ends`), from a process
    that has the mesh's key and is not its controller.
    """

    key: bytes
    ends: bool = False

    def __repr__(self) -> str:
        return f"<Inquire, ends={self.ends}>"


class Detach(Verb, frozen=True):
    """Message to the agent: the controller detaches, and the ranks run until the lease ends."""


class RunInfo(msgspec.Struct, frozen=True, array_like=True):
    """A run (a cell or call) in flight, as the agent describes it to a controller that attaches."""

    run: int
    ranks: tuple[int, ...]
    title: str
    execution_count: int = 0
    interleaves: bool = False


class Welcome(Verb, frozen=True):
    """Answer to `Hello`: the agent accepts the controller, and reports the state of the mesh.

    `num_received` is the number of messages that the agent has received from this link; `next_run`
    is greater than the numbers of all runs so far; `runs` are the runs in flight. The messages that
    the agent has kept follow.
    """

    protocol: int
    agent_pid: int
    host: str
    num_received: int = 0
    next_run: int = 1
    runs: tuple[RunInfo, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    away_s: float = 0.0


class Standing(Verb, frozen=True):
    """An agent's answer to `Inquire`: the mesh's controller, the last list of all agents
    (`SetAgents`) that this agent has received, and the runs in flight.
    """

    agent_pid: int
    holder: Holder
    agents: SetAgents | None = None
    runs: tuple[RunInfo, ...] = ()


class SetAgents(Verb, frozen=True):
    """Give an agent the addresses of all agents of the mesh, for controllers whose copy of the
    ticket is outdated.

    `revision`: number of changes of the agents so far; `num_resizes`: as in the ticket.
    """

    agents: tuple[Host, ...]
    revision: int
    num_resizes: int = 0


class Refused(Verb, frozen=True):
    """Answer to `Hello`: the agent does not accept the controller; `reason` explains why."""

    reason: str


class Detached(Verb, frozen=True):
    """The agent has detached the controller: at its request, or because another controller took
    over (`reason`).
    """

    reason: str
