"""Inspects values on ranks: sends queries, compares replicas, counts elements.

Busy ranks answer from their control threads. Ranks keep the last value for which an inspection has
run code, so that later queries can refer to it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import CellmeshError
from ..stdlib import time
from ..wire.inspect import (
    Histogram,
    Overview,
    Query,
    Refusal,
    TensorSummary,
    ValueQuery,
    ValueSummary,
)
from ..wire.messages import Channel
from ..wire.ranks import describe_groups, describe_ranks, format_ranks
from .rank_set import RankSet

# Maximum number of tensors named for NaN, and for infinities.
_MAX_ODD = 3
_NUM_BINS = 48
# Maximum number of tensors listed for a value.
_MAX_ITEMS = 20_000
# Number of a value's tensors for which histograms are made.
_MAX_SPREADS = 12
# A control thread runs no code that takes longer; a rank that has not answered by then may never
# answer, as C code holds the GIL. Widgets wait no longer for any rank.
ANSWER_S = 20.0


# ---- queries


@dataclass(frozen=True)
class QueryResult:
    """The answers of ranks to a query, and the reasons for which other ranks have refused it.

    Attributes:
        answers: rank -> its answer, of a type that depends on the query.
        refusals: rank -> the reason for which it has no answer: the expression raised there, the
            rank is dead, or it did not answer in time.
    """

    answers: dict[int, Any] = field(default_factory=dict)
    refusals: dict[int, Refusal] = field(default_factory=dict)


def look(
    ranks: RankSet,
    subject: Query,
    *,
    is_beside: bool = False,
    takes_turn: bool = False,
    timeout_s: float | None = None,
) -> QueryResult:
    """Send a query to ranks. Blocks until each rank has answered or refused; dead and silent ranks
    count as refusing.

    By default an idle rank answers on its main thread, in turn with its runs, and a busy rank on
    its control thread.

    Args:
        ranks: ranks to query; dead ranks count as refusing.
        subject: the query.
        is_beside: whether all ranks answer on their control threads.
        takes_turn: whether all ranks answer on their main threads, on which code may run.
        timeout_s: how long to wait, in seconds; ranks that have not answered by then count as
            refusing. None waits without limit for answers of main threads, and `ANSWER_S` for
            those of control threads.

    Raises:
        NoMeshError: the mesh has ended.
    """
    session = ranks.session
    dead = session.dead_ranks & set(ranks.ranks)
    busy = set(ranks.ranks) if is_beside else set() if takes_turn else session.runs.busy_ranks()
    looked = QueryResult(
        {}, {rank: Refusal("RankDied", session.why_dead(rank)) for rank in sorted(dead)}
    )
    living = [rank for rank in ranks.ranks if rank not in dead]
    runs = []
    parts: list[tuple[list[int], Channel]] = [
        ([rank for rank in living if rank not in busy], "work"),
        ([rank for rank in living if rank in busy], "control"),
    ]
    for chosen, channel in parts:
        if chosen:
            part = ranks.part(chosen)
            run = part.start(subject, "the query", channel=channel)
            runs.append((run, channel))
            if takes_turn:  # so that ranks that wait in it for a failed rank are released
                session.runs.wait_for(run.number)
    limit_s = ANSWER_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    for run, channel in runs:
        # An interrupt of this wait for a control thread must not interrupt the rank's cell.
        has_turn = channel == "work" and timeout_s is None
        if not has_turn:
            run.wait(max(0.0, deadline - time.monotonic()))
        answers, failures = run.gather(None if has_turn else 0.0)
        for rank, answer in answers.items():
            (looked.refusals if isinstance(answer, Refusal) else looked.answers)[rank] = answer
        for rank, error in failures.items():
            looked.refusals[rank] = Refusal(type(error).__name__, str(error))
        late = set(run.ranks) - answers.keys() - failures.keys()
        if late and getattr(subject, "runs", False):
            session.runs.give_up(run.number)  # its evaluation would delay later runs
        for rank in late:
            looked.refusals[rank] = Refusal("TimeoutError", f"no answer within {limit_s:.3g} s")
    return looked


def look_at_one(ranks: RankSet, subject: Query, timeout_s: float) -> Any | None:
    """Send a query to one rank, the lowest idle rank or else the lowest busy one, to be answered on
    its control thread. Blocks.

    Args:
        ranks: candidates.
        subject: the query.
        timeout_s: how long to wait, in seconds.

    Returns:
        The rank's answer; None if all ranks are dead, or the rank refused or did not answer in
        time.

    Raises:
        NoMeshError: the mesh has ended.
    """
    session = ranks.session
    dead, busy = session.dead_ranks, session.runs.busy_ranks()
    living = sorted((rank in busy, rank) for rank in ranks.ranks if rank not in dead)
    if not living:
        return None
    _, rank = living[0]
    looked = look(ranks.part([rank]), subject, is_beside=True, timeout_s=timeout_s)
    return looked.answers.get(rank)


# ---- replicas


@dataclass(frozen=True)
class Replicas:
    """A set of ranks that should hold equal values of a tensor, grouped by equal values.

    Attributes:
        shard: the part of the whole tensor that they hold, see `TensorSummary`.
        alike: groups of ranks with bitwise equal values; one group if all are equal.
    """

    shard: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that should hold equal values."""
        return tuple(sorted(rank for ranks in self.alike for rank in ranks))

    def __str__(self) -> str:
        return " ≠ ".join(format_ranks(ranks) for ranks in self.alike)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one tensor on several ranks.

    Attributes:
        replicas: sets of ranks that should hold equal values, one set for each shard.
        unread: ranks whose values could not be read, and so were not compared.
    """

    replicas: tuple[Replicas, ...]
    unread: tuple[int, ...] = ()

    @property
    def unequal(self) -> tuple[Replicas, ...]:
        """The sets of ranks that should hold equal values but do not."""
        return tuple(each for each in self.replicas if len(each.alike) > 1)

    def __str__(self) -> str:
        if len(self.unread) + sum(len(each.ranks) for each in self.replicas) == 1:
            return "one rank"
        if self.unequal:
            ranks = "; ".join(map(str, self.unequal))
            text = f"replicas differ: ranks {ranks} (%dist_check measures them)"
            return f"{text}; not compared: {format_ranks(self.unread)}" if self.unread else text
        if self.unread:
            return "not compared: not all of it can be read"
        if all(len(each.ranks) == 1 for each in self.replicas):
            return "sharded: every rank holds a part of its own"
        is_sharded = len(self.replicas) > 1
        return f"{'sharded; ' if is_sharded else ''}replicas are equal, bit for bit"


def compare(facts: Mapping[int, TensorSummary]) -> Comparison:
    """Compare one tensor on several ranks by its digests.

    Equal shards of DTensors on different submeshes may be replicas (over another dim of the mesh)
    or not (stages of a pipeline): they count as replicas only if their values are equal.

    Args:
        facts: rank -> its summary of the tensor.
    """
    parts: dict[Any, dict[Any, list[int]]] = {}
    unread = []
    for rank, fact in sorted(facts.items()):
        if not fact.digest:
            unread.append(rank)
            continue
        kind = fact.kind if fact.shape is None else ""
        same = (fact.digest, fact.local_shape, fact.dtype, kind)
        parts.setdefault((fact.shard, fact.mesh_ranks), {}).setdefault(same, []).append(rank)
    merged: dict[Any, dict[Any, list[int]]] = {}
    for (shard, mesh_ranks), alike in parts.items():
        key = (shard, next(iter(alike)) if len(alike) == 1 else mesh_ranks)
        for same, ranks in alike.items():
            merged.setdefault(key, {}).setdefault(same, []).extend(ranks)
    return Comparison(
        tuple(
            Replicas(shard, tuple(tuple(sorted(ranks)) for ranks in alike.values()))
            for (shard, _), alike in merged.items()
        ),
        tuple(unread),
    )


# ---- answers


@dataclass(frozen=True)
class Spread:
    """The histograms of one tensor on all ranks, with the same bins.

    Attributes:
        low, high: range of the bins, which have equal widths.
        counts: rank -> number of elements in each bin.
    """

    low: float
    high: float
    counts: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Mapping[int, TensorSummary]):
    """The result of inspecting a value: a Mapping from each rank that has it to a `TensorSummary`.

    For a value that contains several tensors, this summary describes the whole value; those of its
    tensors are in `facts_of`.

    Attributes:
        expression: the inspected expression.
        found: rank -> summary of its value.
        refusals: rank -> the reason for which it has no value: the expression raised there, or the
            rank is dead.
        comparisons: path -> comparison of the tensor's replicas.
        spreads: path -> histograms; of the first tensors only.
        ranks: ranks that were queried, for further queries; None if further queries are impossible.
        token: identifies the value on its ranks, if code was run for it; "" if each query looks the
            value up.
        grads: whether the gradients in the value were inspected, not its tensors.
    """

    expression: str
    found: Mapping[int, ValueSummary]
    refusals: Mapping[int, Refusal] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    ranks: RankSet | None = None
    token: str = ""
    grads: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the value's tensors on all ranks; "" is the value itself."""
        return tuple(self.by_path())

    @property
    def is_one(self) -> bool:
        """Whether the value is a single tensor or plain value on each rank, not a container."""
        return all([item.path for item in found.items] == [""] for found in self.found.values())

    @property
    def torn(self) -> tuple[int, ...]:
        """The ranks that were computing during the inspection, so that the values read may mix old
        and new elements.
        """
        return tuple(rank for rank, found in self.found.items() if found.is_torn)

    @property
    def num_left_out(self) -> int:
        """The number of the value's tensors that are not described; the maximum over ranks."""
        return max((found.num_left_out for found in self.found.values()), default=0)

    def facts_of(self, path: str) -> dict[int, TensorSummary]:
        """Return each rank's summary of the tensor at a path: rank -> `TensorSummary`."""
        return self.by_path().get(path, {})

    def by_path(self) -> dict[str, dict[int, TensorSummary]]:
        """Return the summaries of the value's tensors: path -> rank -> `TensorSummary`."""
        facts: dict[str, dict[int, TensorSummary]] = {}
        for rank, found in sorted(self.found.items()):
            for item in found.items:
                facts.setdefault(item.path, {})[rank] = item
        return facts

    def __getitem__(self, rank: int) -> TensorSummary:
        try:
            found = self.found[rank]
        except KeyError:
            why = self.refusals.get(rank)
            raise KeyError(
                f"rank {rank} {'was not asked' if why is None else f'has none: {why}'}"
            ) from None
        if len(found.items) == 1 and not found.items[0].path:
            return found.items[0]
        return TensorSummary(kind=found.kind, text=found.text)

    def __iter__(self) -> Iterator[int]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __repr__(self) -> str:
        words = {rank: f"{fact.kind} {_in_words(fact)}" for rank, fact in self.items()}
        parts = [f"on {group}" for group in describe_groups(words)]
        if odd := describe_odd(self.by_path()):
            parts.insert(0, odd)
        if self.found and "" in self.comparisons:
            parts.append(str(self.comparisons[""]))
        parts += [f"rank {rank}: {refusal}" for rank, refusal in self.refusals.items()]
        return f"<{self.expression} {'; '.join(parts)}>"


