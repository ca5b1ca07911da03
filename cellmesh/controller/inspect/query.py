"""Sends queries to ranks; busy ranks answer from their control threads.

Where code was run to have a value, ranks keep the value: see `PinnedValue`.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...errors import CellmeshError
from ...stdlib import time
from ...wire.inspect import (
    Forget,
    OfValue,
    Query,
    Refusal,
    TensorSummary,
    ValueSummary,
)
from ...wire.messages import Channel
from ...wire.ranks import describe_groups, describe_ranks
from ..rank_set import RankSet
from .replica_diff import (
    Comparison,
)

if TYPE_CHECKING:
    from ..rank_set import RankSet
    from ..session.session import Session


# So many tensors with NaN, or with infinities, are named.
_MAX_ODD = 3


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
    """

    expression: str
    found: Mapping[int, ValueSummary]
    refusals: Mapping[int, Refusal] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    ranks: RankSet | None = None
    pinned: PinnedValue | None = None
    took_s: float = 0.0

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


Subject = TypeVar("Subject", bound=OfValue)

# What is answered beside a cell runs nothing that may take longer; whoever does not may never do: C
# code that holds the interpreter. What widgets ask waits no longer for anybody.
ANSWER_S = 20.0


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


def about(subject: Subject, pinned: PinnedValue | None) -> Subject:
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
