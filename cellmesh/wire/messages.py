"""Every verb of the protocol, one frozen Struct each.

Three parties speak: the controller (in the notebook's kernel), one agent a host, and the ranks. The agent
reads headers and never a payload: what passes between controller and rank goes through it as it came.

=================  =============================================================
`ToAgent`          controller -> agent
`Work`             controller -> main thread of a rank (carried by `Relay`)
`Control`          controller -> control thread of a rank (carried by `Relay`)
`FromRank`         rank -> agent; most travel on to the controller in `Ranked`
`ToController`     agent -> controller
=================  =============================================================

Structs are encoded as arrays (``array_like``): fields are positional, so their order is part of the
protocol; `PROTOCOL` changes when it does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 1

Channel = Literal["work", "control"]
StreamName = Literal["stdout", "stderr"]
DisplayKind = Literal["display", "update", "result", "clear"]
Phase = Literal["starting", "idle", "running", "dead"]


class Verb(msgspec.Struct, frozen=True, array_like=True, tag_field="type", tag=True):
    """Base of all messages."""


class Pickled(msgspec.Struct, frozen=True, array_like=True):
    """A pickle (protocol 5); its large buffers follow the header as frames of their own."""

    stream: bytes
    num_buffers: int = 0


# ---------------------------------------------------------------- controller -> agent


class Hello(Verb, frozen=True):
    """First message of a controller; until it is accepted nothing else is read from that peer."""

    key: bytes
    protocol: int
    pid: int


class Relay(Verb, frozen=True):
    """Pass the next `num_frames` frames, unread, to these ranks' work or control socket.

    `run` is what the ranks will answer about, so that the agent can merge their answers and name the
    cell that low-level output belongs to; -1 for messages that start no run.
    """

    ranks: tuple[int, ...]
    channel: Channel
    run: int
    num_frames: int


class Restart(Verb, frozen=True):
    """Kill every rank and fork new ones, with a DeviceMesh of these dims (none: as before)."""

    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()


class Stop(Verb, frozen=True):
    """End every process of the mesh, remove its files, exit."""


class ReadLog(Verb, frozen=True):
    """Ask for the last `num_bytes` of a rank's log."""

    request: int
    rank: int
    num_bytes: int


class ReadHost(Verb, frozen=True):
    """Ask for what the agent knows of its processes (`HostReport`)."""

    request: int


ToAgent = Hello | Relay | Restart | Stop | ReadLog | ReadHost


# ---------------------------------------------------------------- controller -> rank


class RunCell(Verb, frozen=True):
    """Run a cell in the rank's namespace.

    `transformed` is the source with IPython's magics turned into calls ("": the rank is to do that);
    `execution_count` is the notebook's ``In[n]``; `quiet` drops the value of a last expression.
    """

    run: int
    source: str
    transformed: str
    is_async: bool
    execution_count: int
    quiet: bool = False


class RunCall(Verb, frozen=True):
    """Call a pickled ``(function, args, kwargs)`` and answer with its value."""

    run: int
    payload: Pickled


class PushNames(Verb, frozen=True):
    """Bind the names of a pickled dict in the rank's namespace."""

    run: int
    payload: Pickled


class PullNames(Verb, frozen=True):
    """Answer with the value of an expression in the rank's namespace."""

    run: int
    expression: str


class Inspect(Verb, frozen=True):
    """Answer with a description of an expression's value (shape, dtype, statistics, digest)."""

    run: int
    expression: str


class SetMesh(Verb, frozen=True):
    """Build the torch DeviceMesh of these dims and bind it to ``mesh``. Collective."""

    run: int
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]


class Interrupt(Verb, frozen=True):
    """Raise KeyboardInterrupt in `run` if it is what the rank runs, and free it from a collective."""

    run: int


class Probe(Verb, frozen=True):
    """Ask the control thread what the main thread is doing (`RankState`)."""

    request: int


class Peek(Verb, frozen=True):
    """As `Inspect`, answered by the control thread, while the main thread is busy."""

    run: int
    expression: str


class Leave(Verb, frozen=True):
    """End the process: run its exit handlers, then exit with code 0."""


Work = RunCell | RunCall | PushNames | PullNames | Inspect | SetMesh
Control = Interrupt | Probe | Peek | Leave


# ---------------------------------------------------------------- rank -> agent


class RankReady(Verb, frozen=True):
    """The rank has a process group and waits for work."""

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
    """Output that was too much to show; the rank's log has it."""

    run: int
    num_lines: int
    num_bytes: int


class Display(Verb, frozen=True):
    """A rich display: `bundle` is JSON ``{"data", "metadata"}``; `display_id` is "" where it has none."""

    run: int
    kind: DisplayKind
    bundle: bytes
    display_id: str = ""


class Done(Verb, frozen=True):
    """A run ended well; a payload only where the verb promised a value."""

    run: int
    payload: Pickled | None = None


class Failed(Verb, frozen=True):
    """A run ended with an exception. `line` is the failing line of the cell (0: none)."""

    run: int
    type_name: str
    text: str
    traceback: str
    line: int
    payload: Pickled | None = None
    why_no_payload: str = ""


class RankState(Verb, frozen=True):
    """What a rank's main thread is doing.

    `run` is -1 when idle; `line` is the line of the cell (0: unknown); `where` is the innermost Python
    function; `collective` the torch.distributed call it is in ("" if none).
    """

    request: int
    run: int
    execution_count: int
    line: int
    where: str
    collective: str
    device: str
    device_bytes: int


FromRank = RankReady | RankUnready | Output | Skipped | Display | Done | Failed | RankState


# ---------------------------------------------------------------- agent -> controller


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """One rank, as the agent knows it."""

    rank: int
    pid: int
    host: str
    phase: Phase
    device: str = ""
    backend: str = ""
    rss_bytes: int = 0
    ending: str = ""


class Welcome(Verb, frozen=True):
    """The agent accepts the controller."""

    protocol: int
    agent_pid: int
    host: str


class Refused(Verb, frozen=True):
    """The agent does not accept the controller."""

    reason: str


class Progress(Verb, frozen=True):
    """How far the start has come."""

    stage: str
    num_ready: int


class MeshReady(Verb, frozen=True):
    """Every rank has answered."""

    ranks: tuple[RankInfo, ...]


class StartFailed(Verb, frozen=True):
    """The mesh did not come up; `fault` says whose it is."""

    fault: Literal["user", "host"]
    text: str


class Died(Verb, frozen=True):
    """A rank's process ended."""

    rank: int
    reason: str
    last_output: str


class StoreDied(Verb, frozen=True):
    """The process of the c10d store ended; new process groups need a restart."""

    reason: str


class Ranked(Verb, frozen=True):
    """What these ranks said, all the same."""

    ranks: tuple[int, ...]
    verb: FromRank


class LogText(Verb, frozen=True):
    """Answer to `ReadLog`; `num_dropped_bytes` were rotated away or lie before this text."""

    request: int
    text: str
    num_dropped_bytes: int


class HostReport(Verb, frozen=True):
    """Answer to `ReadHost`."""

    request: int
    ranks: tuple[RankInfo, ...]


class Stopped(Verb, frozen=True):
    """Everything has ended; the agent exits after this."""

    reason: str


ToController = (
    Welcome
    | Refused
    | Progress
    | MeshReady
    | StartFailed
    | Died
    | StoreDied
    | Ranked
    | LogText
    | HostReport
    | Stopped
)