def _in_words(fact: TensorSummary) -> str:
    return fact.text if fact.is_scalar else f"{fact.dtype} {fact.shape}"


def describe_odd(by_path: Mapping[str, Mapping[int, TensorSummary]]) -> str:
    """Name the tensors of a value that have NaN or infinities, with their ranks; "" without any."""
    parts = []
    for word, count in (("NaN", "num_nan"), ("Inf", "num_inf")):
        found = {
            path: describe_ranks([rank for rank, fact in facts.items() if getattr(fact, count)])
            for path, facts in by_path.items()
            if any(getattr(fact, count) for fact in facts.values())
        }
        named = [f"{path} ({ranks})" for path, ranks in found.items() if path][:_MAX_ODD]
        more = [f"{len(found) - _MAX_ODD} more"] if len(found) > _MAX_ODD else []
        if found:
            where = f"in {', '.join([*named, *more])}" if named else f"on {found['']}"
            parts.append(f"{word} {where}")
    return "; ".join(parts)


# ---- inspecting


def inspect(
    ranks: RankSet,
    expression: str,
    *,
    grads: bool = False,
    timeout_s: float | None = None,
) -> Inspection:
    """Inspect a value on ranks. Blocks until all ranks have answered (see `look`).

    A path of names, attributes and constant indices is looked up without running code, by busy
    ranks from their control threads. Any other expression is evaluated once on each rank, if no
    rank is busy; ranks keep its value until they evaluate another one for an inspection.

    Args:
        ranks: ranks to inspect.
        expression: a name, or any Python expression.
        grads: whether to inspect the gradients in the value in place of its tensors.
        timeout_s: how long to wait for each query, in seconds; None for no limit for idle ranks.

    Raises:
        NoMeshError: the mesh has ended.
    """
    subject = Overview(expression, grads=grads, max_items=_MAX_ITEMS)
    result, token = _find(ranks, subject, timeout_s)
    source = InspectionSource(ranks, expression, token, timeout_s)
    found = Inspection(
        expression, dict(sorted(result.answers.items())), dict(sorted(result.refusals.items()))
    )
    summaries = found.by_path()
    tensors = [path for path, of_ranks in summaries.items() if _scale_of(of_ranks)]
    spreads = {path: source.spread(path, summaries[path]) for path in tensors[:_MAX_SPREADS]}
    return dataclasses.replace(
        found,
        comparisons={path: compare(of_ranks) for path, of_ranks in summaries.items()},
        spreads={path: spread for path, spread in spreads.items() if spread is not None},
        ranks=ranks,
        token=token,
        grads=grads,
    )


