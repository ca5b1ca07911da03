"""The messages between controller, agents and ranks, one frozen Struct each.

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
protocol; `PROTOCOL` changes when it does. The verbs of a feature
stand in a module of its own; the unions here say who sends which to whom.
"""

from __future__ import annotations

from typing import Literal

from . import checkpoint, inspect, replicas, trace
from .attach import Detach, Detached, Hello, Inquire, Refused, SetAgents, Standing, Welcome
from .environment import Surroundings
from .groups import Begun, Blueprint, Describe, GroupCount, Heal, SetMesh
from .hosts import ClockReading, FilesAnswer, PlaceFiles, ReadClock
from .status import HostReport, Probe, RankInfo, RankState, ReadHost, Stacks, StackText
from .stopping import Pause, StopState
from .user_code import (
    Bar,
    Display,
    InputCancelled,
    InputReply,
    InputRequest,
    Logged,
    Output,
    PostMortem,
    RunCall,
    RunCell,
    Skipped,
    Timing,
)
from .values import Chunk, Freed, GatherParts, PullNames, PushNames, PushParts, Unwanted
from .verb import FeatureRequest as FeatureRequest
from .verb import Pickled as Pickled
from .verb import Verb as Verb
from .verb import WorkVerb as WorkVerb

# What features ask: a feature adds its union here, and its handler to those of the ranks.
AnyRequest = (
    inspect.AnyRequest | inspect.CompletionRequest | replicas.AnyRequest | checkpoint.AnyRequest
    | trace.AnyRequest
)  # fmt: skip

PROTOCOL = 11

Channel = Literal["work", "control"]


# ---------------------------------------------------------------- controller -> agent


class Relay(Verb, frozen=True):
    """Ask the agent to write the next `num_frames` frames, unread, to ranks' work/control sockets.

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
    """Ask the agent to kill all ranks and fork new ones, with these mesh dims (none: as before) and
    these changes of environment and working directory.
    """

    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    changes: Surroundings = Surroundings()


class Respawn(Verb, frozen=True):
    """Ask the agent to fork these dead ranks, without process groups until a `Heal`."""

    ranks: tuple[int, ...]


class Kill(Verb, frozen=True):
    """Ask the agent to SIGKILL these ranks, because they did not react to an interrupt."""

    ranks: tuple[int, ...]


class SetDims(Verb, frozen=True):
    """Ask the agent to note new dims of the DeviceMesh, for ranks that start later."""

    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]


class Resize(Verb, frozen=True):
    """Give the mesh another number of ranks: each host has as many as `layout` says.

    The highest ranks of a host end, or new ones are dead until a `Respawn`; those that live on hear
    of it by a `Heal`. `num_resizes`: how often that has happened.
    """

    num_resizes: int
    layout: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]


class Stop(Verb, frozen=True):
    """Ask the agent to end every process of the mesh, remove the mesh's files, and exit."""


class ReadLog(Verb, frozen=True):
    """Ask the agent for the last `num_bytes` of a rank's log (`LogText`)."""

    request: int
    rank: int
    num_bytes: int


class UseStore(Verb, frozen=True):
    """Ask the agent to give ranks that are forked from now on the c10d store of another host.

    `incarnation`: how often all ranks of the mesh have been forked, for an agent that joins later.
    """

    address: str
    port: int
    incarnation: int = 0


class MakeStore(Verb, frozen=True):
    """Ask the agent to start the c10d store on its host: the last store's is lost (`StoreUp`)."""


ToAgent = (
    Hello | Inquire | Detach | Relay | Restart | Respawn | Kill | SetDims | Resize | Stop
    | ReadLog | ReadHost | UseStore | MakeStore | ReadClock | Chunk | Unwanted | PlaceFiles
    | SetAgents
)  # fmt: skip


# ---------------------------------------------------------------- controller -> rank


class Resume(Verb, frozen=True):
    """Ask a rank to execute the runs that it held back after a failed run. Not answered."""


class Interrupt(Verb, frozen=True):
    """Ask a rank to raise KeyboardInterrupt in `run` if it executes it, and to end the collective
    that the run waits in.

    `is_aligned`: every rank of the run ends before the same operations (`Pause`), so no collective
    has to be ended.
    """

    run: int
    is_aligned: bool = False


class Release(Verb, frozen=True):
    """As `Interrupt`, but the rank raises `Released`: the other ranks will not join the collective
    that it waits in.
    """

    run: int


class Request(WorkVerb, frozen=True):
    """Carries a feature's request to that feature's handler on a rank; a query may go to the
    control thread.
    """

    run: int
    body: AnyRequest


class Leave(Verb, frozen=True):
    """Ask a rank to run its atexit handlers, and to exit with code 0."""


Work = (
    RunCell | RunCall | PushNames | PushParts | GatherParts | PullNames | SetMesh | Heal
    | PostMortem | Request
)  # fmt: skip
ToMainThread = Work | Resume
Control = Interrupt | Pause | Release | Probe | Request | Stacks | Describe | InputReply | Leave


# ---------------------------------------------------------------- rank -> agent


