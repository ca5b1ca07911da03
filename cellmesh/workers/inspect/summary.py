"""Summarizes a value for the inspector: shape, digest and statistics of each tensor in it, type and
repr of any other value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from ...wire.inspect import Overview, TensorSummary, ValueSummary
from ..rank.value_transfer import is_dtensor
from ..static_lookup import classes_of, has, vars_of
from .chunks import digest_of, digest_of_bytes, readable, statistics
from .safe_read import DIRECT, SafeReader, UnreadableError
from .safe_repr import full_name_of, quiet_text, whole_text
from .shards import place_of
from .static_eval import keeps_grad
from .tree import MAX_PLAIN, as_known, as_tensor, find, walk

T = TypeVar("T")

_TEXT_CHARS = 200
_NO_CODE = "its class has code of its own, which does not run beside a cell"
_NOT_READ = "not read: there is much in this value; choose it to have its numbers"


def overview(value: Any, subject: Overview, read: SafeReader) -> ValueSummary:
    """Describe the tensors, numbers and texts in a value; if `subject` asks for gradients, those of
    the tensors instead.

    Raises:
        TypeError: gradients are asked for, and the value has no parameters.
    """
    items: list[TensorSummary] = []
    num_left_out = num_read = num_plain = 0
    parts: Iterator[tuple[str, Any]] = walk(value)
    if subject.path:
        parts = iter([(subject.path, find(value, subject.path))])
    elif subject.grads:
        parts = _gradients_in(value, read.is_beside)
    for path, part in parts:
        is_plain = not as_known(part)
        num_plain += is_plain
        if len(items) >= subject.max_items or (is_plain and num_plain > MAX_PLAIN):
            num_left_out += 1
            continue
        size = 0 if is_plain else _num_elements(part)
        is_read = not num_read or num_read + size <= subject.max_elements
        summary = describe(part, is_read, read=read)
        if is_read:
            num_read += size
        elif not summary.note:
            summary = msgspec.structs.replace(summary, note=_NOT_READ)
        items.append(summary.at(path))
    if subject.grads and not items:
        kind = full_name_of(type(value))
        raise TypeError(f"{kind} has no parameters: name a module, an optimizer or a parameter")
    text = _text_of(value, len(items) + num_left_out)
    return ValueSummary(full_name_of(type(value)), text, tuple(items), num_left_out, read.is_beside)


def _gradients_in(value: Any, is_beside: bool) -> Iterator[tuple[str, Any]]:
    for path, part in walk(value):
        if not issubclass(type(part), torch.Tensor) or (is_beside and has_own_code(part)):
            continue
        # Computed tensors require gradients, too, but do not keep one.
        if part.requires_grad and keeps_grad(part):
            yield f"{path}.grad".lstrip("."), part.grad


def tensor_at(value: Any, path: str, is_beside: bool) -> torch.Tensor:
    """Return this rank's part of the tensor at a path in a value.

    Raises:
        LookupError: the value has no such path.
        TypeError: the part is no tensor, or only code of its class can read it.
    """
    part = find(value, path)
    tensor = as_tensor(part)
    if tensor is None:
        raise TypeError(f"{path or 'it'} is no tensor: {full_name_of(type(part))}")
    if is_beside and has_own_code(tensor):
        raise TypeError(
            f"{full_name_of(type(part))} has code of its own, which does not run beside a cell"
        )
    return own_part(tensor)


def _text_of(value: Any, num_items: int) -> str:
    if as_tensor(value) is not None:
        return ""
    if issubclass(type(value), nn.Module):
        return f"{type(value).__name__}, {num_items} parameters and buffers"
    return type(value).__name__ if issubclass(type(value), Optimizer) else quiet_text(value)


def describe(value: Any, is_read: bool = True, read: SafeReader = DIRECT) -> TensorSummary:
    """Return a summary of one value: shape and statistics of a tensor, else type and repr.

    Runs no user code, such as a ``__repr__``: a value that is not Python's own is described by its
    type. Runs no collective: a DTensor is described by the rank's part.

    Args:
        value: any value; tensors, parameters, DTensors and arrays are described by their numbers.
        is_read: whether to read a tensor's elements, for statistics and digest.
        read: reader of tensors; beside the main thread, tensors with code of their own are not
            read.

    Returns:
        The summary. Facts that a tensor does not provide are left out, and `note` gives the reason.
    """
    kind, tensor = full_name_of(type(value)), as_tensor(value)
    if tensor is not None and read.is_beside and has_own_code(tensor):
        return TensorSummary(kind=kind, note=_NO_CODE)
    if tensor is not None:
        with torch.no_grad():
            return describe_tensor(kind, tensor, is_read, read)
    whole = whole_text(value)
    digest = digest_of_bytes(whole.encode(errors="replace")) if whole else ""
    return TensorSummary(kind=kind, text=quiet_text(value), digest=digest)


def has_own_code(tensor: torch.Tensor) -> bool:
    """Return whether reading a tensor may run code of its class that is not torch's."""
    for kind in classes_of(type(tensor)):
        if kind is torch.Tensor:
            return False
        if not str(vars_of(kind).get("__module__")).startswith("torch.") and any(
            name == "__torch_dispatch__" or (not name.startswith("__") and has(torch.Tensor, name))
            for name in vars_of(kind)
        ):
            return True
    return False


