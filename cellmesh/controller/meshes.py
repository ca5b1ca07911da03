"""The meshes that this process controls, by name: `cellmesh.meshes`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MeshUsageError, UnknownMeshError, did_you_mean
from ..wire.environment import VISIBLE
from ..wire.ticket import Ticket

_GPUS = "/proc/driver/nvidia/gpus"

if TYPE_CHECKING:
    from ..wire.handles import Address
    from .mesh import Mesh
    from .session.launch.prestart import Prestart


class Meshes(Mapping[str, "Mesh"]):
    """The meshes that this process has started or attached to, by name, oldest first; those that
    have ended or been left are not in it.

    Attributes:
        zygotes: of meshes that this process has started without a waiting zygote, by name.
    """

    def __init__(self) -> None:
        self._all: dict[str, Mesh] = {}
        self.zygotes: dict[str, Prestart] = {}
        self._last_shown = ""

    def add(self, mesh: Mesh) -> None:
        """Add a mesh, and forget those that have ended."""
        from ..wire.handles import openers

        if open_handle not in openers:
            openers.insert(0, open_handle)
        self._all = {name: self._all[name] for name in self if name != mesh.name}
        self._all[mesh.name] = mesh
        mesh.rank_set.session.check_size = functools.partial(self._check_size, mesh)
        for name, each in self._all.items() if len(self._all) > 1 else ():
            session = each.rank_set.session
            session.displays.heading = functools.partial(self._head, name)
            session.shown.heading = session.displays.heading

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

    def zygote(self) -> Prestart | None:
        """Return the zygote of a living mesh, from which another one can be forked, if any."""
        newest_first = reversed(self.zygotes.items())
        return next((each for name, each in newest_first if name in self), None)

    def gpus(self, given: Sequence[str], but: str = "") -> dict[str, Sequence[str]]:
        """Return the GPUs that the ranks of each mesh use, except one mesh's."""
        return {
            name: gpus_of(each.rank_set.session.ticket, given)
            for name, each in self.items()
            if name != but and any(info.device.startswith("cuda") for info in each.ready_ranks)
        }

    def _check_size(self, mesh: Mesh, num_ranks: int) -> None:
        """Raise an error if another mesh uses GPUs of the ranks that a resize adds to one."""
        ticket, given = mesh.rank_set.session.ticket, given_gpus(os.environ)
        added = gpus_of(ticket, given, num_ranks)[ticket.num_ranks :]
        for name, taken in self.gpus(given, but=mesh.name).items():
            if both := {*added} & {*taken}:
                raise MeshUsageError(
                    f"{mesh.name} would take GPU {', '.join(sorted(both))}, which {name} uses: "
                    f"`%dist_stop --on {name}` frees it"
                )

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


def given_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a mesh sees which is started without `gpus`: those that an engine has
    given (``CUDA_VISIBLE_DEVICES``), else all of this host.
    """
    if VISIBLE in environment:
        return [each.strip() for each in environment[VISIBLE].split(",") if each.strip()]
    try:
        return [str(number) for number in range(len(os.listdir(_GPUS)))]
    except OSError:
        return []


def gpus_of(ticket: Ticket, given: Sequence[str], num_ranks: int = 0) -> Sequence[str]:
    """Return the GPUs that a mesh's ranks use: the first ones that it sees, one a rank.

    Args:
        ticket: its ticket.
        given: as of `given_gpus`.
        num_ranks: number of ranks; 0 for the present one.
    """
    chosen = given_gpus(ticket.env) if VISIBLE in ticket.env else given
    return [] if ticket.spans_hosts else chosen[: num_ranks or ticket.num_ranks]


def free_gpus(given: Sequence[str], taken: Mapping[str, Sequence[str]]) -> Sequence[str] | None:
    """Return the GPUs for a mesh beside others; None if it may see all, as none is in use.

    Args:
        given: as of `given_gpus`.
        taken: name of each other mesh -> its GPUs.

    Raises:
        MeshUsageError: others use them all.
    """
    used = {gpu: name for name, own in taken.items() for gpu in own}
    if not used.keys() & {*given}:
        return None
    if free := [gpu for gpu in given if gpu not in used]:
        return free
    by = ", ".join(f"{gpu} {used[gpu]}" for gpu in given)
    raise MeshUsageError(
        f"each GPU is in use by another mesh ({by}): `--gpus 0,1` (gpus=...) shares these, "
        "`--gpus none` takes the CPU"
    )


def open_handle(address: Address) -> Any:
    """Return a mesh of this process, or the handle of its actor; None for other meshes."""
    from ..wire.handles import Stray, mark_of
    from .actors import Actor

    for mesh in own_meshes().values():
        session = mesh.rank_set.session
        if mark_of(session.ticket.key) == address.mark:
            if not address.actor:
                return mesh
            spawned = session.actors.get(address.actor)
            return Actor(spawned, address.ranks) if spawned else Stray(address, "was dropped")
    return None


@functools.cache
def own_meshes() -> Meshes:
    """Return the meshes of this process."""
    return Meshes()
