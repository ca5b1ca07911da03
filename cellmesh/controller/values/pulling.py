"""Pulls one value from several ranks, gathered or reduced."""

from __future__ import annotations

from typing import Any

from ...errors import MeshUsageError, did_you_mean
from ...wire.segments import SegmentFrame
from ...wire.values import GatherParts, PullNames
from ..rank_set import RankSet
from . import gather as gathering


def pull_one(ranks: RankSet, expression: str, gather: bool, reduce: str | None, dim: int) -> Any:
    """Evaluate an expression on ranks, and gather or reduce their values.

    Args:
        ranks, expression, gather, reduce, dim: as of `Ranks.pull`.

    Raises:
        MeshUsageError: the options exclude each other, or the values make no whole.
        RankFailure: a rank could not evaluate or pickle it.
    """
    if gather and reduce is not None:
        raise MeshUsageError("gather and reduce exclude each other: gather puts parts together")
    if not gather and reduce not in gathering.REDUCTIONS:
        known = gathering.REDUCTIONS
        raise MeshUsageError(
            f"reduce={reduce!r} is none of {', '.join(known)}{did_you_mean(str(reduce), known)}"
        )
    verb = GatherParts if gather else PullNames
    run = ranks.start(verb(0, expression))
    if reduce is not None:
        return gathering.reduce(_by_rank(ranks, run.result()), reduce, expression)
    frames = {
        rank: buffers[0]
        for rank in ranks.ranks
        if (buffers := run.payload_of(rank)[1]) and isinstance(buffers[0], SegmentFrame)
    }
    return gathering.gather(_by_rank(ranks, run.result()), frames, dim, expression)


def _by_rank(ranks: RankSet, result: Any) -> dict[int, Any]:
    return {ranks.ranks[0]: result} if ranks.is_single else dict(result)
