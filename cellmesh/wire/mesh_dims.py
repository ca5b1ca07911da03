"""Parses and checks dims of a DeviceMesh, and coordinates in it. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ..errors import MeshUsageError, did_you_mean

DEFAULT_DIM = "dp"


def parse_mesh(text: str) -> dict[str, int]:
    """Parse mesh dims such as ``dp=2,tp=4``.

    Args:
        text: ``dp=2,tp=4`` or ``dp=2 tp=4``.

    Raises:
        MeshUsageError: the text does not have that form.
    """
    return _parse(text, "mesh dim: write them like dp=2,tp=4", least=1)


def parse_coordinate(text: str) -> dict[str, int]:
    """Parse a mesh coordinate such as ``tp=0`` or ``dp=1,tp=0``.

    Raises:
        MeshUsageError: the text does not have that form.
    """
    return _parse(text, "mesh coordinate: write it like tp=0 or dp=1,tp=0", least=0)


def _parse(text: str, what: str, least: int) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, _, number = part.partition("=")
        if not (name.isidentifier() and number.isdecimal() and int(number) >= least):
            raise MeshUsageError(f"{part!r} is no {what}")
        if name in numbers:
            raise MeshUsageError(f"{text!r} gives {name!r} twice")
        numbers[name] = int(number)
    return numbers


def check_mesh(dims: Mapping[str, int], num_ranks: int | None) -> dict[str, int]:
    """Check that the product of the dims' sizes is `num_ranks`; any product is right if that is
    None.

    Raises:
        MeshUsageError: the product differs from the number of ranks.
    """
    for name, size in dims.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise MeshUsageError(f"{name!r} is no mesh dim's name: name them like dp, tp")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshUsageError(
                f"mesh dim {name!r} must have a whole number of ranks, not {size!r}"
            )
    product = math.prod(dims.values())
    if num_ranks is not None and product != num_ranks:
        spelled = " x ".join(f"{name}={size}" for name, size in dims.items())
        raise MeshUsageError(
            f"{spelled} makes {product} ranks, and the mesh has {num_ranks}: the dims' product "
            "must be the number of ranks"
        )
    return dict(dims)


def ranks_at(dims: Mapping[str, int], coordinate: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ranks at a mesh coordinate, numbered in row-major order as by torch's DeviceMesh.

    Args:
        dims: mesh dims, name -> size.
        coordinate: indices in some of the dims, name -> index.

    Returns:
        The ranks with these indices, ascending.

    Raises:
        MeshUsageError: the mesh has no such dim, or the dim no such index.
    """
    for name, index in coordinate.items():
        if name not in dims:
            raise MeshUsageError(
                f"the mesh has no dim {name!r}: its dims are "
                f"{', '.join(f'{dim}={size}' for dim, size in dims.items())}"
                f"{did_you_mean(name, dims)}"
            )
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < dims[name]:
            raise MeshUsageError(
                f"{name}={index}: dim {name!r} has {dims[name]} indices, 0-{dims[name] - 1}"
            )
    ranks = []
    for rank in range(math.prod(dims.values())):
        place, left = {}, rank
        for name, size in reversed(list(dims.items())):
            left, place[name] = divmod(left, size)
        if all(place[name] == index for name, index in coordinate.items()):
            ranks.append(rank)
    return tuple(ranks)
