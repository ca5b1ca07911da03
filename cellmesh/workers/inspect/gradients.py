"""The gradients of a model's parameters, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...wire.inspect import Gradient
from .safe_read import Reader
from .static_eval import keeps_grad
from .summary import describe, has_own_code, kind_of
from .tree import parameters_of, walk


def gradients(value: Any, read: Reader) -> tuple[Gradient, ...]:
    """The gradients of a module, an optimizer, or of the tensors in any nest that autograd follows.

    Raises:
        TypeError: there is none in it.
    """
    found = [_gradient(name, part, read) for name, part in _parameters(value, read.is_beside)]
    if not found and not issubclass(type(value), nn.Module | Optimizer):
        raise TypeError(
            f"{kind_of(value)} has no parameters: name a module, an optimizer or a parameter"
        )
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


def _gradient(name: str, parameter: torch.Tensor, read: Reader) -> Gradient:
    grad = parameter.grad if keeps_grad(parameter) else None
    return Gradient(
        describe(parameter, has_digest=False, read=read).at(name),
        None if grad is None else describe(grad, read=read),
    )
