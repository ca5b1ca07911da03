"""The messages between controller, agents and ranks, one frozen Struct each.

Messages are exchanged by the controller (in the notebook's kernel), one agent per host, and the
ranks. The agent reads headers but no payloads, which it relays between controller and rank.

=================  =============================================================
`ToAgent`          controller -> agent
`Work`             controller -> main thread of a rank (carried by `Relay`)
`Control`          controller -> control thread of a rank (carried by `Relay`)
`FromRank`         rank -> agent; most travel on to the controller in `Ranked`
`ToController`     agent -> controller
=================  =============================================================

Structs are encoded as arrays (``array_like``): fields are positional, so their order is part of the
protocol; `PROTOCOL` changes when it does. The verbs of a feature are in a module of its own; the
unions here define the sender and the receiver of each verb.
"""

from __future__ import annotations

from typing import Literal

from . import inspect, replicas, trace, values, weights
from .attach import Detach, Detached, Hello, Inquire, Refused, SetAgents, Standing, Welcome
from .environment import Surroundings
from .groups import Blueprint, Describe, GroupCount, Heal, LinkRequest, SetMesh
from .hosts import ClockReading, FilesAnswer, PlaceFiles, ReadClock
from .peer_calls import PeerWork, Routed
from .status import HostReport, Probe, RankInfo, RankState, ReadHost, Stacks, StackText
from .stopping import Pause, StopState
from .values import Chunk, GatherParts, PullNames, PushNames, PushParts, Unwanted
from .verbs import (
    Bar,
    Display,
    Imports,
    InputCancelled,
    InputReply,
    InputRequest,
    Logged,
    Output,
    PostMortem,
    RunCall,
    RunCell,
    RunScript,
    Skipped,
    Timing,
)
from .verbs import FeatureRequest as FeatureRequest
from .verbs import Pickled as Pickled
from .verbs import Verb as Verb
from .verbs import WorkVerb as WorkVerb

# Requests of all features: a feature adds its union here.
AnyRequest = (
    inspect.AnyRequest | inspect.CompletionRequest | replicas.AnyRequest | values.CheckpointRequest
    | trace.AnyRequest | weights.AnyRequest | LinkRequest
)  # fmt: skip

PROTOCOL = 19

Channel = Literal["work", "control"]


# ---------------------------------------------------------------- controller -> agent


class Relay(Verb, frozen=True):
    """Ask the agent to write the next `num_frames` frames, unread, to ranks' work/control sockets.

    `run` is the run that the ranks will answer, so that the agent can merge their answers and name
    the cell that low-level output belongs to; -1 for messages that start no run. `title` and
    `execution_count` (0: no cell) are for a controller that attaches while the run is in flight.
    `fills`: the message may bind names in the user's namespace (a cell, a call, a push), which is
    empty on a new rank. `lends`: the last frame names a segment, which the agent keeps open until
    the run has ended. `is_whole`: all text of the run is sent, without a limit. `interleaves`: it
    may wait beside later runs, which may end before it.
    """

    ranks: tuple[int, ...]
    channel: Channel
    run: int
    num_frames: int
    title: str = ""
    execution_count: int = 0
    fills: bool = False
    lends: bool = False
    is_whole: bool = False
    interleaves: bool = False


class Restart(Verb, frozen=True):
    """Ask the agent to kill all ranks and fork new ones, with these mesh dims (none: the previous
    ones) and these changes of environment and working directory.
    """

    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    changes: Surroundings = Surroundings()


class Respawn(Verb, frozen=True):
    """Ask the agent to fork these dead ranks, without process groups until a `Heal`."""

    ranks: tuple[int, ...]


class Kill(Verb, frozen=True):
    """Ask the agent to kill these ranks, because they did not react to an interrupt."""

    ranks: tuple[int, ...]


class SetDims(Verb, frozen=True):
    """Ask the agent to record new dims of the DeviceMesh, for ranks that start later."""

    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]


