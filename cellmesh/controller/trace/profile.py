"""Profiles a cell on all its ranks, and says which rank the others waited for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import HostError, MeshUsageError, RankFailure, RanksInterrupted
from ...wire.profile import BeginProfile, Collective, EndProfile, OperatorKind, RankProfile
from ...wire.ranks import describe_groups, format_ranks
from ..run import Run
from .chrome import merge_traces

if TYPE_CHECKING:
    from ..ranks import Ranks

# A longer trace of one rank is not sent, and stays where the rank has written it.
MAX_TRACE_BYTES = 64 << 20
_MESSAGES = frozenset({"send", "recv"})
# A collective on several ranks: rank -> index in that rank's, and the members that have not begun
# it.
Match = tuple[dict[int, int], set[int]]


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
class Lateness:
    """How a rank came to the collectives that it has in common with others.

    Attributes:
        rank: which.
        num_last: to how many it came last.
        num_missed: to how many it never came, although others of the group did.
        awaited_s: how long the ranks that had come before waited for it in these, added up.
        waited_s: how long it waited for others.
    """

    rank: int
    num_last: int
    num_missed: int
    awaited_s: float
    waited_s: float


@dataclass(frozen=True)
class Profile:
    """A profiled cell.

    Attributes:
        by_rank: what each rank has seen.
        missing: rank -> why there is nothing of it.
        trace_path: the merged trace, if one was wanted.
        num_trace_bytes: how long it is.
    """

    by_rank: Mapping[int, RankProfile]
    missing: Mapping[int, str] = field(default_factory=dict)
    trace_path: Path | None = None
    num_trace_bytes: int = 0

    @property
    def start_ns(self) -> int:
        """When the first rank began, in nanoseconds since 1970."""
        return min((one.start_ns for one in self.by_rank.values()), default=0)

    @property
    def took_s(self) -> float:
        """From the first rank's begin to the last one's end."""
        return (max((one.end_ns for one in self.by_rank.values()), default=0) - self.start_ns) / 1e9

    @property
    def operators(self) -> list[OperatorByRank]:
        """All operators, those that took longest on average first."""
        return compare_operators(self.by_rank)

    @property
    def lateness(self) -> dict[int, Lateness]:
        """Who came last to collectives, and who waited for it."""
        return find_lateness({rank: one.collectives for rank, one in self.by_rank.items()})

    def describe_trace(self) -> str:
        """Where the traces are, in words."""
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

    def describe_lateness(self) -> str:
        """The straggler, in words; "" where ranks waited for nobody worth a word."""
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
        """What the ranks have seen, once the cell has ended, well or not. Blocks; writes the trace.

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
        if self._trace is None or not traces:
            return Profile(by_rank, missing)
        merged = merge_traces(traces)
        try:
            self._trace.write_bytes(merged)
        except OSError as error:
            raise HostError(f"the trace could not be written: {error}") from error
        return Profile(by_rank, missing, self._trace, len(merged))


def profile(ranks: Ranks, source: str, trace: str | Path | None = None) -> Profile:
    """Run a cell under the profiler, and wait (see `Ranks.profile`)."""
    profiling = Profiling(ranks, source, trace)
    try:
        profiling.run.result()
    except (RankFailure, RanksInterrupted) as error:
        error.profile = profiling.collect()
        raise
    return profiling.collect()


def check_target(path: Path) -> Path:
    """Where a trace is to be written, as an absolute path.

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
    """Where a rank writes its own: ``trace.rank3.json`` beside ``trace.json``."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def find_straggler(lateness: Mapping[int, Lateness], took_s: float) -> int | None:
    """The rank that the others waited for, if that is worth a word.

    Args:
        lateness: of all ranks.
        took_s: how long they ran.
    """
    if not lateness:
        return None
    missed = max(lateness.values(), key=lambda one: one.num_missed)
    if missed.num_missed:
        return missed.rank
    worst = max(lateness.values(), key=lambda one: one.awaited_s)
    is_little = worst.awaited_s < 0.05 * took_s * max(1, len(lateness) - 1)
    return None if is_little or not worst.num_last else worst.rank


def describe_lateness(lateness: Mapping[int, Lateness], took_s: float) -> str:
    """The straggler, in words; "" where there was nothing to wait for. See `find_straggler`."""
    num = sum(one.num_last for one in lateness.values())
    straggler = find_straggler(lateness, took_s)
    if straggler is None:
        return (
            f"no straggler: ranks came to {num} collectives at about the same time" if num else ""
        )
    worst = lateness[straggler]
    if worst.num_missed:
        what = "collective" if worst.num_missed == 1 else "collectives"
        return f"rank {worst.rank} never came to {worst.num_missed} {what} that others waited in"
    s = worst.awaited_s
    waited = f"{s:.1f} s" if s >= 1 else f"{s * 1e3:.3g} ms"
    return (
        f"rank {worst.rank} came last to {worst.num_last} of {num} collectives; the others waited "
        f"for it {waited}, added up"
    )


