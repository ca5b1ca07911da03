"""Compares replicas across ranks by their digests, describes the differences, and copies the
variables of one rank to others.
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
from ..wire.values import PushNames
from ..wire.verbs import RunCell
from .rank_set import RankSet

NUM_MEASURED = 3
_MAX_SHOWN, _MAX_GROUPS = 10, 8


@dataclass(frozen=True)
class Difference:
    """A tensor or value that differs among ranks that should hold equal ones.

    Attributes:
        path: path of the tensor or value.
        kind: kind of the tensor or value, as the ranks report it.
        groups: groups of ranks with equal values, the largest group first.
        what: the aspect in which the groups differ: elements, shape or dtype, value, or state.
        missing: ranks that do not have it.
        texts: for each group, its shape and dtype, or its value if it is plain; "" if only elements
            differ.
        distances: first rank of a group -> distance of the group from the first group; for the
            first few differences only.
        is_meant_equal: whether the values must be equal, as they belong to a wrapped model, an
            optimizer over one, or a DTensor; for other values this is unknown.
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
        """Describe the groups of ranks with equal values."""
        shown = [describe_ranks(group) for group in self.groups[:_MAX_GROUPS]]
        num_more = len(self.groups) - len(shown)
        parts = [" ≠ ".join([*shown, *([f"{num_more} more kinds"] if num_more else [])])]
        if self.missing:
            parts.append(f"missing on {describe_ranks(self.missing)}")
        return "; ".join(parts)

    def describe(self) -> str:
        """Describe by how much, or in which aspect, the groups differ."""
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
    """The differences of replicas that ``%dist_check`` finds; its repr is the report.

    Attributes:
        expression: the checked expression; "" for all wrapped models and optimizers.
        ranks: ranks that were checked.
        num_compared: number of tensors and values with more than one replica.
        num_alone: number of tensors and values of which each rank has a part of its own.
        differences: differences that should not be, in the order in which they were found.
        expected: differences that are normal (generators, statistics of BatchNorm), each with the
            reason.
        not_wrapped: models and optimizers that were left out, as it is unknown which ranks should
            hold equal values.
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
        """Whether all replicas are bitwise equal; also true without replicas (`num_compared`)."""
        return not self.differences

    def summary(self) -> str:
        """Return a sentence on the compared values and whether they are equal."""
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
        """Return remarks on values that were not compared, and on expected differences."""
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
    """The result of ``%dist_sync``: the number of tensors made equal, and the names of tensors that
    were left as they were.
    """

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
        ranks: ranks to compare.
        expression: a model, an optimizer, a tensor, or a container of them; ``rng`` for the random
            generators; "" for all wrapped models and the optimizers over them.

    Returns:
        The differences; the first few are measured.

    Raises:
        RankFailure: the expression has no value on a rank, or its value nothing to compare.
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
        expression: as in `check`.
        source: the rank whose values are copied.

    Raises:
        MeshUsageError: there is no rank `source`, or `ranks` are not all ranks.
        RankFailure: the value is missing on a rank, or its structure differs between ranks.
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
    """Return a difference with the distances of the groups' values from that of its first group, if
    they can be measured.
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
    """Compare the answers that ranks gave to a `Check` of replicas, and return a report of the
    differences.

    Args:
        expression: the checked expression.
        by_rank: rank -> its answer.
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
    source: RankSet, targets: RankSet, others: RankSet
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Copy the variables of one rank to other ranks. Blocks.

    The values are sent as one pickle, so that references between them (from an optimizer to its
    model) are kept; the notebook passes the pickle on without loading it.

    Args:
        source: set of the one rank to copy from (``mesh[0]``).
        targets: ranks to copy to.
        others: all other living ranks, including `source`: their DDP models are rebuilt to work
            with the copies.

    Returns:
        The names of the copied variables; and name -> reason for variables that cannot be copied.
    """
    names: tuple[str, ...]
    names, refused = source.start(SurveyNames(), "survey of names").result()
    names = tuple(names)
    if _try_to_copy(source, targets, names):
        # Copy one by one to find those that fail; the others are then sent as one pickle.
        reasons = {name: _try_to_copy(source, targets, [name]) for name in names}
        refused = {**refused, **{name: why for name, why in reasons.items() if why}}
        names = tuple(name for name in names if name not in refused)
        if together := _try_to_copy(source, targets, names):
            refused, names = {**refused, **dict.fromkeys(names, together)}, ()
    if names:
        module = "__import__('importlib').import_module('cellmesh.workers.replicas.copying')"
        join = f"{module}.renew_reducers({targets.ranks})"
        cell = RunCell(0, join, join, b"", 0, quiet=True)
        others.start(cell, "copy of names").result()
    return names, refused


def _try_to_copy(source: RankSet, targets: RankSet, names: Sequence[str]) -> str:
    """Copy these variables; return the reason if a value cannot be pickled or loaded, else ""."""
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
