"""Counts the steps that a rank's optimizers complete in a run, by torch's global hooks.

Replicas on ranks with different numbers of steps differ; the controller compares the counts after a
run that was stopped or has failed.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from _thread import get_ident
from collections.abc import Callable, Iterable, Mapping
from traceback import walk_stack
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
    """The number of completed steps of each optimizer in the rank's current or last run (cell or
    call).

    Attributes:
        run: number of the run, -1 before the first.
        is_used: whether an optimizer has begun a step in the run.
        pause: called before a step of an optimizer whose steps begin operations, so that a stop
            ends the rank there, and not in the middle of the step.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.run = -1
        self.pause: Callable[[], object] = lambda: None
        self._inside: list[Optimizer] = []  # whose steps the main thread executes, outermost first
        self._main = get_ident()
        self._reducing: set[int] = set()  # ids of optimizers whose steps begin operations
        # Optimizer and count by id, in order of the first step; the reference prevents reuse of the
        # id.
        self._counts: dict[int, tuple[Optimizer, int]] = {}

    def install(self) -> None:
        """Register hooks that torch calls before and after each step of any optimizer."""
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._end)

    def forget(self) -> None:
        """Drop the counts of the last run, and the references to its optimizers."""
        self._counts, self._inside, self._reducing = {}, [], set()
        self.is_used = False

    @property
    def is_inside(self) -> bool:
        """Whether the main thread is executing an optimizer's step."""
        return bool(self._inside)

    def note_operation(self) -> bool:
        """Record that a collective or message is about to begin; return whether that is inside an
        optimizer's step.
        """
        if self._inside:
            self._reducing.add(id(self._inside[0]))
        return self.is_inside

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.is_used = True
        if get_ident() == self._main:
            if self._inside:  # a nested step, or one after a step that has raised
                del self._inside[_depth() :]
            if id(optimizer) in self._reducing and not self._inside:
                self.pause()
            self._inside.append(optimizer)
        if id(optimizer) not in self._counts:
            self._counts[id(optimizer)] = (optimizer, 0)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() == self._main:
            while self._inside and self._inside.pop() is not optimizer:
                pass  # its step has raised
            if any(each is optimizer for each in self._inside):
                return  # an inherited `step`, which the optimizer's own `step` has called
        self._counts[id(optimizer)] = (optimizer, self._counts.get(id(optimizer), (None, 0))[1] + 1)

    def num_steps(self, optimizer: str) -> int:
        """Return the number of completed steps of an optimizer, given its key in `StepCount`, such
        as "Adam 1".
        """
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
        """Return the numbers of steps with the names of optimizers and models in the user's
        namespace. Usable on any thread.
        """
        if not self.is_used:
            return Steps(self.run)
        found = []
        for key, optimizer, num_steps in self._named():
            name = next((name for name, value in _public(namespace) if value is optimizer), "")
            found.append(StepCount(key, num_steps, name, _model_of(optimizer, namespace)))
        return Steps(self.run, tuple(found))


def _depth() -> int:
    """Return how many optimizers' steps are already in progress, in the callers of the step that
    begins.
    """
    frames = walk_stack(sys._getframe())
    codes = [frame.f_code.co_qualname for frame, _ in frames]
    return codes.count("Optimizer.profile_hook_step.<locals>.wrapper") - 1


def _public(namespace: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    with contextlib.suppress(RuntimeError):  # the main thread may bind names at the same time
        return [item for item in list(namespace.items()) if not item[0].startswith("_")]
    return []


def _model_of(optimizer: Optimizer, namespace: Mapping[str, Any]) -> str:
    """Return the name of a variable that holds a model with the optimizer's first parameter; "" if
    there is none. Runs no user code.
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
