"""The state of an actor's object, which its rank saves after every so many calls, for the rank that
replaces it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cloudpickle import cloudpickle

from ...wire.ticket import runtime_root


class States:
    """The latest saved state of one object: one file in the mesh's directory on this host.

    Args:
        name: name of the actor.
        rank: the rank.
        every: number of calls of methods after which the state is saved.
        directory: the mesh's directory on the notebook's host.
    """

    def __init__(self, name: str, rank: int, every: int, directory: str) -> None:
        own = Path(directory)
        own = own if own.is_dir() else runtime_root() / own.name  # on another host
        self._path = own / f"state-{name}-{rank}"
        self._name, self._every, self._num_calls = name, every, 0
        self._has_failed = False

    def counted(self, function: Callable[..., Any], made: Any) -> Callable[..., Any]:
        """Return a function that calls another, and then saves an object's state if that is due."""

        def call(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                return then(value)
            self._count(made)
            return value

        async def then(awaited: Any) -> Any:
            value = await awaited
            self._count(made)
            return value

        return call

    def _count(self, made: Any) -> None:
        self._num_calls += 1
        if self._num_calls % self._every:
            return
        draft = self._path.with_suffix(".new")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                torch.save(made.__getstate__(), file, pickle_module=cloudpickle)
            draft.replace(self._path)
        except Exception as error:  # the call itself has succeeded
            draft.unlink(missing_ok=True)
            if not self._has_failed:
                self._has_failed = True
                text = f"{type(error).__name__}: {error}"
                print(f"the state of {self._name} could not be saved: {text}", file=sys.stderr)

    def restore(self, kind: Any) -> Any:
        """Return an object of a class with the saved state; None if there is no state."""
        if not self._path.exists():
            return None
        state = torch.load(self._path, weights_only=False)
        made = kind.__new__(kind)
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return made
        own, slots = state if type(state) is tuple else (state, None)
        vars(made).update(own or {})
        for name, value in (slots or {}).items():
            setattr(made, name, value)
        return made

    def forget(self) -> None:
        """Remove the saved state, if there is one."""
        with contextlib.suppress(OSError):
            self._path.unlink()
