"""Learns which installed modules all ranks of a mesh import, for the next zygote of the project."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..wire.preload import (
    change_preloads,
    learn,
    list_path,
    names_to_import,
    read_preloads,
    still_left_out,
)
from ..wire.verbs import Imports
from .kernel import own_kernel

# Imports that take this long on each rank are worth a line; and the least time of a module in it.
_LONG_S = 1.0
_NAMED_S = 0.1


def own_list() -> Path:
    """Return the path of this process's list, for the torch that it would import now."""
    return list_path(_own_project())


@functools.cache  # the user may change the working directory
def _own_project() -> str:
    """Return this process's script; or the project of a notebook or a ``cellmesh`` command: the
    nearest directory with a ``pyproject.toml``, or else the directory that it begins in.
    """
    script: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    is_command = f"{__name__.partition('.')[0]}.cli.main" in sys.modules
    if own_kernel() is None and script is not None and not is_command:
        return os.path.abspath(script)
    from .options import find_project

    here = Path.cwd()
    return str(find_project(here) or here)


def learned_modules(path: Path) -> tuple[str, ...]:
    """Return the modules of a list; a zygote imports those that are not left out."""
    return tuple(read_preloads(path).modules)


def describe_left_out(path: str) -> list[str]:
    """Return a line for users on each module of a list that is not preloaded."""
    found = read_preloads(Path(path))
    return [
        f"not preloaded: {name}, which {found.left_out[name].reason}"
        for name in sorted(still_left_out(found))
    ]


class Preloading:
    """Collects the imports of a mesh's ranks.

    Args:
        path: list of the project, as text; "" if nothing is learned.
        num_hosts: number of the mesh's hosts.
    """

    def __init__(self, path: str, num_hosts: int) -> None:
        self._path, self._num_hosts = path, num_hosts
        # By module and rank, the run that imported it, and the duration in seconds.
        self._seen: dict[str, dict[int, tuple[int, float]]] = {}
        self._complete: set[str] = set()

    def take(self, ranks: Sequence[int], imports: Imports, num_ranks: int) -> str:
        """Add the imports of a run on some ranks, and write to the list what all ranks imported.

        Args:
            ranks: the ranks.
            imports: their imports.
            num_ranks: number of ranks of the mesh now.

        Returns:
            A line for users, once for a module, if the imports of modules that user code has named
            took long on each rank, in one run; else "".
        """
        complete: dict[str, float] = {}
        at_once: dict[str, float] = {}
        for name, took_s in zip(imports.names, imports.took_s, strict=True):
            seen = self._seen.setdefault(name, {})
            seen |= dict.fromkeys(ranks, (imports.run, took_s))
            if len(seen) >= num_ranks and name not in self._complete:
                self._complete.add(name)
                complete[name] = min(each_s for _, each_s in seen.values())
                if name in imports.asked and {run for run, _ in seen.values()} == {imports.run}:
                    at_once[name] = complete[name]
        if complete and self._path:
            path = Path(self._path)
            change_preloads(path, lambda found: learn(found, _own_project(), complete))
        return self._advise(at_once) if num_ranks > self._num_hosts else ""

    def _advise(self, took_s: dict[str, float]) -> str:
        slow = [name for name, each_s in took_s.items() if each_s >= _NAMED_S]
        if self._path:  # parts of torch are preloaded soon in any case
            slow = [name for name in slow if not name.startswith("torch.")]
        names = names_to_import(read_preloads(Path(self._path)), slow) if slow else ()
        total_s = sum(took_s[name] for name in names)
        if total_s < _LONG_S:
            return ""
        next_one = "the next kernel" if own_kernel() is not None else "the next run"
        return f"`--preload {','.join(names)}` would save {total_s:.1f} s on each rank" + (
            f"; {next_one} preloads by itself what it may" if self._path else ""
        )
