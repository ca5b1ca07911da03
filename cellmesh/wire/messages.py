"""The messages of the runtime, one frozen Struct each.

Three parties speak: the controller (in the notebook's kernel), one agent a host, and the ranks. The
agent reads headers and never a payload, which it passes on unchanged between controller and rank.

=================  =============================================================
`ToAgent`          controller -> agent
`Work`             controller -> main thread of a rank (carried by `Relay`)
`Control`          controller -> control thread of a rank (carried by `Relay`)
`FromRank`         rank -> agent; most travel on to the controller in `Ranked`
`ToController`     agent -> controller
=================  =============================================================

Structs are encoded as arrays (``array_like``): fields are positional, so their order is part of the
protocol; `PROTOCOL` changes when it does. Long, and one file all the same: who changes a verb sees
here all that speak to whom, and nothing but declarations is in it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from . import checkpoint, comms, completion, inspect, profile, replicas
from .comms import FromFrontEnd, ToFrontEnd
from .verb import FeatureRequest as FeatureRequest
from .verb import Pickled as Pickled
from .verb import Verb as Verb
from .verb import WorkVerb as WorkVerb

# What features ask: a feature adds its union here, and its handler to those of the ranks.
AnyRequest = (
    inspect.AnyRequest
    | completion.AnyRequest
    | replicas.AnyRequest
    | checkpoint.AnyRequest
    | profile.AnyRequest
    | comms.AnyRequest
)

PROTOCOL = 8

Channel = Literal["work", "control"]
StreamName = Literal["stdout", "stderr"]
DisplayKind = Literal["display", "update", "result", "clear"]
BarState = Literal["open", "done", "failed", "stopped", "removed"]
Phase = Literal["starting", "idle", "running", "dead"]


# ---------------------------------------------------------------- controller -> agent


class Hello(Verb, frozen=True):
    """First message of a controller; before accepting it, the agent reads no other message of that
    peer.

    `link` names one controller's link, also across connections that break; `num_received` is how
    many messages it has taken in from this agent (0 for a new one). `steal` takes the mesh from who
    holds it.
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


class Detach(Verb, frozen=True):
    """The controller leaves; the ranks live on under their lease."""


class Relay(Verb, frozen=True):
    """Write the next `num_frames` frames, unread, to these ranks' work or control socket.

    `run` is what the ranks will answer about, so that the agent can merge their answers and name
    the cell that low-level output belongs to; -1 for messages that start no run. `title` and
    `execution_count` (0: no cell) are for a controller that attaches while it is in flight.
    `fills`: it may give the rank what a user's namespace holds (a cell, a call, a push); a new rank
    is empty until then. `lends`: the last frame names a segment, which the agent keeps open until
    the run has ended.
    """

    ranks: tuple[int, ...]
    channel: Channel
    run: int
    num_frames: int
    title: str = ""
    execution_count: int = 0
    fills: bool = False
    lends: bool = False


class Restart(Verb, frozen=True):
    """Kill every rank and fork new ones, with a DeviceMesh of these dims (none: as before)."""

    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()


class Respawn(Verb, frozen=True):
    """Fork these dead ranks; they have no process groups until a `Heal` (`Respawned`)."""

    ranks: tuple[int, ...]


class Kill(Verb, frozen=True):
    """Kill these ranks with SIGKILL, because they did not stop."""

    ranks: tuple[int, ...]


class SetDims(Verb, frozen=True):
    """Note new dims of the DeviceMesh, for ranks and controllers that start later."""

    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]


class Stop(Verb, frozen=True):
    """End every process of the mesh, remove its files, exit."""


class ReadLog(Verb, frozen=True):
    """Ask for the last `num_bytes` of a rank's log."""

    request: int
    rank: int
    num_bytes: int


class ReadHost(Verb, frozen=True):
    """Ask the agent for facts about its processes (`HostReport`)."""

    request: int


