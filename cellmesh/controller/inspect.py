"""Inspects values on ranks: sends queries, compares replicas, counts elements.

Busy ranks answer from their control threads. Where code was run to have a value, ranks keep the
value: see `PinnedValue`.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CellmeshError
from ..stdlib import time
from ..wire.inspect import (
    Digests,
    Elements,
    Forget,
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

if TYPE_CHECKING:
    import numpy.typing as npt

    from .session.session import Session

Parts = tuple[tuple[int, int], ...]

# So many tensors with NaN, or with infinities, are named.
_MAX_ODD = 3
_NUM_BINS = 48
# Of a nest: more tensors than this are not listed.
_MAX_ITEMS = 20_000
# Of how many of a value's tensors histograms are made, and differences measured, at once.
_MAX_SPREADS = 12
_MAX_MEASURED = 12
# Elements that are brought here to be compared, of all ranks together.
_MAX_COMPARED = 1 << 18
_NUM_PARTS = 256
_NUM_ROUNDS = 4
# What is answered beside a cell runs nothing that may take longer; whoever does not may never do: C
# code that holds the interpreter. What widgets ask waits no longer for anybody.
ANSWER_S = 20.0


# ---- queries


@dataclass(frozen=True)
class QueryResult:
    """The ranks' answers to a query, and refusals.

    Attributes:
        answers: rank -> its answer (see `looks`).
        refusals: rank -> why it has none: the expression raised there, or the rank is dead.
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
    """Ask ranks a query. Blocks until each has answered, or will not answer.

    Args:
        ranks: who is asked; those that are dead are told of as such.
        subject: what to look at.
        is_beside: never wait for a rank's turn, also where it seems idle.
        takes_turn: always wait for it, also where a rank is busy: on its main thread, code may run.
        timeout_s: how long to wait; ranks that have not answered by then count as refusing. None
            waits as long as it takes for those whose turn it is, and `ANSWER_S` for those that
            answer beside.

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
            if takes_turn:  # ranks that wait in it for one that has raised are to be released
                session.runs.wait_for(run.number)
    limit_s = ANSWER_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    for run, channel in runs:
        # Whoever stops waiting for what is answered beside a cell does not mean to interrupt the
        # cell's rank.
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
            session.runs.give_up(run.number)  # what it evaluates would hold up what comes next
        for rank in late:
            looked.refusals[rank] = Refusal("TimeoutError", f"no answer within {limit_s:.3g} s")
    return looked


def look_at_one(ranks: RankSet, subject: Query, timeout_s: float) -> Any | None:
    """Ask one rank a query that does not wait for the rank's runs: the lowest idle rank, else the
    lowest busy one.

    Args:
        ranks: who may be asked.
        subject: what to look at.
        timeout_s: how long to wait.

    Returns:
        Its answer; None if there is no such rank, or none in time, or it refused.

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


class PinnedValue:
    """A value that ranks keep for an open inspector; ranks keep it until it is released or four
    newer ones exist.

    Whoever shows it lets go of it once it is shown anew or stands still.

    Args:
        session: of the mesh.
        ranks: who keeps it.

    Attributes:
        token: by which they know it.
    """

    def __init__(self, session: Session, ranks: Sequence[int]) -> None:
        self.token = secrets.token_hex(8)
        self.session = session
        self._ranks = tuple(ranks)
        # The collector may call this anywhere, so that it asks nobody: see `forget_what_is_gone`.
        gone = session.gone_holds
        self._finalizer = weakref.finalize(self, gone.append, (self.token, self._ranks))
        self._finalizer.atexit = False

    def let_go(self) -> None:
        """Have the ranks drop the value; does not wait."""
        if self._finalizer.detach():
            _forget(self.session, self.token, self._ranks)


def about(subject: ValueQuery, pinned: PinnedValue | None) -> ValueQuery:
    """Return a query with a pinned value as its subject, in place of an expression."""
    return subject if pinned is None else msgspec.structs.replace(subject, token=pinned.token)


