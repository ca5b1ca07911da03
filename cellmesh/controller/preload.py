"""Learns which installed modules all ranks of a mesh import, for the next zygote of the project."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..wire.preload import change_preloads, learn, list_path, names_to_import, read_preloads
from ..wire.verbs import Imports
from .kernel import own_kernel

# Imports that take this long on each rank are worth a line.
_LONG_S = 1.0


def own_list() -> Path:
    """Return the path of this process's list: that of its script, or of a notebook's project, which
    is the nearest directory with a ``pyproject.toml``, or else the working directory.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if own_kernel() is None and script is not None:
        return list_path(os.path.abspath(script))
    here = Path.cwd()
    places = (place for place in (here, *here.parents) if (place / "pyproject.toml").is_file())
    return list_path(str(next(places, here)))


def learned_modules(path: Path) -> tuple[str, ...]:
    """Return the modules that a zygote is to import, from a list."""
    return names_to_import(read_preloads(path), time.time())


def describe_left_out(path: str) -> list[str]:
    """Return a line for users on each module of a list that is not preloaded."""
    left_out = read_preloads(Path(path)).left_out if path else {}
    return [f"not preloaded: {name}, which {left.reason}" for name, left in left_out.items()]


class Preloading:
    """Collects the imports of a mesh's ranks.

    Args:
        path: list of the project, as text; "" if nothing is learned.
        num_ranks: number of ranks of the mesh.
    """

    def __init__(self, path: str, num_ranks: int) -> None:
        self._path, self._num_ranks = path, num_ranks
        self._took_s: dict[str, dict[int, float]] = {}
        self._has_advised = False

    def take(self, ranks: Sequence[int], imports: Imports) -> str:
        """Add the imports of a run on some ranks, and write to the list what all ranks imported.

        Returns:
            A line for users, once, if that took long; else "".
        """
        shared: dict[str, float] = {}
        for name, took_s in zip(imports.names, imports.took_s, strict=True):
            by_rank = self._took_s.setdefault(name, {})
            by_rank |= dict.fromkeys(ranks, took_s)
            if len(by_rank) == self._num_ranks:
                shared[name] = min(by_rank.values())
        if shared and self._path:
            path = Path(self._path)
            change_preloads(path, lambda found: learn(found, str(Path.cwd()), shared, time.time()))
        total_s = sum(shared.values())
        if total_s < _LONG_S or self._num_ranks == 1 or self._has_advised:
            return ""
        self._has_advised = True
        names = ",".join(sorted(shared, key=lambda name: -shared[name])[:3])
        next_one = "; ranks of the next kernel have it imported" if self._path else ""
        return (
            f"each rank took {total_s:.1f} s to import this: `--preload {names}` saves it{next_one}"
        )
