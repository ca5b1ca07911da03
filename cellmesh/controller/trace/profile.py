"""Profiles a cell on all its ranks, and finds the rank that the others waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec

from ...errors import HostError, MeshUsageError, RankFailure, RanksInterrupted
from ...wire.ranks import describe_groups, format_ranks
from ...wire.trace import BeginProfile, EndProfile, OperatorKind, RankProfile, read_epoch_ns
from ..core.clocks import ClockOffset, describe_clocks
from ..rank_set import RankSet
from ..run import Run
from .chrome import merge_traces
from .lateness import Lateness, add_up_lateness, describe_lateness
from .operations import MESSAGES, Match, Operation, match, with_waits

# A longer trace of one rank is not sent, and stays where the rank has written it.
MAX_TRACE_BYTES = 64 << 20


class Ranks(Protocol):
    """Protocol of the public `Ranks`, which import this module."""

    rank_set: RankSet

    def submit_cell(
        self, source: str, *, execution_count: int = 0, argv: str | None = None
    ) -> Run[None]:
        """Run source in the ranks' namespace, and return without waiting."""


@dataclass(frozen=True)
class OperatorByRank:
    """An operator's self time on the ranks, in seconds.

    Attributes:
        name: as torch's profiler has it.
        kind: computation, communication, or a kernel on a GPU.
        num_calls: on the rank that called it most.
        min_s, mean_s, max_s: over all profiled ranks; a rank that never called it counts as zero.
        max_rank: where it took longest.
    """

    name: str
    kind: OperatorKind
    num_calls: int
    min_s: float
    mean_s: float
    max_s: float
    max_rank: int


@dataclass(frozen=True)
class Profile:
    """The profile of one cell on all its ranks.

    Attributes:
        by_rank: what each rank has seen.
        missing: rank -> why there is nothing of it.
        trace_path: the merged trace, if one was wanted.
        num_trace_bytes: how long it is.
        clocks: rank -> the offset of its host's system clock, on many hosts; times are on one.
    """

    by_rank: Mapping[int, RankProfile]
    missing: Mapping[int, str] = field(default_factory=dict)
    trace_path: Path | None = None
    num_trace_bytes: int = 0
    clocks: Mapping[int, ClockOffset] = field(default_factory=dict)

    @property
    def start_ns(self) -> int:
        """When the first rank began the cell, in nanoseconds since 1970."""
        return min((one.start_ns for one in self.by_rank.values()), default=0)

    @property
    def took_s(self) -> float:
        """The time from the begin of the first rank to the end of the last, in seconds."""
        return (max((one.end_ns for one in self.by_rank.values()), default=0) - self.start_ns) / 1e9

    @property
    def operators(self) -> list[OperatorByRank]:
        """All operators of the profile, those that took longest on average first."""
        return compare_operators(self.by_rank)

    @cached_property
    def operations(self) -> dict[int, list[Operation]]:
        """Each rank's collectives and messages, and how long each waited; times count from
        `start_ns`.
        """
        return with_waits(*self._matched)

    @cached_property
    def _matched(self) -> tuple[dict[int, list[Operation]], list[Match]]:
        found = {rank: self._read(one) for rank, one in sorted(self.by_rank.items())}
        return found, match(found)

    def _read(self, one: RankProfile) -> list[Operation]:
        counts: Counter[tuple[object, ...]] = Counter()
        found = []
        for c in one.collectives:
            # The n-th on a group, or of a name, is one collective on all members. The other end
            # of a message is not known.
            kind = (c.group or c.name, c.ranks)
            counts[kind] += 1
            sequence = 0 if c.name in MESSAGES else counts[kind]
            start_ns = c.start_ns - self.start_ns
            found.append(Operation(c.name, c.group, c.ranks, start_ns, c.duration_ns, 0, sequence))
        return found

    @property
    def lateness(self) -> dict[int, Lateness]:
        """How late each rank began collectives, and how long others waited for it."""
        return add_up_lateness(*self._matched)

    def describe_trace(self) -> str:
        """Return a sentence that says where the traces were written."""
        lines = []
        if self.trace_path is not None:
            size = f"{self.num_trace_bytes / 1e6:.1f} MB"
            lines.append(
                f"trace: {self.trace_path} ({size}); open it in chrome://tracing or ui.perfetto.dev"
            )
        for rank, one in sorted(self.by_rank.items()):
            if one.trace_path:
                lines.append(
                    f"rank {rank}'s trace of {one.num_trace_bytes / 1e6:.0f} MB is too long to be "
                    f"merged (at most {MAX_TRACE_BYTES >> 20} MB a rank): it is in "
                    f"{one.trace_path}; profile fewer steps to have all in one"
                )
            if one.problem:
                lines.append(f"rank {rank}: {one.problem}")
        lines += [f"nothing of {line}" for line in describe_groups(self.missing)]
        return "\n".join(lines)

    def describe_clocks(self) -> str:
        """Say how far the hosts' clocks are apart; "" on one host."""
        return describe_clocks(self.clocks.values())

    def describe_lateness(self) -> str:
        """Describe the rank that began collectives late; "" if no rank waited noticeably."""
        return describe_lateness(self.lateness, self.took_s)

    def __repr__(self) -> str:
        return f"<profile of ranks {format_ranks(list(self.by_rank))}: {self.took_s:.2f} s>"