class RankReady(Verb, frozen=True):
    """A rank says that it waits for work; it has process groups, unless it is a `Respawn`."""

    device: str
    backend: str


class RankUnready(Verb, frozen=True):
    """A rank says that it could not start; `text` says why."""

    text: str


class Done(Verb, frozen=True):
    """A rank's answer to a run that succeeded, with its value, if the request asks for one.

    `counts` has the groups on which the run began collectives, without point-to-point messages.
    `notes` (of a `Heal`) is what the user must know of models in which a step had stopped.
    """

    run: int
    payload: Pickled | None = None
    counts: tuple[GroupCount, ...] = ()
    timing: Timing | None = None
    notes: tuple[str, ...] = ()


class Failing(Verb, frozen=True):
    """A rank says that a run has raised there; `Failed` follows with the description, which takes
    as long as code of the user's that it calls.
    """

    run: int


class Failed(Verb, frozen=True):
    """A rank's answer to a run that raised. `line` is the failing line of the cell (0: none),
    `inner` that of another cell whose function it has called, as ``In[8] line 10``.

    The rank holds back further work until `Heal` or `Resume`. `released`: other ranks would not
    join the `collective` that it was in ("" for plain Python), in which it had waited `waited_s`.
    `whole_traceback` has the frames of libraries that `traceback` leaves out, "" if there are none.
    `in_step`: the exception left an optimizer's step, which may have changed only some parameters.
    `begun` is the last collective that a released rank has begun, and `group` what users call its
    process group; None after a message.
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
    inner: str = ""
    whole_traceback: str = ""
    begun: Begun | None = None
    group: str = ""


# Stands in the report of a rank's death (`Died`) that another rank's operation has caused.
ENDED_BY_GLOO = "gloo ended it"


def describe_place(line: int, inner: str) -> str:
    """Return in words where in cells code is, as of `Failed`; "" if that is not known."""
    if not inner:
        return f"line {line}" if line else ""
    return f"{inner}, called at line {line}" if line else inner


def interrupted_unbegun(run: int) -> Failed:
    """Return the answer for a run that was interrupted before the rank began to execute it."""
    return Failed(
        run, "KeyboardInterrupt", "before it began", "KeyboardInterrupt: before it began", 0
    )


FromRank = (
    RankReady | RankUnready | Output | Skipped | Display | Done | Failing | Failed | RankState
    | StopState | StackText | Blueprint | InputRequest | InputCancelled | Logged | Freed | Bar
)  # fmt: skip


# ---------------------------------------------------------------- agent -> controller


class Progress(Verb, frozen=True):
    """The agent says how far the mesh's start is: the stage, and how many ranks are ready."""

    stage: str
    num_ready: int


class MeshReady(Verb, frozen=True):
    """The agent says that all ranks are ready; the c10d store listens on `store_port`, of
    `store_address` where a controller attaches to a mesh on many hosts.
    """

    ranks: tuple[RankInfo, ...]
    store_port: int = 0
    incarnation: int = 0
    store_address: str = ""


class StoreUp(Verb, frozen=True):
    """The agent says on which port of its address it has started the c10d store (many hosts)."""

    port: int


class StartFailed(Verb, frozen=True):
    """The agent says that the mesh's start failed; `fault` names the side that caused it."""

    fault: Literal["user", "host"]
    text: str


class Respawned(Verb, frozen=True):
    """The agent says that it replaced these dead ranks by processes that wait for a `Heal`."""

    ranks: tuple[RankInfo, ...]


class RespawnFailed(Verb, frozen=True):
    """The agent says that it could not replace these dead ranks; living ranks continue."""

    ranks: tuple[int, ...]
    text: str


class Died(Verb, frozen=True):
    """The agent says that a rank's process ended, and why."""

    rank: int
    reason: str
    last_output: str


class StoreDied(Verb, frozen=True):
    """The agent says that the c10d store's process ended; a new one listens on `new_port` (0: none
    could be started), on another host if there is a `new_address`.
    """

    reason: str
    new_port: int = 0
    new_address: str = ""


class AgentFault(Verb, frozen=True):
    """The agent says that one of its handlers raised an exception; the agent continues."""

    text: str


class Ranked(Verb, frozen=True):
    """A message that all these ranks have sent alike: the agent joins equal messages into one."""

    ranks: tuple[int, ...]
    verb: FromRank


class LogText(Verb, frozen=True):
    """Answer to `ReadLog`; `num_dropped_bytes` of the log were rotated away or precede it. `place`
    is its path, after the host's name on many hosts.
    """

    request: int
    text: str
    num_dropped_bytes: int
    place: str = ""


class Stopped(Verb, frozen=True):
    """The agent says that all other processes of the mesh have ended; the agent exits next."""

    reason: str


ToController = (
    Welcome | Standing | Refused | Detached | Progress | MeshReady | StartFailed | Respawned
    | RespawnFailed | Died | StoreDied | StoreUp | AgentFault | Ranked | LogText | HostReport
    | ClockReading | Stopped | Chunk | Unwanted | FilesAnswer
)  # fmt: skip
