"""Compares replicas across ranks (joins the ranks' digests and describes the differences), and
copies the variables of one rank to others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import MeshUsageError, RankDied, RankFailure
from ..wire.ranks import describe_ranks, group_ranks
from ..wire.replicas import (
    Check,
    Compare,
    Distance,
    Entry,
    GatherNames,
    GatherTensor,
    Kind,
    SurveyNames,
    Sync,
    SyncReport,
)
from ..wire.user_code import RunCell
from ..wire.values import PushNames
from .rank_set import RankSet

NUM_MEASURED = 3
_MAX_SHOWN, _MAX_GROUPS = 10, 8


@dataclass(frozen=True)
class Difference:
    """A tensor or value that differs among ranks that should hold the same.

    Attributes:
        path: where it is.
        kind: what it is.
        groups: ranks that agree with each other; the first is what most hold.
        what: in what they differ.
        missing: ranks that do not have it.
        texts: one a group: its shape and dtype, or its value if it is plain; "" where only elements
            differ.
        distances: first rank of a group -> how far that group is from the first; for the first few
            differences only.
        is_meant_equal: whether a wrapped model, an optimizer over one or a DTensor says that these
            ranks hold the same; of other values nobody knows.
    """

    path: str
    kind: Kind
    groups: tuple[tuple[int, ...], ...]
    what: str
    missing: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    distances: Mapping[int, Distance] = field(default_factory=dict)
    is_meant_equal: bool = True

    def describe_ranks(self) -> str:
        """Describe which ranks agree with each other."""
        shown = [describe_ranks(group) for group in self.groups[:_MAX_GROUPS]]
        num_more = len(self.groups) - len(shown)
        parts = [" ≠ ".join([*shown, *([f"{num_more} more kinds"] if num_more else [])])]
        if self.missing:
            parts.append(f"missing on {describe_ranks(self.missing)}")
        return "; ".join(parts)

    def describe(self) -> str:
        """Describe by how much, or in what, the ranks differ."""
        if self.distances:
            return "; ".join(
                _describe_distance(distance, group)
                for group in self.groups[1:_MAX_GROUPS]
                if (distance := self.distances.get(group[0])) is not None
            )
        if any(self.texts):
            return ", ".join(
                f"{text} on {describe_ranks(group)}"
                for text, group in zip(self.texts[:_MAX_GROUPS], self.groups, strict=False)
            )
        return self.what


@dataclass(frozen=True)
class CheckReport:
    """The result of ``%dist_check``: differences of replicas; shows itself as text.

    Attributes:
        expression: what was checked; "" for all wrapped models and optimizers.
        ranks: the ranks asked.
        num_compared: tensors and values of which more than one rank should hold the same.
        num_alone: of which every rank holds a part of its own.
        differences: in the order in which they were found, the first one first.
        expected: differences that are normal (generators, statistics of BatchNorm), with why.
        not_wrapped: models and optimizers that were left out, as nothing says who should hold the
            same.
        not_readable: tensors without a digest (sparse, meta).
    """

    expression: str
    ranks: tuple[int, ...]
    num_compared: int = 0
    num_alone: int = 0
    differences: tuple[Difference, ...] = ()
    expected: tuple[tuple[Difference, str], ...] = ()
    not_wrapped: tuple[str, ...] = ()
    not_readable: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all replicas are equal, bit for bit; also true if there are none
        (`num_compared`).
        """
        return not self.differences

    def summary(self) -> str:
        """Return in one sentence what was compared, and whether it was equal."""
        what = self.expression or "models and optimizers"
        alone = f"; {_count(self.num_alone)} held by one rank each" if self.num_alone else ""
        compared = _count(self.num_compared)
        if self.differences:
            num_paths = len({difference.path for difference in self.differences})
            return f"{what}: {num_paths:,} of {compared} differ{alone}"
        if self.num_compared:
            return f"{what}: replicas are equal, bit for bit ({compared} compared{alone})"
        if len(self.ranks) == 1:
            return f"{what}: one rank has nothing to be compared with"
        if self.num_alone:
            return f"{what}: every rank holds a part of its own; there are no replicas to compare"
        return (
            f"{what}: no wrapped model (DDP, FSDP, tensor parallel) is at top level: name what to "
            "check"
        )

    def notes(self) -> list[str]:
        """Return remarks on what was not compared, or may differ."""
        notes = []
        if len(self.differences) > _MAX_SHOWN:
            notes.append(f"... and {len(self.differences) - _MAX_SHOWN} more that differ")
        reasons: dict[str, list[str]] = {}
        for difference, why in self.expected:
            reasons.setdefault(why, []).append(difference.path)
        for why, paths in reasons.items():
            notes.append(f"{_list(paths)} differ, as they may: {why}")
        if self.not_wrapped:
            notes.append(f"not wrapped: name it to compare it: {_list(self.not_wrapped)}")
        if self.not_readable:
            notes.append(
                f"not compared, as its elements cannot be read: {_list(self.not_readable)}"
            )
        if self.differences:
            name = self.expression or self.differences[0].path.partition(".")[0]
            sync = f"`%dist_sync {name} --from {self.differences[0].groups[0][0]}`"
            is_meant = all(difference.is_meant_equal for difference in self.differences)
            notes.append(
                f"{sync} makes replicas equal"
                if is_meant
                else f"if they are meant to be equal: {sync} overwrites the others"
            )
        return notes

    def __repr__(self) -> str:
        shown = self.differences[:_MAX_SHOWN]
        rows = [(each.path, each.describe_ranks(), each.describe()) for each in shown]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"  {path:{widths[0]}}  {ranks:{widths[1]}}  {far}" for path, ranks, far in rows]
        return "\n".join([self.summary(), *lines, *self.notes()])


