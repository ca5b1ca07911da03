"""Saves variables of ranks as a checkpoint, and loads them, after a check on all ranks: either all
ranks save, or none does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import MeshUsageError
from ..wire.ranks import describe_groups, describe_ranks
from ..wire.values import CheckLoad, CheckSave, LoadNames, SaveNames
from .rank_set import RankSet
from .run import Results


def save(ranks: RankSet, names: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Save variables of all ranks as one checkpoint; see `Mesh.save`."""
    target = _absolute(path)
    if not names:
        raise MeshUsageError("name what to save")
    names = tuple(dict.fromkeys(names))
    dead = sorted(ranks.session.dead_ranks)
    if dead:
        raise MeshUsageError(
            f"{describe_ranks(dead)} died, and what was there cannot be saved: `%dist_heal`, then "
            "load what was saved before"
        )
    _check(ranks, CheckSave(names, target))
    ranks.start(SaveNames(names, target), "the save").result()


def load(ranks: RankSet, names: Sequence[str], path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Load a checkpoint into variables of ranks; see `Ranks.load`."""
    target = _absolute(path)
    names = tuple(dict.fromkeys(names))
    everyone = ranks.part(ranks.ranks)  # `Results`, also of one rank
    _check(everyone, CheckLoad(names, target))
    run = everyone.start(LoadNames(names, target), "the load")
    loaded: Results[tuple[str, ...]] = run.result()
    return tuple(dict.fromkeys(name for theirs in loaded.values() for name in theirs))


def _check(ranks: RankSet, request: CheckSave | CheckLoad) -> None:
    run = ranks.start(request, "the check")
    problems: Mapping[int, str] = run.result()
    if told := tell(problems):
        raise MeshUsageError(told)


def tell(problems: Mapping[int, str]) -> str:
    """Join the reasons for which ranks cannot save or load into one text, in which equal reasons
    appear once; "" if there are none.
    """
    texts = set(problems.values())
    return texts.pop() if len(texts) == 1 else "; ".join(describe_groups(problems))


def _absolute(path: str | os.PathLike[str]) -> str:
    """Make a path absolute, relative to the notebook's working directory, not to the ranks'."""
    if not os.fspath(path):
        raise MeshUsageError("name a directory for the checkpoint")
    return str(Path(path).expanduser().absolute())
