"""Counts the steps that the optimizers of a rank complete in a run, by torch's global hooks.

Ranks that have made different numbers of steps hold replicas that differ; the controller compares
the counts after a run that was stopped or has failed.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...wire.stopping import StepCount, Steps
from ..static_lookup import held_by


class OptimizerSteps:
    """The completed steps of each optimizer in the run that the rank executes or has executed last.

    Attributes:
        run: the run, -1 before the first.
        is_used: whether an optimizer has begun a step in the run.
        is_inside: whether the main thread is inside a step.
    """

    def __init__(self) -> None:
        self.is_used = self.is_inside = False
        self.run = -1
        # In order of the first step. The reference keeps the id from being used again.
        self._counts: dict[int, tuple[Optimizer, int]] = {}

    def install(self) -> None:
        """Register hooks that torch calls before and after each step of any optimizer."""
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._end)

    def forget(self) -> None:
        """Forget the steps of the last run, and the optimizers that made them."""
        self._counts = {}
        self.is_used = self.is_inside = False

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_used = self.is_inside = True
        if id(optimizer) not in self._counts:
            self._counts[id(optimizer)] = (optimizer, 0)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_inside = False
        self._counts[id(optimizer)] = (optimizer, self._counts.get(id(optimizer), (None, 0))[1] + 1)

    def num_steps(self, optimizer: str) -> int:
        """Return the number of steps of an optimizer, named as in `StepCount`."""
        return next((number for name, _, number in self._named() if name == optimizer), 0)

    def _named(self) -> list[tuple[str, Optimizer, int]]:
        numbers: collections.Counter[str] = collections.Counter()
        found = []
        for optimizer, num_steps in list(self._counts.values()):
            kind = type(optimizer).__name__
            numbers[kind] += 1
            found.append((f"{kind} {numbers[kind]}", optimizer, num_steps))
        return found

    def describe(self, namespace: Mapping[str, Any]) -> Steps:
        """Return the counts, with the names of optimizers and models in the user's namespace; on
        any thread.
        """
        if not self.is_used:
            return Steps(self.run)
        found = []
        for key, optimizer, num_steps in self._named():
            name = next((name for name, value in _public(namespace) if value is optimizer), "")
            found.append(StepCount(key, num_steps, name, _model_of(optimizer, namespace)))
        return Steps(self.run, tuple(found))


def _public(namespace: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    with contextlib.suppress(RuntimeError):  # the main thread may bind names at the same time
        return [item for item in list(namespace.items()) if not item[0].startswith("_")]
    return []


def _model_of(optimizer: Optimizer, namespace: Mapping[str, Any]) -> str:
    """Return the name of a model that has the first parameter of an optimizer, without running the
    user's code.
    """
    groups = held_by(optimizer).get("param_groups") or [{}]
    first = next(iter(groups[0].get("params", ())), None)
    for name, value in _public(namespace):
        if issubclass(type(value), torch.nn.Module) and first is not None and _has(value, first):
            return name
    return ""


def _has(module: Any, parameter: Any) -> bool:
    held = held_by(module)
    if any(one is parameter for one in (held.get("_parameters") or {}).values()):
        return True
    return any(
        _has(child, parameter)
        for child in (held.get("_modules") or {}).values()
        if child is not None
    )