@dataclass(frozen=True)
class SyncSummary:
    """The result of ``%dist_sync``: how many tensors are equal now, and what could not be."""

    expression: str
    source: int
    reports: Mapping[int, SyncReport]

    def __repr__(self) -> str:
        what = self.expression or "models and optimizers"
        reports = self.reports.values()
        num_equal = max(report.num_equal for report in reports)
        lines = [f"{what}: {_count(num_equal)} are those of rank {self.source} now"]
        if created := [rank for rank, report in self.reports.items() if report.num_created]:
            lines.append(f"optimizer state was made on {describe_ranks(created)}")
        if num_alone := max(report.num_alone for report in reports):
            lines.append(
                f"{_count(num_alone)} of each rank have no replica and were left as they were: if "
                "their step was interrupted, load a checkpoint"
            )
        if left_out := list(dict.fromkeys(path for report in reports for path in report.left_out)):
            lines.append(f"not alike on all ranks, and left as they were: {_list(left_out)}")
        return "\n".join(lines)


def check(ranks: RankSet, expression: str = "") -> CheckReport:
    """Compare replicas that should be equal on ranks. Blocks; runs no collective.

    Args:
        ranks: whom to ask.
        expression: a model, an optimizer, a tensor, or what holds them; ``rng`` for the generators;
            "" for all wrapped models and the optimizers over them.

    Returns:
        What differs; the first few differences are measured.

    Raises:
        RankFailure: a rank does not have it, or finds nothing in it to compare.
    """
    asked = ranks.part(ranks.ranks)
    run = asked.start(Check(expression), "the check")
    report = bring_together(expression, run.result())
    measured = [
        _measure(ranks, expression, difference) if index < NUM_MEASURED else difference
        for index, difference in enumerate(report.differences)
    ]
    return dataclasses.replace(report, differences=tuple(measured))


def sync(ranks: RankSet, expression: str, source: int) -> SyncSummary:
    """Make replicas equal to those of a rank, in place. Blocks; all ranks take part.

    Args:
        ranks: all ranks of the mesh.
        expression: as for `check`.
        source: whose values are taken.

    Raises:
        MeshUsageError: there is no rank `source`, or these are not all ranks.
        RankFailure: the value is not there or not alike on all ranks.
    """
    num_ranks = ranks.session.num_ranks
    if not 0 <= source < num_ranks:
        raise MeshUsageError(f"there is no rank {source}: the mesh has 0-{num_ranks - 1}")
    if len(ranks) != num_ranks:
        raise MeshUsageError(
            "all ranks take part in making replicas equal: call it on the whole mesh"
        )
    everyone = ranks.part(ranks.ranks)
    run = everyone.start(Sync(expression, source), "the sync")
    return SyncSummary(expression, source, run.result())


def _measure(ranks: RankSet, expression: str, difference: Difference) -> Difference:
    """Return the difference with the distance of each group of ranks from the first, where it can
    be measured.
    """
    if difference.what != "elements":
        return difference
    path = difference.path
    reference, *others = difference.groups
    holder = ranks.part(reference[:1])
    tensor, buffers = holder.start(GatherTensor(expression, path)).payload_of(reference[0])
    far = ranks.part([group[0] for group in others])
    run = far.start(Compare(expression, path, tensor), "the check", buffers)
    return dataclasses.replace(difference, distances=dict(run.result()))