def own_part(value: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor on this rank, without waiting for a collective that computes
    it; any other tensor unchanged.
    """
    return value._local_tensor if is_dtensor(value) else value


def _num_elements(part: Any) -> int:
    is_tensor = issubclass(type(part), torch.Tensor)
    return _told(lambda: int(own_part(part).numel() if is_tensor else part.size)) or 0


def describe_tensor(
    kind: str, value: torch.Tensor, is_read: bool, read: SafeReader
) -> TensorSummary:
    """Return a summary of a tensor; see `describe`."""
    local, place = own_part(value), place_of(value) if is_dtensor(value) else {}
    notes = [place.pop("note", "")]
    numbers: dict[str, Any] = {}
    digest = text = ""
    try:
        data, note = readable(local, read.is_beside)
        notes.append(note)
        if is_read:
            numbers = statistics(data, read)
            text = text_of_number(data, read) if data.dim() == 0 else ""
            if local.layout in (torch.strided, torch.jagged):
                digest = digest_of(data, read)
    except UnreadableError as error:
        notes.append(str(error))
    except Exception as error:  # a dtype that torch stores but cannot compute with
        notes.append(f"no statistics: {_first_line(error)}")
    shape = _told(lambda: _sizes(value.shape))
    num_elements = _told(lambda: int(local.numel())) or 0
    is_strided = local.layout == torch.strided
    return TensorSummary(
        kind=kind,
        text=quiet_text(value) if shape is None else text,
        shape=shape,
        local_shape=_told(lambda: _sizes(local.shape)),
        strides=_told(lambda: _sizes(local.stride())) if is_strided else None,
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(local.device),
        requires_grad=value.requires_grad,
        num_elements=num_elements,
        num_bytes=num_bytes_of(local),
        note="; ".join(note for note in notes if note),
        digest=digest,
        **place,
        **numbers,
    )


def text_of_number(data: torch.Tensor, read: SafeReader) -> str:
    """Return the only element of a tensor as text; the tensor is as `readable` returns it."""
    number = read.take(data).item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def num_bytes_of(local: torch.Tensor) -> int:
    """Return the size of a tensor's elements in bytes; for a sparse tensor, with its indices."""
    parts: list[torch.Tensor | None] = [local]
    if local.layout == torch.sparse_coo:
        parts = [local._values(), local._indices()]
    elif local.layout != torch.strided:
        names = ("values", "crow_indices", "col_indices", "ccol_indices", "row_indices")
        parts = [_told(getattr(local, name)) for name in names]
    sizes = (_told(lambda part=part: part.numel() * part.element_size()) for part in parts)  # type: ignore[misc]
    return sum(size or 0 for size in sizes)


def _sizes(sizes: Any) -> tuple[int, ...]:
    """Return a tensor's sizes as ints; -1 for a jagged dim."""
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


def _told(ask: Callable[[], T]) -> T | None:
    """Return the result of reading a property of a tensor; None if this kind of tensor lacks it."""
    try:
        return ask()
    except Exception:
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_TEXT_CHARS]