def compare_operators(by_rank: Mapping[int, RankProfile]) -> list[OperatorByRank]:
    """Every operator's self time over the ranks, those that took longest on average first."""
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


class Timed(Protocol):
    """What has a begin and a length."""

    @property
    def start_ns(self) -> int: ...

    @property
    def duration_ns(self) -> int: ...


def find_lateness(collectives: Mapping[int, Sequence[Collective]]) -> dict[int, Lateness]:
    """Who came last to collectives, and how long others waited for it.

    Args:
        collectives: rank -> its collectives, in order.
    """
    return add_up_lateness(collectives, match_collectives(collectives))


def add_up_lateness(
    collectives: Mapping[int, Sequence[Timed]], matched: Iterable[Match]
) -> dict[int, Lateness]:
    """As `find_lateness`, where it is known which of them are one."""
    totals = {rank: [0, 0, 0, 0] for rank in collectives}
    for of_ranks, missing in matched:
        if missing:
            waited_ns = sum(
                collectives[rank][index].duration_ns for rank, index in of_ranks.items()
            )
            for rank in missing:
                totals[rank][3] += 1
                totals[rank][1] += waited_ns
            for rank, index in of_ranks.items():
                totals[rank][2] += collectives[rank][index].duration_ns
            continue
        last = max(of_ranks, key=lambda rank: collectives[rank][of_ranks[rank]].start_ns)
        last_ns = collectives[last][of_ranks[last]].start_ns
        totals[last][0] += 1
        for rank, index in of_ranks.items():
            waited_ns = _waited_ns(collectives[rank][index], last_ns)
            totals[last][1] += waited_ns
            totals[rank][2] += waited_ns
    return {
        rank: Lateness(rank, num_last, num_missed, awaited_ns / 1e9, waited_ns / 1e9)
        for rank, (num_last, awaited_ns, waited_ns, num_missed) in totals.items()
    }


def find_waits(collectives: Mapping[int, Sequence[Collective]]) -> dict[int, list[int]]:
    """How long each collective waited for the last of its ranks, in nanoseconds.

    Args:
        collectives: rank -> its collectives, in order.

    Returns:
        rank -> a number for each of its collectives; 0 for those without a counterpart on others.
    """
    return add_up_waits(collectives, match_collectives(collectives))


def add_up_waits(
    collectives: Mapping[int, Sequence[Timed]], matched: Iterable[Match]
) -> dict[int, list[int]]:
    """As `find_waits`, where it is known which of them are one."""
    waits = {rank: [0] * len(of_rank) for rank, of_rank in collectives.items()}
    for of_ranks, missing in matched:
        if missing:
            for rank, index in of_ranks.items():
                waits[rank][index] = collectives[rank][index].duration_ns
            continue
        last_ns = max(collectives[rank][index].start_ns for rank, index in of_ranks.items())
        for rank, index in of_ranks.items():
            waits[rank][index] = _waited_ns(collectives[rank][index], last_ns)
    return waits


def _waited_ns(one: Timed, last_ns: int) -> int:
    return max(0, min(last_ns, one.start_ns + one.duration_ns) - one.start_ns)


def match_collectives(
    collectives: Mapping[int, Sequence[Collective]],
) -> list[Match]:
    """Which collectives of the ranks are one: the n-th of a kind on a process group, over its
    members.

    Messages are left out. Members that never came to one are named where its group is known.

    Args:
        collectives: rank -> its collectives, in order.

    Returns:
        For each of them, rank -> index in that rank's, and the members that have not begun it.
    """
    begun: dict[tuple[str, tuple[int, ...], str, int], dict[int, int]] = {}
    for rank, of_rank in collectives.items():
        counts: dict[tuple[str, tuple[int, ...], str], int] = {}
        for index, one in enumerate(of_rank):
            kind = (one.name, one.ranks, one.group)
            counts[kind] = counts.get(kind, 0) + 1
            if one.name not in _MESSAGES:
                begun.setdefault((*kind, counts[kind]), {})[rank] = index
    matched = []
    for (_, members, group, _), of_ranks in begun.items():
        expected = set(members or collectives) & set(collectives)
        missing = expected - set(of_ranks)
        if len(expected) > 1 and (not missing or group):
            matched.append((of_ranks, missing))
    return matched