class InspectionSource:
    """Sends ranks queries about one expression.

    The methods block, and may be called on any thread. A rank that does not answer in time counts
    as refusing, and so do all ranks once the mesh has ended.

    Args:
        ranks: ranks to query.
        expression: the inspected expression.
        token: of the value that an earlier inspection has evaluated, to be queried; "" for none.
        timeout_s: how long to wait for an answer, in seconds; see `look`.
        grads: whether `inspect` inspects gradients.
    """

    def __init__(
        self,
        ranks: RankSet,
        expression: str,
        token: str = "",
        timeout_s: float | None = ANSWER_S,
        grads: bool = False,
    ) -> None:
        self._ranks = ranks
        self._token = token
        self._timeout_s = timeout_s
        self._grads = grads
        self.expression = expression
        self.ranks = ranks.ranks

    def look(self, subject: ValueQuery, ranks: Sequence[int] | None = None) -> QueryResult:
        """Send a query about the inspected value to some ranks, or to all."""
        asked = self._ranks.part(self.ranks if ranks is None else ranks)
        try:
            subject = msgspec.structs.replace(subject, token=self._token)
            return look(asked, subject, timeout_s=self._timeout_s)
        except CellmeshError as error:
            return QueryResult({}, dict.fromkeys(asked.ranks, _refusal(error)))

    def inspect(self) -> Inspection:
        """Inspect the expression on all ranks; later queries are about the value found.

        Raises:
            NoMeshError: the mesh has ended.
        """
        found = inspect(self._ranks, self.expression, grads=self._grads, timeout_s=self._timeout_s)
        if found.found:  # else ranks were busy, and keep the former value
            self._token = found.token
        return found

    def spread(self, path: str, summaries: Mapping[int, TensorSummary]) -> Spread | None:
        """Make one tensor's histograms on all ranks, with the same bins; None without finite
        elements.
        """
        scale = _scale_of(summaries)
        if scale is None:
            return None
        low, high = scale
        ranks = [rank for rank, summary in summaries.items() if summary.min is not None]
        subject = Histogram(self.expression, path, low=low, high=high, num_bins=_NUM_BINS)
        return Spread(low, high, dict(sorted(self.look(subject, ranks).answers.items())))


