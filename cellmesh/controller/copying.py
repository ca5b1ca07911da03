"""Copies the variables of one rank to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import RankDied, RankFailure
from ..wire.replicas import GatherNames, SurveyNames
from ..wire.user_code import RunCell
from ..wire.values import PushNames
from .rank_set import RankSet


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
        module = "__import__('importlib').import_module('cellmesh.workers.replicas.arriving')"
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