class Profiling:
    """A cell that is being profiled; `run` is the cell's.

    Args:
        ranks: where it runs.
        source: the cell.
        trace: where the merged trace goes; None for nowhere.
        execution_count, argv: as of `Ranks.submit_cell`.

    Raises:
        MeshUsageError: there is no directory for the trace.
    """

    def __init__(
        self,
        ranks: Ranks,
        source: str,
        trace: str | Path | None = None,
        execution_count: int = 0,
        argv: str | None = None,
    ) -> None:
        self._ranks = ranks.rank_set
        self._trace = None if trace is None else check_target(Path(trace))
        begin = self._ranks.start(BeginProfile(), "the profiler")
        try:
            begin.result()  # ranks that are not ready yet would look like stragglers
        except BaseException:
            begin.cancel()
            for rank in self._living():  # else the next cell would be profiled
                self._ask(rank, "")
            raise
        self.run: Run[None] = ranks.submit_cell(source, execution_count=execution_count, argv=argv)

    def collect(self) -> Profile:
        """Return the ranks' profiles once the cell has ended, well or not, and write the trace.
        Blocks.

        Raises:
            HostError: the trace could not be written.
        """
        self.run.wait()
        living = self._living()
        missing = {rank: "it has died" for rank in self._ranks.ranks if rank not in living}
        by_rank: dict[int, RankProfile] = {}
        asked = {
            rank: self._ask(rank, "" if self._trace is None else str(_beside(self._trace, rank)))
            for rank in living
        }
        for rank, run in asked.items():
            run.wait()
            try:
                found = run.result()
            except Exception as error:  # it has died, or was interrupted
                missing[rank] = str(error)
                continue
            if found is None:
                missing[rank] = "it did not run the cell"
            else:
                by_rank[rank] = found
        return self._write(by_rank, missing)

    def _living(self) -> list[int]:
        dead = self._ranks.session.dead_ranks
        return [rank for rank in self._ranks.ranks if rank not in dead]

    def _ask(self, rank: int, path: str) -> Run[RankProfile | None]:
        one = self._ranks.part((rank,), is_single=True)
        return one.start(EndProfile(path, MAX_TRACE_BYTES), "the profile")

    def _write(self, by_rank: dict[int, RankProfile], missing: dict[int, str]) -> Profile:
        traces = {rank: one.trace for rank, one in by_rank.items() if one.trace}
        clocks = epoch_offsets(
            by_rank,
            self._ranks.session.clocks(by_rank),
            read_epoch_ns(),
        )
        for rank, clock in clocks.items():
            by_rank[rank] = profile_on_our_clock(by_rank[rank], clock)
        if self._trace is None or not traces:
            return Profile(by_rank, missing, clocks=clocks)
        merged = merge_traces(traces, clocks)
        try:
            self._trace.write_bytes(merged)
        except OSError as error:
            raise HostError(f"the trace could not be written: {error}") from error
        return Profile(by_rank, missing, self._trace, len(merged), clocks)