def _find(ranks: RankSet, subject: Overview, timeout_s: float | None) -> tuple[QueryResult, str]:
    """Query ranks for a summary of an expression's value; return it with the token under which
    ranks keep an evaluated value. A path of names is looked up; any other expression is evaluated
    on all ranks or none, as it may contain a collective.
    """
    session, expression = ranks.session, subject.expression
    result = look(ranks, subject, timeout_s=timeout_s)
    wanted = [rank for rank, refusal in result.refusals.items() if refusal.needs_code]
    if not wanted:
        return result, ""
    busy = session.runs.busy_ranks() & set(ranks.ranks)
    if busy:
        why = f"{describe_ranks(busy)} {'is' if len(busy) == 1 else 'are'} busy"
        text = f"{expression!r} has to run code, on all ranks or on none, and {why}"
        result.refusals.update(dict.fromkeys(set(wanted) - busy, Refusal("CellmeshError", text)))
        return result, ""
    token = secrets.token_hex(8)
    subject = msgspec.structs.replace(subject, runs=True, token=token)
    again = look(ranks.part(wanted), subject, takes_turn=True, timeout_s=timeout_s)
    refusals = {rank: why for rank, why in result.refusals.items() if rank not in wanted}
    answers = {**result.answers, **again.answers}
    return QueryResult(answers, {**refusals, **again.refusals}), token


def _scale_of(summaries: Mapping[int, TensorSummary]) -> tuple[float, float] | None:
    if all(summary.shape == () for summary in summaries.values()):  # a number has no histogram
        return None
    lows = [summary.min for summary in summaries.values() if summary.min is not None]
    highs = [summary.max for summary in summaries.values() if summary.max is not None]
    return (min(lows), max(highs)) if lows else None


def _refusal(error: Exception) -> Refusal:
    return Refusal(type(error).__name__, str(error))