ToAgent = Hello | Detach | Relay | Restart | Respawn | Kill | SetDims | Stop | ReadLog | ReadHost


# ---------------------------------------------------------------- controller -> rank


class RunCell(WorkVerb, frozen=True):
    """Run a cell in the rank's namespace.

    `transformed` is the source with IPython's magics turned into calls ("": the rank is to do
    that); `execution_count` is the notebook's ``In[n]``; `quiet` drops the value of a last
    expression; `is_timed`: the answer is to say how long it took. `lead` and `audience`: as of
    `RunCall`. `argv`: what `sys.argv` has behind the program's name while the cell runs; None
    leaves it alone.
    """

    is_cell: ClassVar[bool] = True
    is_user_code: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    run: int
    source: str
    transformed: str
    is_async: bool
    execution_count: int
    quiet: bool = False
    is_timed: bool = False
    lead: int = 0
    audience: int = 0
    argv: tuple[str, ...] | None = None


class RunCall(WorkVerb, frozen=True):
    """Call a pickled ``(function, args, kwargs)`` and answer with its value.

    `lead` is the lowest rank that does: widgets that it makes are shown, others' are not
    (`ToFrontEnd`). `audience` tells the controller that shows them from those before it.
    """

    is_user_code: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    run: int
    payload: Pickled
    lead: int = 0
    audience: int = 0


class PushNames(WorkVerb, frozen=True):
    """Bind the names of a pickled dict in the rank's namespace."""

    fills: ClassVar[bool] = True

    run: int
    payload: Pickled


class PushParts(WorkVerb, frozen=True):
    """Bind, to the names of a pickled dict, this rank's parts of the tensors and arrays in it.

    Without `placements`, they are split along `dim` among `ranks`, in that order. With them, each
    becomes a DTensor on the rank's DeviceMesh: for each of its dims, the tensor's dim that it
    shards, or None.
    """

    fills: ClassVar[bool] = True

    run: int
    payload: Pickled
    ranks: tuple[int, ...]
    dim: int = 0
    placements: tuple[int | None, ...] | None = None


class GatherParts(WorkVerb, frozen=True):
    """Answer with this rank's `wire.shards.Part` of an expression's value, which the controller
    joins with other ranks'.
    """

    run: int
    expression: str


class PullNames(WorkVerb, frozen=True):
    """Answer with the value of an expression in the rank's namespace."""

    run: int
    expression: str


class SetMesh(WorkVerb, frozen=True):
    """Build the torch DeviceMesh of these dims and bind it to ``mesh``. Collective."""

    run: int
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]


class Heal(WorkVerb, frozen=True):
    """Rebuild every process group whose members are all among `ranks`, in place. Collective among
    them.

    A rank does this before work that it holds back. `generation` has not been used before in this
    mesh. A rank without groups (a `Respawn`) first makes those of `blueprint` (`Blueprint`); with
    an empty one it makes the mesh's own, of these dims. `store_port` is where the c10d store
    listens now (0: as before).
    """

    run: int
    generation: int
    ranks: tuple[int, ...]
    blueprint: bytes
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    store_port: int = 0


class Resume(Verb, frozen=True):
    """Continue with the runs held back since a run failed. Not answered."""


class PostMortem(WorkVerb, frozen=True):
    """Open the debugger at the frame where the last exception was raised."""

    run: int


class Interrupt(Verb, frozen=True):
    """Raise KeyboardInterrupt in `run` if the rank executes it, and end the collective that it
    waits in.
    """

    run: int


class Release(Verb, frozen=True):
    """As `Interrupt`, but raises `Released`: the other ranks will not join the collective that this
    rank waits in.
    """

    run: int


class Stacks(Verb, frozen=True):
    """Ask for the Python stacks of the rank's threads (`StackText`)."""

    request: int
    all_threads: bool = False


