"""Summarises one value: shape, digest and `statistics` of a tensor, type and repr of any other
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...wire.inspect import TensorSummary
from ..rank.value_transfer import is_dtensor
from ..static_lookup import classes_of, has, vars_of
from .chunks import digest_of, digest_of_bytes, readable
from .safe_read import DIRECT, SafeReader, UnreadableError
from .safe_repr import full_name_of, quiet_text, whole_text
from .shards import Shard, shard_of_dtensor
from .statistics import statistics

T = TypeVar("T")

_TEXT_CHARS = 200
# Modules of numpy's masked arrays.
MASKED = ("numpy.ma", "numpy.ma.core")
_NO_CODE = "its class has code of its own, which does not run beside a cell"


def describe(
    value: Any,
    is_read: bool = True,
    has_digest: bool = True,
    read: SafeReader = DIRECT,
) -> TensorSummary:
    """Return a summary of one value: of a tensor shape and statistics, else type and repr.

    Args:
        value: anything; tensors, parameters and DTensors are described by their numbers, arrays
            likewise.
        is_read: read a tensor's elements, for its statistics and its digest.
        has_digest: have a digest of it.
        read: how a tensor is read; beside the main thread, those with code of their own are not.

    Returns:
        The summary. No code of the user's is run, such as a ``__repr__``: a value that is not
        Python's own is described by its type. No collective is run: a DTensor is described by the
        rank's part of it. What cannot be found of an odd tensor is left out, and `note` says why.
    """
    kind, tensor = full_name_of(type(value)), as_tensor(value)
    if tensor is not None and read.is_beside and has_own_code(tensor):
        return TensorSummary(kind=kind, note=_NO_CODE)
    if tensor is not None:
        with torch.no_grad():
            return describe_tensor(kind, tensor, is_read, has_digest, read)
    whole = whole_text(value)
    digest = digest_of_bytes(whole.encode(errors="replace")) if whole else ""
    return TensorSummary(kind=kind, text=quiet_text(value), digest=digest)


def has_own_code(tensor: torch.Tensor) -> bool:
    """Return whether reading a tensor could run code of its class that is not torch's."""
    for kind in classes_of(type(tensor)):
        if kind is torch.Tensor:
            return False
        if not str(vars_of(kind).get("__module__")).startswith("torch.") and any(
            name == "__torch_dispatch__" or (not name.startswith("__") and has(torch.Tensor, name))
            for name in vars_of(kind)
        ):
            return True
    return False


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor as it is, an array of numbers as a tensor, None for any other value."""
    if issubclass(type(value), torch.Tensor):
        return value  # type: ignore[no-any-return]
    if type(value).__module__ in MASKED:
        try:
            # What is masked is told as NaN.
            return torch.as_tensor(
                (value if value.dtype.kind in "fc" else value.astype(float)).filled(math.nan)
            )
        except (TypeError, ValueError):  # strings, objects
            return None
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        try:
            if getattr(value.flags, "writeable", False) and value.dtype.isnative:
                return torch.from_numpy(value)
        except (TypeError, ValueError):  # negative strides, strings, objects
            pass
        try:
            # A copy of its own: torch takes no negative strides, foreign byte orders or read-only
            # memory.
            return torch.as_tensor(
                value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
            )
        except TypeError:  # strings, objects
            return None
    return None


def own_part(value: torch.Tensor) -> Shard:
    """Return the rank's part of a tensor, and its place in the whole."""
    return shard_of_dtensor(value) if is_dtensor(value) else Shard(value)


def describe_tensor(
    kind: str, value: torch.Tensor, is_read: bool, has_digest: bool, read: SafeReader
) -> TensorSummary:
    """Return a summary of a tensor; see `describe`."""
    own = own_part(value)
    local = own.local
    notes = [own.note]
    numbers: dict[str, Any] = {}
    digest = text = ""
    try:
        data, note = readable(local, read.is_beside)
        notes.append(note)
        if is_read:
            numbers = statistics(data, read)
            text = (_told(lambda: text_of_number(data, read)) or "") if data.dim() == 0 else ""
            if has_digest and local.layout in (torch.strided, torch.jagged):
                digest = digest_of(data, read)
    except UnreadableError as error:
        notes.append(str(error))
    except Exception as error:  # a type of elements that torch can hold and not compute with
        notes.append(f"no statistics: {_first_line(error)}")
    shape = _told(lambda: _sizes(value.shape))
    num_elements = _told(lambda: int(local.numel())) or 0
    num_bytes = num_elements * (_told(local.element_size) or 0)
    return TensorSummary(
        kind=kind,
        text=quiet_text(value) if shape is None else text,
        shape=shape,
        local_shape=_told(lambda: _sizes(local.shape)),
        offset=own.offset,
        strides=_told(lambda: _sizes(local.stride())),
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(local.device),
        placements=own.placements,
        requires_grad=value.requires_grad,
        mesh_dim_names=own.mesh_dim_names,
        mesh_ranks=own.mesh_ranks,
        coordinate=own.coordinate,
        num_elements=num_elements,
        num_bytes=num_bytes if local.layout == torch.strided else _stored_bytes(local),
        note="; ".join(note for note in notes if note),
        shard=own.shard,
        digest=digest,
        **numbers,
    )


def text_of_number(data: torch.Tensor, read: SafeReader) -> str:
    """Return the only element of a tensor as text; see `readable` for the tensor."""
    number = read.take(data).item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _stored_bytes(local: torch.Tensor) -> int:
    """Return the bytes of a tensor that does not store each element, such as a sparse one."""
    parts: tuple[Callable[[], torch.Tensor], ...] = (local.values,)
    if local.layout == torch.sparse_coo:
        parts = (local._values, local._indices)
    elif local.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (local.values, local.crow_indices, local.col_indices)
    elif local.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (local.values, local.ccol_indices, local.row_indices)
    found = [_told(part) for part in parts]
    return sum(part.numel() * part.element_size() for part in found if part is not None)


def _sizes(sizes: Any) -> tuple[int, ...]:
    """Return a tensor's sizes as ints; -1 for a jagged dim."""
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


def _told(ask: Callable[[], T]) -> T | None:
    """Return a property that a tensor reports (device, dtype, ...); None if its kind of tensor does
    not have it.
    """
    try:
        return ask()
    except Exception:
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_TEXT_CHARS]
