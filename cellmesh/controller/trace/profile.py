"""Asks ranks for the timeline of their last cells, and profiles a cell on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ...errors import HostError, MeshUsageError, RankFailure, RanksInterrupted
from ...wire.inspect import HistoryQuery
from ...wire.ranks import describe_groups, format_ranks
from ...wire.trace import (
    MAX_TRACE_BYTES,
    BeginProfile,
    EndProfile,
    OperatorKind,
    RankProfile,
)
from ..core.clocks import ClockOffset
from ..inspect import ANSWER_S, look
from ..rank_set import RankSet
from ..run import Run
from .chrome import merge_traces, trace_of
from .history import NO_CLOCKS, History, merge
from .operations import Lateness

# Bound for all ranks together, and the least that one rank may send.
_MAX_OPERATIONS, _MIN_OPERATIONS = 30_000, 300
NO_REASONS: Mapping[int, str] = MappingProxyType({})


def remember(ranks: RankSet, num_cells: int, trace: str | Path | None = None) -> History:
    """Ask ranks for their last cells, and return the joined history (see `Ranks.timeline`)."""
    ranks.session.runs.check_usable(())
    if num_cells < 1:
        raise MeshUsageError(f"num_cells must be at least 1, not {num_cells}")
    path = None if trace is None else check_target(Path(trace))
    max_operations = max(_MIN_OPERATIONS, _MAX_OPERATIONS // len(ranks))
    subject = HistoryQuery(num_cells, max_operations)
    looked = look(ranks, subject, is_beside=True, timeout_s=ANSWER_S)
    clocks = ranks.session.clocks(looked.answers)
    history = merge(looked.answers, looked.refusals, num_cells, clocks)
    if path is not None:
        write_trace(path, trace_of(history))
    return history


def check_target(path: Path) -> Path:
    """Return the absolute path of a trace file to write, after a check of its directory.

    Raises:
        MeshUsageError: `path` is a directory, or its directory does not exist.
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


def write_trace(path: Path, trace: bytes) -> None:
    """Write a Chrome trace to a file.

    Raises:
        HostError: it could not be written.
    """
    try:
        path.write_bytes(trace)
    except OSError as error:
        raise HostError(f"the trace could not be written: {error}") from error


class Ranks(Protocol):
    """Protocol of the public `Ranks`, whose module imports this one."""

    rank_set: RankSet

    def submit_cell(
        self,
        source: str,
        *,
        execution_count: int = 0,
        argv: str | None = None,
        in_order: bool = False,
    ) -> Run[None]:
        """Run source in the ranks' namespace, and return without waiting."""


@dataclass(frozen=True)
class OperatorByRank:
    """An operator's self time on the ranks, in seconds.

    Attributes:
        name: name that torch's profiler gives the operator.
        kind: computation, communication, or a kernel on a GPU.
        num_calls: number of calls on the rank that called it most.
        min_s, mean_s, max_s: self time over all profiled ranks; a rank that never called it counts
            as zero.
        max_rank: the rank on which it took longest.
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
        history: timeline of the cell: when each rank (or its GPU) computed, was in a collective,
            and waited for which rank.
        by_rank: rank -> its profile.
        missing: rank -> the reason for which its profile is missing.
        trace_path: path of the merged trace, if one was requested.
    """

    history: History
    by_rank: Mapping[int, RankProfile]
    missing: Mapping[int, str] = field(default_factory=dict)
    trace_path: Path | None = None

    @property
    def operators(self) -> list[OperatorByRank]:
        """All operators of the profile, in descending order of mean time."""
        return compare_operators(self.by_rank)

    @property
    def lateness(self) -> dict[int, Lateness]:
        """How late each rank began collectives, and how long others waited for it."""
        return self.history.lateness()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the parts that the profile lacks, with the reasons."""
        notes = [f"nothing of {line}" for line in describe_groups(self.missing)]
        for rank, one in sorted(self.by_rank.items()):
            if one.trace_path:
                notes.append(
                    f"rank {rank}'s trace of {one.num_trace_bytes / 1e6:.0f} MB is too long to be "
                    f"merged (at most {MAX_TRACE_BYTES >> 20} MB a rank): it is in "
                    f"{one.trace_path}; profile fewer steps to have all in one"
                )
            if one.problem:
                notes.append(f"rank {rank}: {one.problem}")
        return (*(self.history.notes if self.by_rank else ()), *notes)

    def __repr__(self) -> str:
        ranks = format_ranks(list(self.by_rank))
        return f"<profile of ranks {ranks}: {self.history.took_s():.2f} s>"


def profile_of(
    by_rank: Mapping[int, RankProfile],
    missing: Mapping[int, str] = NO_REASONS,
    clocks: Mapping[int, ClockOffset] = NO_CLOCKS,
    trace_path: Path | None = None,
) -> Profile:
    """Join the ranks' profiles of one cell.

    Args:
        by_rank, missing, trace_path: see `Profile`.
        clocks: rank -> the offset of its host's clock; none on one host.
    """
    pasts = {rank: one.past for rank, one in by_rank.items()}
    busy = {rank: one.busy for rank, one in by_rank.items() if one.busy is not None}
    return Profile(merge(pasts, {}, 1, clocks, busy), by_rank, missing, trace_path)


class Profiling:
    """A cell that is being profiled; `run` is the run of the cell.

    Args:
        ranks: ranks that run the cell.
        source: source of the cell.
        trace: path to write the merged trace to; None to write none.
        execution_count, argv: as in `Ranks.submit_cell`.

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
            begin.result()  # ranks whose profiler is not ready yet would look like stragglers
        except BaseException:
            begin.cancel()
            for rank in self._living():  # else the next cell would be profiled
                self._ask(rank, "")
            raise
        self.run: Run[None] = ranks.submit_cell(
            source, execution_count=execution_count, argv=argv, in_order=True
        )

    def collect(self) -> Profile:
        """Return the ranks' profiles once the cell has ended or failed, and write the trace.
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
            except Exception as error:  # the rank has died, or was interrupted
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
        return one.start(EndProfile(path), "the profile")

    def _write(self, by_rank: dict[int, RankProfile], missing: dict[int, str]) -> Profile:
        traces = {rank: one.trace for rank, one in by_rank.items() if one.trace}
        clocks = self._ranks.session.clocks(by_rank)
        path = self._trace if traces else None
        if path is not None:
            epochs_ns = {rank: one.epoch_ns for rank, one in by_rank.items()}
            write_trace(path, merge_traces(traces, clocks, epochs_ns))
        return profile_of(by_rank, missing, clocks, path)


def profile(ranks: Ranks, source: str, trace: str | Path | None = None) -> Profile:
    """Run a cell under the profiler, and wait (see `Ranks.profile`)."""
    profiling = Profiling(ranks, source, trace)
    try:
        profiling.run.result()
    except (RankFailure, RanksInterrupted) as error:
        error.profile = profiling.collect()
        raise
    return profiling.collect()


def _beside(path: Path, rank: int) -> Path:
    """Return the path of one rank's trace: ``trace.rank3.json`` beside ``trace.json``."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def compare_operators(by_rank: Mapping[int, RankProfile]) -> list[OperatorByRank]:
    """Return every operator's self time on the ranks, in descending order of mean time."""
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