class Describe(Verb, frozen=True):
    """Ask a rank for the data from which a new rank makes the same process groups (`Blueprint`)."""

    request: int


class Reply(Verb, frozen=True):
    """The user's answer to a request for input; `is_end` is end of file (Ctrl-D)."""

    request: int
    text: str
    is_end: bool = False


class Probe(Verb, frozen=True):
    """Ask a rank's control thread for the state of the main thread (`RankState`)."""

    request: int


class Request(WorkVerb, frozen=True):
    """Carries a feature's request to that feature's handler on a rank; a query may go to the
    control thread.
    """

    run: int
    body: AnyRequest


class Leave(Verb, frozen=True):
    """Ask a rank to run its exit handlers, and to exit with code 0."""


Work = (
    RunCell
    | RunCall
    | PushNames
    | PushParts
    | GatherParts
    | PullNames
    | SetMesh
    | Heal
    | PostMortem
    | Request
    | FromFrontEnd
)
ToMainThread = Work | Resume
Control = Interrupt | Release | Probe | Request | Stacks | Describe | Reply | Leave


# ---------------------------------------------------------------- rank -> agent


class GroupCount(msgspec.Struct, frozen=True, array_like=True):
    """How many collectives a rank has begun on a process group.

    Attributes:
        name: torch's name of the group.
        ranks: its members; () for all ranks.
        num_collectives: begun by this rank since the group was made or healed.
        num_sent: messages sent, as (peer's global rank, number), peers ascending.
        num_received: likewise.
    """

    name: str
    ranks: tuple[int, ...]
    num_collectives: int
    num_sent: tuple[tuple[int, int], ...] = ()
    num_received: tuple[tuple[int, int], ...] = ()


class MemoryUse(msgspec.Struct, frozen=True, array_like=True):
    """A rank's memory, in bytes; the last cell may still be running.

    Attributes:
        rss: resident now. Pages that ranks share (what was imported before they were forked) count
            in each.
        peak_rss: the most that it has been since the rank began.
        cell_rss: by how much the last cell has changed `rss`.
        cell_peak_rss: by how much the last cell has raised `peak_rss`.
        execution_count: the last cell's ``In[n]``; 0 if there was none.
        allocated, peak_allocated, reserved: on the rank's GPU, by torch's allocator.
        cell_allocated: by how much the last cell has changed `allocated`.
    """

    rss: int = 0
    peak_rss: int = 0
    cell_rss: int = 0
    cell_peak_rss: int = 0
    execution_count: int = 0
    allocated: int = 0
    peak_allocated: int = 0
    reserved: int = 0
    cell_allocated: int = 0


class RankReady(Verb, frozen=True):
    """The rank waits for work; it has process groups, unless it is a `Respawn`."""

    device: str
    backend: str


class RankUnready(Verb, frozen=True):
    """The rank could not start; `text` says why."""

    text: str


class Output(Verb, frozen=True):
    """Text that a run printed (a delta). `run` is -1 where it belongs to none."""

    run: int
    stream: StreamName
    text: str


class Skipped(Verb, frozen=True):
    """Lines and bytes of output that exceeded the bound; the rank's log has them."""

    run: int
    num_lines: int
    num_bytes: int


class Display(Verb, frozen=True):
    """A rich display: `bundle` is JSON ``{"data", "metadata"}``; `display_id` is "" where it has
    none.
    """

    run: int
    kind: DisplayKind
    bundle: bytes
    display_id: str = ""


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """How long a cell took on a rank, and how much of that it was in collectives or messages, in
    seconds.
    """

    elapsed_s: float
    in_collectives_s: float


class Done(Verb, frozen=True):
    """A run succeeded; the payload has its value, if the request asks for one.

    `counts` has the groups on which the run began collectives, without point-to-point messages.
    `notes` (of a `Heal`) is what the user must know of models in which a step had stopped.
    """

    run: int
    payload: Pickled | None = None
    counts: tuple[GroupCount, ...] = ()
    timing: Timing | None = None
    notes: tuple[str, ...] = ()


