"""Summarises a value for the inspector: each tensor in it, and each gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from ...wire.inspect import Gradient, Overview, TensorSummary, ValueSummary
from .chunks import readable
from .safe_read import SafeReader, UnreadableError
from .safe_repr import full_name_of, quiet_text
from .static_eval import keeps_grad
from .summary import as_tensor, describe, has_own_code, own_part
from .tree import MAX_PLAIN, as_known, find, parameters_of, settings_of, walk

_NOT_READ = "not read: there is much in this value; choose it to have its numbers"


def overview(value: Any, subject: Overview, read: SafeReader) -> ValueSummary:
    """Describe the tensors in a value, and the plain values beside them."""
    items: list[TensorSummary] = []
    num_left_out = num_read = num_plain = 0
    parts: Iterator[tuple[str, Any]] = (
        iter([(subject.path, find(value, subject.path))]) if subject.path else walk(value)
    )
    for path, part in parts:
        num_plain += not as_known(part)
        if len(items) >= subject.max_items or (num_plain > MAX_PLAIN and not as_known(part)):
            num_left_out += 1
            continue
        size = _num_elements(part)
        is_read = not num_read or num_read + size <= subject.max_elements
        summary = describe(part, is_read, read=read)
        if is_read:
            num_read += size
        elif not summary.note:
            summary = msgspec.structs.replace(summary, note=_NOT_READ)
        items.append(summary.at(path))
    text = _text_of(value, len(items) + num_left_out)
    return ValueSummary(full_name_of(type(value)), text, tuple(items), num_left_out, read.is_beside)


def gradients(value: Any, read: SafeReader) -> tuple[Gradient, ...]:
    """Describe the gradients of a module, of an optimizer, or of the tensors in a container.

    Raises:
        TypeError: there is none in it.
    """
    found = [_gradient(name, part, read) for name, part in _parameters(value, read.is_beside)]
    if not found and not issubclass(type(value), nn.Module | Optimizer):
        kind = full_name_of(type(value))
        raise TypeError(f"{kind} has no parameters: name a module, an optimizer or a parameter")
    return tuple(found)


def _parameters(value: Any, is_beside: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if issubclass(type(value), nn.Module):
        found: Iterator[tuple[str, Any]] = parameters_of(value)
    else:  # what it computed follows autograd, too, and has no gradient of its own
        found = (
            (path, part)
            for path, part in walk(value)
            if issubclass(type(part), torch.Tensor) and part.requires_grad and part.is_leaf
        )
    for path, part in found:
        if not is_beside or not has_own_code(part):
            yield path, part


def _gradient(name: str, parameter: torch.Tensor, read: SafeReader) -> Gradient:
    grad = parameter.grad if keeps_grad(parameter) else None
    return Gradient(
        describe(parameter, has_digest=False, read=read).at(name),
        None if grad is None else describe(grad, read=read),
    )


def tensor_at(value: Any, path: str, is_beside: bool) -> torch.Tensor:
    """Return this rank's part of the tensor at a path in a value.

    Raises:
        LookupError: there is nothing at this path.
        TypeError: there is no tensor, or one that only code of its class can read.
    """
    part = find(value, path)
    tensor = as_tensor(part)
    if tensor is None:
        raise TypeError(f"{path or 'it'} is no tensor: {full_name_of(type(part))}")
    if is_beside and has_own_code(tensor):
        raise TypeError(
            f"{full_name_of(type(part))} has code of its own, which does not run beside a cell"
        )
    return own_part(tensor).local


def data_at(value: Any, path: str, is_beside: bool) -> torch.Tensor:
    """Return a dense tensor with the elements of the tensor at a path in a value."""
    try:
        return readable(tensor_at(value, path, is_beside), is_beside)[0]
    except UnreadableError as error:
        raise ValueError(str(error)) from None


def _text_of(value: Any, num_items: int) -> str:
    if as_tensor(value) is not None:
        return ""
    if issubclass(type(value), Optimizer):
        return settings_of(value)
    if issubclass(type(value), nn.Module):
        return f"{type(value).__name__}, {num_items} parameters and buffers"
    return quiet_text(value)


def _num_elements(part: Any) -> int:
    try:
        if isinstance(part, torch.Tensor):
            return int(own_part(part).local.numel())
        return int(part.size) if hasattr(part, "__array_interface__") else 0
    except Exception:  # of a tensor without a shape
        return 0
