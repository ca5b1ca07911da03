"""Asks ranks what they did in their last cells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import HostError, MeshUsageError
from ...wire.inspect import HistoryQuery
from ..inspect.query import ANSWER_S, look
from .chrome import trace_of
from .match import History
from .model import merge
from .profile import check_target

if TYPE_CHECKING:
    from ..rank_set import RankSet

# Of all ranks together; of one rank at least so many.
_MAX_OPERATIONS, _MIN_OPERATIONS = 30_000, 300


def remember(ranks: RankSet, num_cells: int, trace: str | Path | None = None) -> History:
    """Return what ranks did in their last cells (see `Ranks.timeline`)."""
    ranks.session._check_usable(())
    if num_cells < 1:
        raise MeshUsageError(f"num_cells must be at least 1, not {num_cells}")
    path = None if trace is None else check_target(Path(trace))
    max_operations = max(_MIN_OPERATIONS, _MAX_OPERATIONS // len(ranks))
    subject = HistoryQuery(num_cells, max_operations)
    looked = look(ranks, subject, is_beside=True, timeout_s=ANSWER_S)
    history = merge(looked.answers, looked.refusals, num_cells)
    if path is not None:
        try:
            path.write_bytes(trace_of(history))
        except OSError as error:
            raise HostError(f"the trace could not be written: {error}") from error
    return history
