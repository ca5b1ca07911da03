"""Messages that ask ranks' control threads and the agent for the state of ranks and processes."""

from __future__ import annotations

from typing import Literal

import msgspec

from .groups import GroupCount, InFlight
from .stopping import Steps
from .verb import Verb

Phase = Literal["starting", "idle", "running", "dead"]


class MemoryUse(msgspec.Struct, frozen=True, array_like=True):
    """Memory that one rank uses, in bytes; the last cell may still be running.

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


class Probe(Verb, frozen=True):
    """Ask a rank's control thread what the main thread is doing (`RankState`)."""

    request: int


class RankState(Verb, frozen=True):
    """A rank's answer to `Probe`: the state of its main thread.

    `run` is -1 when idle; `line` is the line of the cell (0: unknown), `inner` that of another cell
    whose function it has called ("In[8] line 10"); `where` is the call it is in, as written, or the
    innermost Python function; `collective` the torch.distributed call it
    waits in ("" if none), `group` that call's group by torch's name, and `waited_s` for how long;
    `asks` that it waits for the user (`InputRequest`); `is_broken` that its groups must be healed,
    `is_half_done` that a step has left models half done; `counts` has all its groups, with their
    last collectives; `in_flight` the oldest operation of each group and peer; `making` the members
    of the group that it is making (`group` is its name); `memory` what it holds; `steps` the steps
    of its optimizers in the last run, if it is idle.
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
        ending: how it ended, if it is dead.
        predecessor_ending: how the rank ended that it replaced, as long as it is empty: no work
            that `fills` (`Relay`) has ended well on it; "" for all others.
        last_output: the last lines of the one that ended, if either is given.
        is_heard: whether its host is; what else stands here is older if it is not.
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
    """The agent's answer to `ReadHost`; `at_s` is when it measured the processes, by the host's
    monotonic clock.
    """

    request: int
    ranks: tuple[RankInfo, ...]
    at_s: float = 0.0