class Resize(Verb, frozen=True):
    """Ask the agent to change the number of ranks: `layout` has the new number for each host.

    The highest ranks of a host end, or new ones are dead until a `Respawn`; the remaining ranks are
    informed by a `Heal`. `num_resizes`: number of resizes of the mesh so far.
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
    """Give the agent the address of the c10d store on another host, for ranks that it forks later.

    `incarnation`: number of times that all ranks of the mesh were forked, for an agent that joins
    later.
    """

    address: str
    port: int
    incarnation: int = 0


class MakeStore(Verb, frozen=True):
    """Ask the agent to start a new c10d store on its host, as the last store is lost; answered by
    `StoreUp`.
    """


ToAgent = (
    Hello | Inquire | Detach | Relay | Restart | Respawn | Kill | SetDims | Resize | Stop
    | ReadLog | ReadHost | UseStore | MakeStore | ReadClock | Chunk | Unwanted | PlaceFiles
    | SetAgents
)  # fmt: skip


# ---------------------------------------------------------------- controller -> rank


class Resume(Verb, frozen=True):
    """Ask a rank to execute the runs that it has held back since a run failed; the rank does not
    answer.
    """


class Interrupt(Verb, frozen=True):
    """Ask a rank to raise KeyboardInterrupt in `run` if it executes the run, and to abort the
    collective in which the run waits.

    `is_aligned`: every rank of the run stops before the same operations (`Pause`), so no collective
    has to be aborted.
    """

    run: int
    is_aligned: bool = False


class Release(Verb, frozen=True):
    """Ask a rank to raise `Released` in `run`, as the other ranks will not join the collective in
    which it waits; else like `Interrupt`.
    """

    run: int


class Request(WorkVerb, frozen=True):
    """Ask a rank to have a feature's request handled by its handler; queries may be handled on the
    control thread.
    """

    run: int
    body: AnyRequest


class Signal(Verb, frozen=True):
    """Ask a rank to send its own process a signal."""

    number: int


class Leave(Verb, frozen=True):
    """Ask a rank to run its atexit handlers, and to exit with code 0."""


Work = (
    RunCell | RunCall | RunScript | PushNames | PushParts | GatherParts | PullNames | SetMesh | Heal
    | PostMortem | Request
)  # fmt: skip
ToMainThread = Work | Resume
Control = (
    Interrupt
    | Pause
    | Release
    | Probe
    | Request
    | Stacks
    | Describe
    | InputReply
    | Leave
    | Signal
    | Routed
)


# ---------------------------------------------------------------- rank -> agent


class RankReady(Verb, frozen=True):
    """Report of a rank that it waits for work; it has process groups, unless it replaces a dead
    rank.
    """

    device: str
    backend: str


class RankUnready(Verb, frozen=True):
    """Report of a rank that it could not start; `text` is the reason."""

    text: str


class Done(Verb, frozen=True):
    """A rank's answer to a run that succeeded, with its value if the request asks for one.

    `counts` has the groups on which the run began collectives, without point-to-point messages.
    `notes` (of a `Heal`) are remarks for the user on models in which a step was interrupted.
    """

    run: int
    payload: Pickled | None = None
    counts: tuple[GroupCount, ...] = ()
    timing: Timing | None = None
    notes: tuple[str, ...] = ()


class Failing(Verb, frozen=True):
    """Report of a rank that a run has raised an exception; `Failed` follows with its description,
    which may call slow user code.
    """

    run: int


class Failed(Verb, frozen=True):
    """A rank's answer to a run that raised an exception.

    `line` is the failing line of the cell (0: none), `inner` the line of another cell whose
    function the cell has called, as ``In[8] line 10``. The rank holds back further work until
    `Heal` or `Resume`. `released`: the rank was released from `collective` ("" for plain Python),
    which other ranks would not join, after `waited_s` seconds. `whole_traceback` has the frames of
    libraries that `traceback` leaves out, "" if there are none. `in_step`: the exception left an
    optimizer's step, which may have changed only some parameters. `begun`: the last collective that
    a released rank has begun, with its number and group; "" after a message. `status`: exit status
    of a script, whose place is in `inner`, as ``train.py:31``; its traceback, which the rank has
    printed, is "".
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
    begun: str = ""
    status: int = 1


# Part of the reason (`Died`) for which gloo has ended a rank's process.
ENDED_BY_GLOO = "gloo ended it"


def describe_place(line: int, inner: str) -> str:
    """Return, in words, the line of a cell at which a run has failed (`Failed`); "" if it is
    unknown.
    """
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
    | StopState | StackText | Blueprint | InputRequest | InputCancelled | Logged | Imports
    | Bar | PeerWork | Routed
)  # fmt: skip


# ---------------------------------------------------------------- agent -> controller


class Progress(Verb, frozen=True):
    """Report of the agent on the mesh's start: the stage, and the number of ready ranks."""

    stage: str
    num_ready: int


class MeshReady(Verb, frozen=True):
    """Report of the agent that all ranks are ready; the c10d store listens on `store_port`, at
    `store_address` if a controller attaches to a mesh on many hosts.
    """

    ranks: tuple[RankInfo, ...]
    store_port: int = 0
    incarnation: int = 0
    store_address: str = ""


class StoreUp(Verb, frozen=True):
    """Report of the agent that it has started the c10d store on this port; for meshes on many
    hosts.
    """

    port: int


class StartFailed(Verb, frozen=True):
    """Report of the agent that the mesh's start failed; `fault` says whether the user or the host
    has caused it.
    """

    fault: Literal["user", "host"]
    text: str


class Respawned(Verb, frozen=True):
    """Report of the agent that it replaced dead ranks by processes that wait for a `Heal`."""

    ranks: tuple[RankInfo, ...]


class RespawnFailed(Verb, frozen=True):
    """Report of the agent that it could not replace dead ranks; living ranks continue."""

    ranks: tuple[int, ...]
    text: str


class Died(Verb, frozen=True):
    """Report of the agent that a rank's process ended, with the reason."""

    rank: int
    reason: str
    last_output: str


class StoreDied(Verb, frozen=True):
    """Report of the agent that the c10d store's process ended; a new one listens on `new_port` (0:
    it could not be started), on another host if `new_address` is given.
    """

    reason: str
    new_port: int = 0
    new_address: str = ""


class AgentFault(Verb, frozen=True):
    """Report of the agent that one of its handlers raised an exception; the agent continues."""

    text: str


class Ranked(Verb, frozen=True):
    """A message that all these ranks have sent: the agent merges equal messages into one."""

    ranks: tuple[int, ...]
    verb: FromRank


class LogText(Verb, frozen=True):
    """Answer to `ReadLog`; `num_dropped_bytes` of the log precede the text or were rotated away.
    `place` is the path of the log, with the host's name before it if the mesh spans several hosts.
    """

    request: int
    text: str
    num_dropped_bytes: int
    place: str = ""


class Stopped(Verb, frozen=True):
    """Report of the agent that all other processes of the mesh have ended; the agent exits next."""

    reason: str


ToController = (
    Welcome | Standing | Refused | Detached | Progress | MeshReady | StartFailed | Respawned
    | RespawnFailed | Died | StoreDied | StoreUp | AgentFault | Ranked | LogText | HostReport
    | ClockReading | Stopped | Chunk | Unwanted | FilesAnswer
)  # fmt: skip
