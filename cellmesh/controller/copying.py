"""Copies names of one rank to new ranks; the values pass through the notebook unread."""

from __future__ import annotations

from collections.abc import Mapping

from ..wire.messages import RunCell
from ..wire.replicas import GatherNames, SurveyNames
from ..wire.values import PushNames
from .rank_set import RankSet


def copy_names(
    source: RankSet, targets: RankSet, others: RankSet | None = None
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Copy the names of one rank's namespace. Blocks.

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
    if names:
        gathering = source.start(GatherNames(tuple(names)), "copy of names")
        pickled, buffers = gathering.payload_of(source.ranks[0])
        targets.start(PushNames(0, pickled), "copy of names", buffers).result()
        if others is not None:
            module = "__import__('importlib').import_module('cellmesh.workers.replicas.arriving')"
            join = f"{module}.renew_reducers({targets.ranks})"
            cell = RunCell(0, join, join, False, 0, quiet=True)
            others.start(cell, "copy of names").result()
    return tuple(names), refused