def profile(ranks: Ranks, source: str, trace: str | Path | None = None) -> Profile:
    """Run a cell under the profiler, and wait (see `Ranks.profile`)."""
    profiling = Profiling(ranks, source, trace)
    try:
        profiling.run.result()
    except (RankFailure, RanksInterrupted) as error:
        error.profile = profiling.collect()
        raise
    return profiling.collect()


def epoch_offsets(
    profiles: Mapping[int, RankProfile], clocks: Mapping[int, ClockOffset], epoch_ns: int
) -> dict[int, ClockOffset]:
    """Return the offsets of hosts' system clocks, from those of their monotonic clocks.

    Args:
        profiles: of ranks.
        clocks: rank -> the offset of its host's monotonic clock.
        epoch_ns: what this host's system clock is ahead of its monotonic one.
    """
    return {
        rank: replace(clock, offset_s=clock.offset_s + (profiles[rank].epoch_ns - epoch_ns) / 1e9)
        for rank, clock in clocks.items()
    }


def profile_on_our_clock(profile: RankProfile, clock: ClockOffset) -> RankProfile:
    """Return a rank's profile with times by the clock of the notebook's host, except for the times
    in its Chrome trace.
    """
    ahead_ns = round(clock.offset_s * 1e9)
    return msgspec.structs.replace(
        profile,
        start_ns=profile.start_ns - ahead_ns,
        end_ns=profile.end_ns - ahead_ns,
        collectives=tuple(
            msgspec.structs.replace(each, start_ns=each.start_ns - ahead_ns)
            for each in profile.collectives
        ),
        busy=tuple((begin_ns - ahead_ns, length_ns) for begin_ns, length_ns in profile.busy),
    )


def check_target(path: Path) -> Path:
    """Return the absolute path of a trace file that is to be written; raise if it cannot be.

    Raises:
        MeshUsageError: nothing can be written there.
    """
    path = path.expanduser().absolute()
    if path.is_dir():
        raise MeshUsageError(
            f"{path} is a directory: give the trace a file name, like {path / 'trace.json'}"
        )
    if not path.parent.is_dir():
        raise MeshUsageError(
            f"there is no directory {path.parent} for the trace: make it, or name another"
        )
    return path


def _beside(path: Path, rank: int) -> Path:
    """Return the path of one rank's trace: ``trace.rank3.json`` beside ``trace.json``."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def compare_operators(by_rank: Mapping[int, RankProfile]) -> list[OperatorByRank]:
    """Return every operator's self time on the ranks, the longest on average first."""
    found: dict[tuple[OperatorKind, str], dict[int, tuple[int, int]]] = {}
    for rank, one in by_rank.items():
        for operator in one.operators:
            of_ranks = found.setdefault((operator.kind, operator.name), {})
            of_ranks[rank] = (operator.self_ns, operator.num_calls)
    compared = []
    for (kind, name), of_ranks in found.items():
        times = [of_ranks.get(rank, (0, 0))[0] / 1e9 for rank in by_rank]
        max_rank = max(of_ranks, key=lambda rank: of_ranks[rank][0])
        num_calls = max(calls for _, calls in of_ranks.values())
        mean_s = sum(times) / len(times)
        compared.append(
            OperatorByRank(name, kind, num_calls, min(times), mean_s, max(times), max_rank)
        )
    return sorted(compared, key=lambda operator: -operator.mean_s)