class Failed(Verb, frozen=True):
    """A run ended with an exception. `line` is the failing line of the cell (0: none).

    The rank holds back further work until `Heal` or `Resume`. `released`: other ranks would not
    join the `collective` that it was in ("" for plain Python), in which it had waited `waited_s`.
    `in_step`: the exception left an optimizer's step, which may have changed only some parameters.
    """

    run: int
    type_name: str
    text: str
    traceback: str
    line: int
    payload: Pickled | None = None
    why_no_payload: str = ""
    released: bool = False
    collective: str = ""
    waited_s: float = 0.0
    in_step: bool = False
    timing: Timing | None = None


def interrupted_unbegun(run: int) -> Failed:
    """The end of a run that was interrupted before it began."""
    return Failed(
        run, "KeyboardInterrupt", "before it began", "KeyboardInterrupt: before it began", 0
    )


class RankState(Verb, frozen=True):
    """The state of a rank's main thread.

    `run` is -1 when idle; `line` is the line of the cell (0: unknown); `where` is the call it is
    in, as written, or the innermost Python function; `collective` the torch.distributed call it
    waits in ("" if none), `group` that call's group by torch's name, and `waited_s` for how long;
    `asks` that it waits for the user (`Ask`); `is_broken` that its groups must be healed; `counts`
    has all its groups; `memory` what it holds; `device_percent` how busy its GPU is, by whomever
    (-1: not known).
    """

    request: int
    run: int
    execution_count: int
    line: int
    where: str
    collective: str
    device: str
    device_bytes: int
    group: str = ""
    waited_s: float = 0.0
    asks: bool = False
    is_broken: bool = False
    counts: tuple[GroupCount, ...] = ()
    memory: MemoryUse = MemoryUse()
    device_percent: int = -1


class StackText(Verb, frozen=True):
    """Answer to `Stacks`."""

    request: int
    text: str


class Blueprint(Verb, frozen=True):
    """Answer to `Describe`; only ranks read its content."""

    request: int
    data: bytes


class Ask(Verb, frozen=True):
    """A run waits for a line of input (``input()``, ``getpass()``, the debugger)."""

    run: int
    request: int
    prompt: str
    is_password: bool = False


class AskEnded(Verb, frozen=True):
    """The rank no longer waits for an answer: it was interrupted."""

    run: int
    request: int


class Logged(Verb, frozen=True):
    """Numbers that user code has reported (``cellmesh.log``), in the order of their steps.

    Each row of `values` belongs to one name of `names`; its columns to `steps`.
    """

    run: int
    names: tuple[str, ...]
    steps: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


class Freed(Verb, frozen=True):
    """The rank's last reference to the memory of a segment has gone (`loan`: see
    `wire.segments.Ref`).

    `is_shared`: the rank has forked in between, so that another process may read it still.
    """

    loan: int
    is_shared: bool = False
    run: int = -1


class Mapped(Verb, frozen=True):
    """The rank maps a file of this length, so a truncation of the file kills the rank. For the
    agent.
    """

    path: str
    num_bytes: int


class Bar(Verb, frozen=True):
    """The state of a progress bar of user code.

    Attributes:
        run: the run that it was made in.
        bar: its number on the rank; what says that it is open no more is the last of that number.
        title: what stands before it.
        done, total: in `unit`; a total of 0 is not known.
        elapsed_s: since it began.
        unit: of what is counted.
        divisor: numbers are shown with k, M, G of this base (1000 or 1024); 0 for plain ones.
        rate: units a second, lately; 0 is not known.
        note: what stands behind it (tqdm's postfix).
        state: whether it goes on. `stopped`: it was interrupted or released.
        num_outer: how many bars were open round it.
    """

    run: int
    bar: int
    title: str
    done: float
    total: float
    elapsed_s: float
    unit: str = "it"
    divisor: int = 0
    rate: float = 0.0
    note: str = ""
    state: BarState = "open"
    num_outer: int = 0


