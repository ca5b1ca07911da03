"""Plans another number of ranks for a mesh: how many on each host, and the DeviceMesh dims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MeshUsageError
from ..wire.ranks import describe_ranks
from .core.effects import HealReport
from .host_list import HostEntry, parse_hosts
from .mesh_dims import check_mesh, parse_mesh
from .options import check_num_ranks

ONE_HOST = (
    "the mesh runs on this machine alone: other hosts join one that was started on hosts, like "
    "`%dist_start --hosts a:4,b:4`"
)


@dataclass(frozen=True)
class Resizing:
    """What a mesh becomes.

    Attributes:
        layout: how many ranks each host has, in the order of the hosts.
        new_hosts: the last of them, if they are new.
        dims: the DeviceMesh's, name -> size.
    """

    layout: tuple[int, ...]
    new_hosts: tuple[HostEntry, ...]
    dims: Mapping[str, int]


def plan_resize(
    num_ranks: Any,
    hosts: str | Iterable[str],
    mesh: Mapping[str, int] | str | None,
    *,
    layout: Sequence[int],
    names: Sequence[str],
    dims: Mapping[str, int],
) -> Resizing:
    """Plan what a user asks for: the highest ranks end, or new ones follow the last.

    Args:
        num_ranks: how many ranks there are to be; None if the hosts or the dims say so.
        hosts: that are to join, ``"c:2"``.
        mesh: the dims then; None where the mesh has one dim.
        layout: how many ranks each host has now.
        names: of the hosts; () for a mesh on one host.
        dims: the mesh's now.

    Raises:
        MeshUsageError: it cannot be.
    """
    wanted = parse_mesh(mesh) if isinstance(mesh, str) else mesh and dict(mesh)
    before = sum(layout)
    if num_ranks is None and wanted:
        num_ranks = math.prod(check_mesh(wanted, None).values())
    joining = _read_hosts(hosts, None if num_ranks is None else num_ranks - before, names)
    if num_ranks is None and joining:
        num_ranks = before + sum(entry.num_ranks for entry in joining)
    num_ranks = check_num_ranks(num_ranks, f"say how many, as in `%dist_resize {before * 2}`")
    planned = _choose_dims(num_ranks, wanted, dims)
    if num_ranks == before:
        raise MeshUsageError(f"the mesh has {before} ranks: `%dist_mesh` gives it other dims")
    new_layout = _cut(layout, num_ranks) if num_ranks < before else list(layout)
    if joining:
        new_layout += [entry.num_ranks for entry in joining]
        if sum(new_layout) != num_ranks:
            raise MeshUsageError(
                f"the mesh has {before} ranks and {num_ranks} are asked for: the hosts that join "
                f"must have {num_ranks - before} in all"
            )
    elif num_ranks > before:
        new_layout[-1] += num_ranks - before
    return Resizing(tuple(new_layout), joining, planned)


def _read_hosts(
    hosts: str | Iterable[str], num_ranks: Any, names: Sequence[str]
) -> tuple[HostEntry, ...]:
    if not hosts:
        return ()
    if not names:
        raise MeshUsageError(ONE_HOST)
    words = hosts.split(",") if isinstance(hosts, str) else list(hosts)
    joining = parse_hosts(words, num_ranks)
    for entry in joining:
        if entry.name in names:
            raise MeshUsageError(
                f"{entry.name} has ranks of the mesh: only its last host, {names[-1]}, gets more, "
                "without --hosts"
            )
    return joining


def _choose_dims(
    num_ranks: int, wanted: Mapping[str, int] | None, dims: Mapping[str, int]
) -> Mapping[str, int]:
    if wanted:
        return check_mesh(wanted, num_ranks)
    first, *others = dims
    rest = math.prod(dims[name] for name in others)
    if not others:
        return {first: num_ranks}
    now = ", ".join(f"{name}={size}" for name, size in dims.items())
    fits = {first: num_ranks // rest, **{name: dims[name] for name in others}}
    hint = ",".join(f"{name}={size}" for name, size in fits.items())
    hint = hint if num_ranks % rest == 0 else f"{first}={num_ranks}"
    raise MeshUsageError(
        f"the mesh has dims {now}: say those of {num_ranks} ranks, as in "
        f"`%dist_resize {num_ranks} --mesh {hint}`"
    )


def _cut(layout: Sequence[int], num_ranks: int) -> list[int]:
    """Return how many ranks each host keeps; hosts without any are left out."""
    kept: list[int] = []
    for size in layout:
        if sum(kept) < num_ranks:
            kept.append(min(size, num_ranks - sum(kept)))
    return kept


def describe_resize(report: HealReport, before: int, dims: Mapping[str, int]) -> str:
    """Return the text that ``%dist_resize`` shows."""
    size = math.prod(dims.values())
    shape = ", ".join(f"{name}={number}" for name, number in dims.items())
    changed = describe_ranks(range(min(before, size), max(before, size)))
    text = f"{changed} ended" if size < before else f"{changed} new and empty"
    lines = [
        f"{size} ranks ({shape}), {before} before: {text}, process groups made in "
        f"{report.took_s:.1f} s; the others hold what they held",
        *report.notes,
    ]
    return "\n".join(lines)