def forget_what_is_gone(session: Session) -> None:
    """Have ranks drop the values that they keep for inspections which were garbage-collected here;
    does not wait.
    """
    gone = session.gone_holds
    while gone:
        _forget(session, *gone.popleft())


def _forget(session: Session, token: str, ranks: Sequence[int]) -> None:
    try:
        look(RankSet(session, ranks), Forget((token,)), is_beside=True, timeout_s=0.0)
    except CellmeshError:  # the mesh has ended, and they with it
        pass


# ---- replicas


@dataclass(frozen=True)
class LargestDifference:
    """By how much the elements of replicas differ at most.

    Attributes:
        largest: the largest magnitude of a difference; infinite where one has a NaN or an infinity
            and another has not; 0 where only bits differ that have no value (-0.0, a NaN's).
        is_lower_bound: only some elements were compared.
    """

    largest: float
    is_lower_bound: bool

    def __str__(self) -> str:
        if math.isinf(self.largest):
            return "by a NaN or an infinity"
        if not self.largest:
            return (
                "in no element that was compared"
                if self.is_lower_bound
                else "in bits, not in value"
            )
        return f"by {'at least' if self.is_lower_bound else 'up to'} {self.largest:.4g}"


@dataclass(frozen=True)
class Replicas:
    """A set of ranks that should hold equal values of a tensor, grouped by equal values.

    Attributes:
        shard: what part of the whole they hold, see `TensorSummary`.
        alike: those that are equal, bit for bit; one tuple means that all are.
        difference: how much they differ; None if they do not, or nobody knows.
    """

    shard: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...]
    difference: LargestDifference | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that should hold equal values."""
        return tuple(sorted(rank for ranks in self.alike for rank in ranks))

    @property
    def is_equal(self) -> bool:
        """Whether all ranks hold equal values."""
        return len(self.alike) == 1

    def __str__(self) -> str:
        text = " ≠ ".join(format_ranks(ranks) for ranks in self.alike)
        return text if self.difference is None else f"{text} {self.difference}"


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one tensor on several ranks.

    Attributes:
        replicas: those that should be equal, by the part they hold.
        unread: ranks whose values could not be read, and which are not compared.
    """

    replicas: tuple[Replicas, ...]
    unread: tuple[int, ...] = ()

    @property
    def unequal(self) -> tuple[Replicas, ...]:
        """The sets of ranks that should hold equal values and do not."""
        return tuple(each for each in self.replicas if not each.is_equal)

    def __str__(self) -> str:
        if len(self.unread) + sum(len(each.ranks) for each in self.replicas) == 1:
            return "one rank"
        if self.unequal:
            text = "replicas differ: ranks " + "; ".join(map(str, self.unequal))
            return f"{text}; not compared: {format_ranks(self.unread)}" if self.unread else text
        if self.unread:
            return "not compared: not all of it can be read"
        if all(len(each.ranks) == 1 for each in self.replicas):
            return "sharded: every rank holds a part of its own"
        is_sharded = len(self.replicas) > 1
        return f"{'sharded; ' if is_sharded else ''}replicas are equal, bit for bit"


