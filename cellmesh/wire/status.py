"""Messages that ask ranks' control threads and the agent for the state of ranks and processes."""

from __future__ import annotations

from typing import Literal

import msgspec

from .groups import GroupCount, InFlight
from .peer_calls import PeerWork
from .stopping import Steps
from .verbs import Verb

Phase = Literal["starting", "idle", "running", "dead"]


class MemoryUse(msgspec.Struct, frozen=True, array_like=True):
    """Memory that one rank uses, in bytes; the last cell may still be running.

    Attributes:
        rss: resident memory. Pages that ranks share (of modules imported before the fork) count in
            each rank.
        peak_rss: maximum of `rss` since the rank began.
        cell_rss: change of `rss` by the last cell.
        cell_peak_rss: increase of `peak_rss` by the last cell.
        execution_count: n of the last cell, ``In[n]``; 0 before the first.
        allocated, peak_allocated, reserved: memory of torch's allocator on the rank's GPU.
        cell_allocated: change of `allocated` by the last cell.
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


class WaitingCall(msgspec.Struct, frozen=True, array_like=True):
    """An asynchronous cell or call that has begun on a rank and waits there beside other work.

    Attributes:
        run: its run.
        title: name of the function; ``In[n]`` for a cell.
        where: the call that it awaits, and the file and line of it; "" if unknown.
    """

    run: int
    title: str
    where: str = ""


class Probe(Verb, frozen=True):
    """Ask a rank's control thread for the state of the main thread (`RankState`)."""

    request: int


class RankState(Verb, frozen=True):
    """A rank's answer to `Probe`: the state of its main thread.

    `run` is -1 when idle. `line` is the line of the cell (0: unknown), `inner` the line of another
    cell whose function it has called ("In[8] line 10"). `where` is the current call, as written, or
    the innermost Python function. `collective` is the torch.distributed call in which it waits (""
    if none), `group` torch's name of that call's group, and `waited_s` the time waited, in seconds.
    `asks`: it waits for the user (`InputRequest`). `is_broken`: its groups must be healed.
    `is_half_done`: a step has left models half updated. `counts` has all its groups, with their
    last collectives; `in_flight` the oldest operation of each group and peer; `making` the members
    of the group that it is making (`group` is its name); `memory` the memory that it uses; `steps`
    the steps of its optimizers in the last run, if it is idle. `waiting` has the calls that wait
    beside other work; while one of them executes, the rank is idle unless it is in a collective.
    `peer` names the calls of other ranks' actors for whose values it waits; `serves` is the call of
    another rank that it executes.
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
    in_flight: tuple[InFlight, ...] = ()
    inner: str = ""
    steps: Steps = Steps()
    is_half_done: bool = False
    making: tuple[int, ...] = ()
    waiting: tuple[WaitingCall, ...] = ()
    peer: str = ""
    serves: PeerWork | None = None


class Stacks(Verb, frozen=True):
    """Ask a rank's control thread for the Python stacks of the rank's threads (`StackText`)."""

    request: int
    all_threads: bool = False


class StackText(Verb, frozen=True):
    """A rank's answer to `Stacks`: the Python stacks of its threads as text."""

    request: int
    text: str


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """The process and phase of one rank, as the agent knows them.

    Attributes:
        ending: how the process ended, if the rank is dead.
        predecessor_ending: how the process ended that this one has replaced, as long as no work
            that `fills` (`Relay`) has succeeded on the new one; "" for all others.
        last_output: last lines of output of the process that ended, if either is given.
        is_heard: whether the rank's host is connected; if not, the other fields may be outdated.
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
    is_heard: bool = True


class ReadHost(Verb, frozen=True):
    """Ask the agent for the processes of its ranks and their memory (`HostReport`)."""

    request: int


class HostReport(Verb, frozen=True):
    """The agent's answer to `ReadHost`: its ranks' processes and memory, measured at `at_s` of the
    host's monotonic clock. `preloaded`: a sentence for users on modules that were imported before
    ranks were forked.
    """

    request: int
    ranks: tuple[RankInfo, ...]
    at_s: float = 0.0
    preloaded: str = ""