def bring_together(expression: str, by_rank: Mapping[int, Sequence[Entry]]) -> CheckReport:
    """Compare what ranks answered to a `Check`, and return the differences that should not be.

    Args:
        expression: what was checked.
        by_rank: what each rank that was asked told.
    """
    asked = tuple(sorted(by_rank))
    held = {rank: {entry.path: entry for entry in entries} for rank, entries in by_rank.items()}
    num_compared = num_alone = 0
    differences: list[Difference] = []
    expected: list[tuple[Difference, str]] = []
    left_out: dict[str, None] = {}
    unreadable: dict[str, None] = {}
    for path in dict.fromkeys(entry.path for entries in by_rank.values() for entry in entries):
        entries = {rank: held[rank][path] for rank in asked if path in held[rank]}
        if any(entry.kind == "not wrapped" for entry in entries.values()):
            left_out[path] = None
            continue
        named = {entry.ranks or asked for entry in entries.values()}
        sets = {tuple(rank for rank in ranks if rank in by_rank) for ranks in named}
        for ranks in sorted(sets):
            if len(ranks) == 1:
                continue
            members = {rank: entries[rank] for rank in sorted(ranks) if rank in entries}
            if not all(entry.digest for entry in members.values()):
                unreadable[path] = None
                continue
            difference = _difference(path, members, ranks)
            if difference is not None:
                why = next(iter(members.values())).why_differs
                expected.append((difference, why)) if why else differences.append(difference)
        num_compared += any(len(ranks) > 1 for ranks in sets)
        num_alone += all(len(ranks) == 1 for ranks in sets)
    return CheckReport(
        expression,
        asked,
        num_compared,
        num_alone,
        tuple(differences),
        tuple(expected),
        tuple(left_out),
        tuple(unreadable),
    )


def _difference(path: str, members: Mapping[int, Entry], ranks: Sequence[int]) -> Difference | None:
    groups = group_ranks(
        {rank: (one.kind, one.dtype, one.shape, one.digest) for rank, one in members.items()}
    )
    missing = tuple(rank for rank in sorted(ranks) if rank not in members)
    if len(groups) == 1 and not missing:
        return None
    alike = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
    firsts = [members[group[0]] for group in alike]
    texts = tuple(entry.text for entry in firsts)
    what = "state" if firsts[0].kind == "rng" else "elements"
    if len(groups) == 1:
        what, texts = "", ()
    elif len({(entry.kind, entry.dtype, entry.shape) for entry in firsts}) > 1:
        what = "shape or dtype"
        texts = tuple(entry.text or f"{entry.shape} {entry.dtype}" for entry in firsts)
    elif any(texts):
        what = "value"
    is_meant_equal = any(entry.ranks for entry in members.values())
    kind, groups_alike = firsts[0].kind, tuple(alike)
    return Difference(path, kind, groups_alike, what, missing, texts, is_meant_equal=is_meant_equal)


def _describe_distance(distance: Distance, group: Sequence[int]) -> str:
    who = describe_ranks(group)
    if not distance.num_differing:
        return f"{who}: only in the sign of zeros or the bits of NaNs"
    parts = [f"{who}: {distance.num_differing:,} of {distance.num_elements:,} elements"]
    if distance.num_nan < distance.num_differing:
        parts.append(f"up to {distance.max_abs:.3g} apart")
    if distance.num_nan:
        parts.append(f"{distance.num_nan:,} are NaN on one side only")
    where = list(distance.first_index)
    return f"{', '.join(parts)}; first at {where}: {distance.ours} there, not {distance.theirs}"


def _count(number: int) -> str:
    return f"{number:,} tensor{'' if number == 1 else 's'} or value{'' if number == 1 else 's'}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    rest = len(names) - _MAX_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def copy_names(
    source: RankSet, targets: RankSet, others: RankSet | None = None
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Copy the variables of one rank to other ranks. Blocks.

    The values travel as one pickle, so that what belongs together (a model and its optimizer) still
    does; the notebook passes it on unread.

    Args:
        source: one rank (``mesh[0]``).
        targets: those that get them.
        others: those that have lived on, `source` among them: their DDP models are made to go on
            with the copies.

    Returns:
        The names copied, and those that cannot be, with the reason.
    """
    names: tuple[str, ...]
    names, refused = source.start(SurveyNames(), "survey of names").result()
    names = tuple(names)
    if _try_to_copy(source, targets, names):
        # One by one, to see which: what is left then travels as one pickle.
        reasons = {name: _try_to_copy(source, targets, [name]) for name in names}
        refused = {**refused, **{name: why for name, why in reasons.items() if why}}
        names = tuple(name for name in names if name not in refused)
        if together := _try_to_copy(source, targets, names):
            refused, names = {**refused, **dict.fromkeys(names, together)}, ()
    if names and others is not None:
        module = "__import__('importlib').import_module('cellmesh.workers.replicas.copying')"
        join = f"{module}.renew_reducers({targets.ranks})"
        cell = RunCell(0, join, join, False, 0, quiet=True)
        others.start(cell, "copy of names").result()
    return names, refused


def _try_to_copy(source: RankSet, targets: RankSet, names: Sequence[str]) -> str:
    """Copy these variables; return why not, if a value cannot be pickled or loaded."""
    if not names:
        return ""
    try:
        gathering = source.start(GatherNames(tuple(names)), "copy of names")
        pickled, buffers = gathering.payload_of(source.ranks[0])
        targets.start(PushNames(0, pickled), "copy of names", buffers).result()
    except RankFailure as failure:
        errors = failure.exceptions_by_rank
        if any(isinstance(each, RankDied) for each in errors.values()):
            raise
        rank, error = next(iter(errors.items()))
        return f"{type(error).__name__} on rank {rank}: {error}"
    return ""
