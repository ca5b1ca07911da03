"""The gradients of a model's parameters, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...wire.inspect import Gradient
from .description import describe, has_own_code, kind_of, own_part
from .safe_read import Reader
from .static_eval import keeps_grad
from .tree import parameters_of, walk
from .values import looking, one_thread


def gradients(value: Any, is_beside: bool) -> tuple[Gradient, ...]:
    """The gradients of a module, an optimizer, or of the tensors in any nest that autograd follows.

    Raises:
        TypeError: there is none in it.
    """
    found = []
    with one_thread():
        for name, parameter in _parameters(value, is_beside):
            with looking(is_beside) as read:
                found.append(_gradient(name, parameter, read))
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
    own = describe(parameter, has_digest=False, read=read)
    if grad is None:
        shape, shard = own.local_shape or (), own_part(parameter).shard
        return Gradient(
            name,
            shape,
            False,
            parameter_norm=own.norm or 0.0,
            num_elements=own.num_elements,
            shard=shard,
            note=own.note,
            requires_grad=parameter.requires_grad,
        )
    facts = describe(grad, read=read)
    return Gradient(
        name=name,
        shape=facts.local_shape or (),
        has_grad=True,
        norm=facts.norm or 0.0,
        max_abs=max(abs(facts.min or 0.0), abs(facts.max or 0.0)),
        parameter_norm=own.norm or 0.0,
        num_nan=facts.num_nan,
        num_inf=facts.num_inf,
        num_zeros=facts.num_zeros,
        num_elements=facts.num_elements,
        shard=facts.shard,
        digest=facts.digest,
        note=facts.note,
        requires_grad=parameter.requires_grad,
    )
