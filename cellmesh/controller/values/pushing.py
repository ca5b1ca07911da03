"""Binds values of the notebook to names on ranks: whole, in parts, or as DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import MeshUsageError
from ...wire.values import PushNames, PushParts
from ..arguments import dump_names
from ..rank_set import RankSet
from .sharding import check_placements, check_shard, reduce_to_cpu


def push(
    ranks: RankSet,
    names: Mapping[str, Any],
    shard: int | None,
    placements: Sequence[Any] | str | None,
) -> None:
    """Bind names in the namespaces of ranks, and wait.

    Args:
        ranks, shard, placements: as of `Ranks.push`.
        names: name -> value.

    Raises:
        UnpicklableError, MeshUsageError: as `Ranks.push`.
    """
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise MeshUsageError(f"{name!r} is no name")
    if shard is not None and placements is not None:
        raise MeshUsageError("shard and placements exclude each other: placements make DTensors")
    dim, placed, session = 0, None, ranks.session
    if shard is not None:
        dim = check_shard(names, shard, len(ranks))
    elif placements is not None:
        placed = check_placements(names, placements, session.dims, len(ranks) == session.num_ranks)
    pickled, buffers, num_bytes = ranks.lend(
        *dump_names(names, None if shard is None and placed is None else reduce_to_cpu)
    )

    verb: PushNames | PushParts
    if shard is None and placed is None:
        verb = PushNames(0, pickled)
    else:
        verb = PushParts(0, pickled, ranks.ranks, dim, placed)
    ranks.start(verb, "push", buffers, num_bytes=num_bytes).result()