FromRank = (
    RankReady
    | RankUnready
    | Output
    | Skipped
    | Display
    | Done
    | Failed
    | RankState
    | StackText
    | Blueprint
    | Ask
    | AskEnded
    | Logged
    | Freed
    | Mapped
    | Bar
    | ToFrontEnd
)


# ---------------------------------------------------------------- agent -> controller


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """One rank, as the agent knows it.

    Attributes:
        ending: how it ended, if it is dead.
        predecessor_ending: how the rank ended that it replaced, as long as it is empty: no work
            that `fills` (`Relay`) has ended well on it; "" for all others.
        last_output: the last lines of the one that ended, if either is given.
        cpu_s: CPU time that its process has used, by all its threads, in seconds.
    """

    rank: int
    pid: int
    host: str
    phase: Phase
    device: str = ""
    backend: str = ""
    rss_bytes: int = 0
    ending: str = ""
    predecessor_ending: str = ""
    last_output: str = ""
    cpu_s: float = 0.0


class RunInfo(msgspec.Struct, frozen=True, array_like=True):
    """A run in flight, for a controller that attaches."""

    run: int
    ranks: tuple[int, ...]
    title: str
    execution_count: int = 0


class Welcome(Verb, frozen=True):
    """The agent accepts the controller.

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


class Refused(Verb, frozen=True):
    """The agent does not accept the controller."""

    reason: str


class Detached(Verb, frozen=True):
    """The agent has detached the controller: at its request, or because another one took over
    (`reason`).
    """

    reason: str


class Progress(Verb, frozen=True):
    """The progress of a mesh's start."""

    stage: str
    num_ready: int


class MeshReady(Verb, frozen=True):
    """Every rank has answered; the c10d store listens on `store_port`."""

    ranks: tuple[RankInfo, ...]
    store_port: int = 0


class StartFailed(Verb, frozen=True):
    """The start failed; `fault` names the side that caused it."""

    fault: Literal["user", "host"]
    text: str


class Respawned(Verb, frozen=True):
    """These dead ranks have been replaced by new processes, which wait for a `Heal`."""

    ranks: tuple[RankInfo, ...]


class RespawnFailed(Verb, frozen=True):
    """Dead ranks could not be replaced; living ranks continue."""

    ranks: tuple[int, ...]
    text: str


class Died(Verb, frozen=True):
    """A rank's process ended."""

    rank: int
    reason: str
    last_output: str


class StoreDied(Verb, frozen=True):
    """The process of the c10d store ended; a new one listens on `new_port` (0: none could be
    started).
    """

    reason: str
    new_port: int = 0


class AgentFault(Verb, frozen=True):
    """A handler of the agent raised an exception; the agent continues."""

    text: str


class Ranked(Verb, frozen=True):
    """One message that all these ranks have sent."""

    ranks: tuple[int, ...]
    verb: FromRank


class LogText(Verb, frozen=True):
    """Answer to `ReadLog`; `num_dropped_bytes` were rotated away or lie before this text."""

    request: int
    text: str
    num_dropped_bytes: int


class HostReport(Verb, frozen=True):
    """Answer to `ReadHost`; `at_s` is when the processes were measured, by the host's monotonic
    clock.
    """

    request: int
    ranks: tuple[RankInfo, ...]
    at_s: float = 0.0


class Stopped(Verb, frozen=True):
    """Every process of the mesh has ended; the agent exits after this message."""

    reason: str


ToController = (
    Welcome
    | Refused
    | Detached
    | Progress
    | MeshReady
    | StartFailed
    | Respawned
    | RespawnFailed
    | Died
    | StoreDied
    | AgentFault
    | Ranked
    | LogText
    | HostReport
    | Stopped
)
