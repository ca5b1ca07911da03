"""The meshes that this process controls, by name: `cellmesh.meshes`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import UnknownMeshError, did_you_mean

if TYPE_CHECKING:
    from .mesh import Mesh


class Meshes(Mapping[str, "Mesh"]):
    """The meshes that this process has started or attached to, by name, oldest first; those that
    have ended or been left are not in it.
    """

    def __init__(self) -> None:
        self._all: dict[str, Mesh] = {}
        self._last_shown = ""

    def add(self, mesh: Mesh) -> None:
        """Add a mesh, and forget those that have ended."""
        self._all = {name: self._all[name] for name in self if name != mesh.name}
        self._all[mesh.name] = mesh
        for name, each in self._all.items() if len(self._all) > 1 else ():
            displays = each.rank_set.session.displays
            displays.heading = functools.partial(self._head, name)

    def _head(self, name: str, is_first: bool) -> str:
        """Return the line to show above output of a mesh: its name, unless its run has shown some
        and no other mesh has since, or there is no other mesh any more.
        """
        last, self._last_shown = self._last_shown, name
        return f"{name}:" if (is_first or last != name) and len(self) > 1 else ""

    def __getitem__(self, name: str) -> Mesh:
        mesh = self._all.get(name)
        if mesh is not None and not (ending := mesh.rank_set.session.ending):
            return mesh
        if mesh is not None:
            raise UnknownMeshError(ending)
        there = f" (there is {', '.join(self)})" if self else ": `%dist_start 4` starts one"
        raise UnknownMeshError(
            f"this notebook has no mesh {name!r}{there}{did_you_mean(name, self)}"
        )

    def __iter__(self) -> Iterator[str]:
        return (name for name, mesh in self._all.items() if not mesh.rank_set.session.ending)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<meshes: {'; '.join(map(str, self.values())) or 'none'}>"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


@functools.cache
def own_meshes() -> Meshes:
    """Return the meshes of this process."""
    return Meshes()