def compare(facts: Mapping[int, TensorSummary]) -> Comparison:
    """Compare one tensor on several ranks by its digests.

    The same part of DTensors on different meshes may be replicas (over another dim of the mesh) or
    not (stages of a pipeline): they are where they are equal, and else they are let be.

    Args:
        facts: rank -> its view.
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


def split(parts: Sequence[tuple[int, int]], num_parts: int) -> Parts:
    """Divide ranges of a tensor's elements into about so many pieces of about equal size."""
    total = sum(end - begin for begin, end in parts)
    size = max(1, -(-total // num_parts))
    return tuple(
        (start, min(start + size, end)) for begin, end in parts for start in range(begin, end, size)
    )


def size_of(parts: Sequence[tuple[int, int]]) -> int:
    """Return how many elements some ranges of a tensor have in all."""
    return sum(end - begin for begin, end in parts)


def differing(parts: Parts, digests: Sequence[Sequence[str]]) -> Parts:
    """Return the ranges of elements that are not equal on all ranks, by their digests.

    Args:
        parts: the runs.
        digests: for each rank, one a run.
    """
    return tuple(
        part for part, *of_ranks in zip(parts, *digests, strict=True) if len(set(of_ranks)) > 1
    )


def exact(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert numbers to a type that subtracts them exactly: float64 is too short for 64-bit
    integers.
    """
    import numpy as np

    return values.astype(np.longdouble) if values.dtype.kind in "iu" else values


def largest_difference(values: Sequence[npt.NDArray[Any]]) -> float:
    """Return the largest difference between the first array and the others, see
    `LargestDifference`.
    """
    import numpy as np

    first, largest = exact(values[0]), 0.0
    for other in map(exact, values[1:]):
        with np.errstate(all="ignore"):
            is_same = (first == other) | (np.isnan(first) & np.isnan(other))
            distances = np.abs(first - other)[~is_same]
        if distances.size:
            largest = max(largest, float(np.where(np.isfinite(distances), distances, np.inf).max()))
    return largest


# ---- answers


@dataclass(frozen=True)
class Spread:
    """The histograms of one tensor on all ranks, on one scale.

    Attributes:
        low, high: the scale, cut into equal bins.
        counts: rank -> elements in each bin.
    """

    low: float
    high: float
    counts: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Mapping[int, TensorSummary]):
    """What ranks answered on one value; a Mapping rank -> `TensorSummary` of those that have it.

    Of a value with several tensors in it, these facts are of the whole, and those of its tensors
    are in `facts_of`.

    Attributes:
        expression: what was inspected.
        found: rank -> what it has.
        refusals: rank -> why it has nothing: the expression raised there, or the rank is dead.
        comparisons: path -> whether replicas are equal.
        spreads: path -> histograms, of the first tensors.
        ranks: who was asked, and can be asked for more; None if nobody can.
        pinned: keeps the value on its ranks, if code was run for it; None if it is found anew each
            time.
        took_s: how long that took.
        grads: what was found are the gradients in it.
    """

    expression: str
    found: Mapping[int, ValueSummary]
    refusals: Mapping[int, Refusal] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    ranks: RankSet | None = None
    pinned: PinnedValue | None = None
    took_s: float = 0.0
    grads: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the value's tensors, on any rank; "" is the value itself."""
        return tuple(self.by_path())

    @property
    def is_one(self) -> bool:
        """Whether the value is one tensor or plain value on each rank, no module or container."""
        return all([item.path for item in found.items] == [""] for found in self.found.values())

    @property
    def torn(self) -> tuple[int, ...]:
        """The ranks that were computing while they were inspected, so that their values may be half
        old and half new.
        """
        return tuple(rank for rank, found in self.found.items() if found.is_torn)

    @property
    def num_left_out(self) -> int:
        """How many more tensors a rank has in the value than are described."""
        return max((found.num_left_out for found in self.found.values()), default=0)

    def facts_of(self, path: str) -> dict[int, TensorSummary]:
        """Return the summary of the tensor at a path, by rank."""
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
    """Say in which tensors of a value, and on which ranks, there are NaN and infinities; "" for
    none.
    """
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
    is_beside: bool = False,
    timeout_s: float | None = None,
) -> Inspection:
    """Inspect a value on some ranks; blocks until all have answered (see `look`).

    A path of names, attributes and constant indices is followed, and nothing runs; ranks that are
    busy answer from their control threads. Any other expression is evaluated once on each rank, if
    none is busy; ranks keep its value as long as the inspection lives (see `PinnedValue`).

    Args:
        ranks: the ranks.
        expression: a name, or any Python expression.
        grads: the gradients in the value instead of its tensors.
        is_beside: never wait for a rank's turn, also where it seems idle, and run no code.
        timeout_s: how long to wait for each answer; None as long as it takes for ranks that are
            idle.

    Raises:
        NoMeshError: the mesh has ended.
    """
    began_at = time.monotonic()
    subject = Overview(expression, grads=grads, max_items=_MAX_ITEMS)
    result, pinned = _find(ranks, subject, is_beside, timeout_s)
    source = InspectionSource(ranks, expression, pinned, timeout_s)
    found = Inspection(
        expression, dict(sorted(result.answers.items())), dict(sorted(result.refusals.items()))
    )
    summaries = found.by_path()
    comparisons = {path: compare(of_ranks) for path, of_ranks in summaries.items()}
    unequal = [path for path, comparison in comparisons.items() if comparison.unequal]
    for path in unequal[:_MAX_MEASURED]:
        comparisons[path] = source.compare(path, summaries[path], is_beside)
    tensors = [path for path, of_ranks in summaries.items() if _scale_of(of_ranks)]
    spreads = {
        path: source.spread(path, summaries[path], is_beside) for path in tensors[:_MAX_SPREADS]
    }
    return dataclasses.replace(
        found,
        comparisons=comparisons,
        spreads={path: spread for path, spread in spreads.items() if spread is not None},
        ranks=ranks,
        pinned=pinned,
        grads=grads,
        took_s=time.monotonic() - began_at,
    )


class InspectionSource:
    """Answers questions about one expression, by asking ranks.

    Its methods block, and are called on any thread. A rank that does not answer in time counts as
    refusing, and so do all ranks once the mesh has ended.

    Args:
        ranks: the ranks.
        expression: what is inspected.
        pinned: the value that an inspection has found; questions are about that.
        timeout_s: how long to wait for an answer; see `look`.
        grads: gradients are inspected.
    """

    def __init__(
        self,
        ranks: RankSet,
        expression: str,
        pinned: PinnedValue | None = None,
        timeout_s: float | None = ANSWER_S,
        grads: bool = False,
    ) -> None:
        self._ranks = ranks
        self._pinned = pinned
        self._timeout_s = timeout_s
        self._grads = grads
        self._is_closed = False
        self.expression = expression
        self.ranks = ranks.ranks

    def look(
        self, subject: ValueQuery, ranks: Sequence[int] | None = None, is_beside: bool = False
    ) -> QueryResult:
        """Ask some ranks, or all, a query about the inspected value."""
        asked = self._ranks.part(self.ranks if ranks is None else ranks)
        try:
            subject = about(subject, self._pinned)
            return look(asked, subject, is_beside=is_beside, timeout_s=self._timeout_s)
        except CellmeshError as error:
            return QueryResult({}, dict.fromkeys(asked.ranks, _refusal(error)))

    def inspect(self, is_beside: bool) -> Inspection:
        """Inspect the expression on all ranks; later questions are about the value found."""
        try:
            found = inspect(
                self._ranks,
                self.expression,
                grads=self._grads,
                is_beside=is_beside,
                timeout_s=self._timeout_s,
            )
        except CellmeshError as error:
            return Inspection(self.expression, {}, dict.fromkeys(self.ranks, _refusal(error)))
        if found.found:
            former, self._pinned = self._pinned, found.pinned
            if former is not None:
                former.let_go()
            if self._is_closed and self._pinned is not None:  # closed while the ranks answered
                self._pinned.let_go()
        return found

    def compare(
        self, path: str, summaries: Mapping[int, TensorSummary], is_beside: bool = False
    ) -> Comparison:
        """Compare one tensor's replicas, and measure by how much they differ."""
        comparison = compare(summaries)
        replicas = tuple(
            each
            if each.is_equal
            else dataclasses.replace(
                each, difference=self._difference(path, each, summaries, is_beside)
            )
            for each in comparison.replicas
        )
        return dataclasses.replace(comparison, replicas=replicas)

    def spread(
        self, path: str, summaries: Mapping[int, TensorSummary], is_beside: bool = False
    ) -> Spread | None:
        """Make one tensor's histograms on all ranks, on one scale; None without finite elements."""
        scale = _scale_of(summaries)
        if scale is None:
            return None
        low, high = scale
        ranks = [rank for rank, summary in summaries.items() if summary.min is not None]
        subject = Histogram(self.expression, path, low=low, high=high, num_bins=_NUM_BINS)
        return Spread(low, high, dict(sorted(self.look(subject, ranks, is_beside).answers.items())))

    def is_busy(self) -> bool:
        """Return whether any of the ranks executes a run."""
        return bool(self._ranks.session.runs.busy_ranks() & set(self.ranks))

    def close(self) -> None:
        """Have the ranks drop the inspected value; does not wait."""
        self._is_closed = True
        if self._pinned is not None:
            self._pinned.let_go()

    def _difference(
        self,
        path: str,
        replicas: Replicas,
        summaries: Mapping[int, TensorSummary],
        is_beside: bool,
    ) -> LargestDifference | None:
        """Measure by how much replicas differ, from a bounded part of them."""
        ranks = [ranks[0] for ranks in replicas.alike]
        shapes = {summaries[rank].local_shape for rank in ranks}
        if len(shapes) > 1 or None in shapes:
            return None
        most = max(_MAX_COMPARED // len(ranks), 1)
        parts: Parts = ((0, summaries[ranks[0]].num_elements),)
        for _ in range(_NUM_ROUNDS):  # narrow down to where they differ
            if size_of(parts) <= most or len(parts) > _NUM_PARTS // 4:
                break
            parts = split(parts, _NUM_PARTS)
            digests = self.look(Digests(self.expression, path, parts=parts), ranks, is_beside)
            if digests.refusals:
                return None
            parts = differing(parts, list(digests.answers.values()))
        is_bound = size_of(parts) > most
        if is_bound:
            each = max(1, most // len(parts))
            parts = tuple((begin, min(end, begin + each)) for begin, end in parts)
        elements = self.look(Elements(self.expression, path, parts=parts), ranks, is_beside)
        values = list(elements.answers.values())
        if elements.refusals or len({each.shape for each in values}) > 1:  # it has changed since
            return None
        return LargestDifference(largest_difference(values), is_bound)


def _find(
    ranks: RankSet, subject: Overview, is_beside: bool, timeout_s: float | None
) -> tuple[QueryResult, PinnedValue | None]:
    """Ask ranks for a summary of the expression's value; a path of names is looked up, any other
    expression runs on all ranks or none, as it may contain a collective.
    """
    session, expression = ranks.session, subject.expression
    forget_what_is_gone(session)
    result = look(ranks, subject, is_beside=is_beside, timeout_s=timeout_s)
    wanted = [rank for rank, refusal in result.refusals.items() if refusal.needs_code]
    if not wanted or is_beside:
        return result, None
    busy = session.runs.busy_ranks() & set(ranks.ranks)
    if busy:
        why = f"{describe_ranks(busy)} {'is' if len(busy) == 1 else 'are'} busy"
        text = f"{expression!r} has to run code, on all ranks or on none, and {why}"
        result.refusals.update(dict.fromkeys(set(wanted) - busy, Refusal("CellmeshError", text)))
        return result, None
    pinned = PinnedValue(session, wanted)
    subject = msgspec.structs.replace(subject, runs=True, token=pinned.token)
    again = look(ranks.part(wanted), subject, takes_turn=True, timeout_s=timeout_s)
    refusals = {rank: why for rank, why in result.refusals.items() if rank not in wanted}
    answers = {**result.answers, **again.answers}
    return QueryResult(answers, {**refusals, **again.refusals}), pinned


def _scale_of(summaries: Mapping[int, TensorSummary]) -> tuple[float, float] | None:
    if all(summary.shape == () for summary in summaries.values()):  # a number has no histogram
        return None
    lows = [summary.min for summary in summaries.values() if summary.min is not None]
    highs = [summary.max for summary in summaries.values() if summary.max is not None]
    return (min(lows), max(highs)) if lows else None


def _refusal(error: Exception) -> Refusal:
    return Refusal(type(error).__name__, str(error))
