"""Copies what a rank holds to ranks that are new, without looking into it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..wire.messages import GatherNames, PushNames, RunCell, SurveyNames
from .ranks import Ranks


def copy_names(
    source: Ranks, targets: Ranks, others: Ranks | None = None
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
    names, refused = source._start(
        lambda number: SurveyNames(number), title="survey of names"
    ).result()
    if names:
        gathering = source._start(
            lambda number: GatherNames(number, tuple(names)), title="copy of names"
        )
        pickled, buffers = gathering.payload_of(source.ranks[0])
        targets._start(lambda number: PushNames(number, pickled), buffers, "copy of names").result()
        if others is not None:
            module = "__import__('importlib').import_module('cellmesh.workers.replicas.arriving')"
            join = f"{module}.renew_reducers({targets.ranks})"
            cell = RunCell(0, join, join, False, 0, quiet=True)
            others._start(
                lambda number: msgspec.structs.replace(cell, run=number), title="copy of names"
            ).result()
    return tuple(names), refused
