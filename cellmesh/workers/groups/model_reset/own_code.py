"""Names the data-parallel code of a program's own that a failed backward pass has cut, and calls
the resets that it has registered.

Such code reduces gradients in their hooks, counts what is ready, and waits in a callback at the end
of the pass (``queue_callback``). A pass that is cut leaves its counters half way: the next step
would go on from there, on each rank from another place, without an error.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch.autograd import Variable

from ...static_lookup import module_of, name_of, text_of
from .kinds import Kind

_ENGINE = ("torch.autograd.graph", "_engine_run_backward")
_NOT_OWN = ("torch", "cellmesh")
Reset = Callable[[], object]


class BackwardPasses:
    """What of a program's own code takes part in backward passes, and which of it was cut."""

    def __init__(self) -> None:
        # Name -> how many callbacks of the end of a pass were queued and have not been called.
        self._queued: dict[str, int] = {}
        self.cut: dict[str, str] = {}  # name -> what it is

    def install(self) -> None:
        """Have ``queue_callback`` noted from now on."""
        engine: Any = Variable
        engine._execution_engine = _NotingEngine(self)

    def note(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Return a callback that is known to be queued until it is called."""
        name = _name_of_own(callback)
        if not name:
            return callback
        self._queued[name] = self._queued.get(name, 0) + 1

        def call() -> None:
            self._queued[name] -= 1
            callback()

        return call

    def look(self, tb: types.TracebackType | None) -> None:
        """Note what a failure with this traceback has cut in a backward pass."""
        queued, self._queued = self._queued, {}
        for name, number in queued.items():
            if number > 0:
                self.cut[name] = "queued for the end of a backward pass"
        self._note_hooks(frame for frame, _ in walk_tb(tb))

    def look_around(self) -> None:
        """Note what an interrupt cuts that is raised where this is called: user code may catch
        it.
        """
        self._note_hooks(reversed([frame for frame, _ in walk_stack(sys._getframe())]))

    def _note_hooks(self, frames: Iterable[types.FrameType]) -> None:
        for outer, inner in itertools.pairwise(frames):
            if (module_of(outer), outer.f_code.co_name) == _ENGINE:
                module = module_of(inner)
                if _is_own(module):
                    self.cut[f"{module}.{inner.f_code.co_qualname}"] = "a hook of gradients"
                self.cut |= dict.fromkeys(_find_hooks(), "a hook of gradients")


class _NotingEngine(torch._C._ImperativeEngine):
    def __init__(self, passes: BackwardPasses) -> None:
        super().__init__()
        self._passes = passes

    def queue_callback(self, callback: Callable[[], None]) -> None:
        super().queue_callback(self._passes.note(callback))


def _is_own(module: str) -> bool:
    return module.partition(".")[0] not in _NOT_OWN


def _name_of_own(function: Any) -> str:
    """Return module and name of a function; "" if it is torch's."""
    while type(function) is functools.partial:
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    module = str(getattr(named, "__module__", ""))
    return f"{module}.{named.__qualname__}" if _is_own(module) else ""


def _find_hooks() -> Iterator[str]:
    """Yield the names of hooks of a program's own that run when a gradient is accumulated."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        for found in tensors:
            for hook in (found._post_accumulate_grad_hooks or {}).values():
                if name := _name_of_own(hook):
                    yield name


class OwnCode(Kind):
    """Reports a program's own code that was cut in a backward pass; only the program knows how to
    reset it.
    """

    where = __name__, "BackwardPasses"
    label = "own data-parallel code"
    drops_grads = False

    def concerns(self, found: Any) -> bool:
        return bool(found.cut)

    def is_dirty(self, found: Any) -> bool:
        return True

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        cut, found.cut = found.cut, {}
        for name, what in cut.items():
            yield (
                f"`{name}`, {what}, was cut in a backward pass: its state is as the failed step "
                "left it, which may differ between ranks. Reset it and call zero_grad(), or "
                "register a reset by `cellmesh.on_heal(callback)`"
            )


class HealCallbacks:
    """The resets that user code has registered, which each heal calls in their order."""

    def __init__(self) -> None:
        self._callbacks: dict[Any, Callable[[], Reset | None]] = {}

    def add(self, callback: Reset) -> None:
        """Register a reset. A function takes the place of an earlier one of its name, as a cell
        that is run again defines it; a method is forgotten with its object.
        """
        if isinstance(callback, types.MethodType):
            key: Any = (id(callback.__self__), callback.__func__)
            self._callbacks[key] = weakref.WeakMethod(callback)
            return
        name = f"{getattr(callback, '__module__', '')}.{getattr(callback, '__qualname__', '<')}"
        self._callbacks[callback if "<" in name else name] = lambda: callback

    def call(self) -> tuple[str, ...]:
        """Call each reset; return a note on each that raised."""
        notes = []
        for key, find in list(self._callbacks.items()):
            if (callback := find()) is None:
                del self._callbacks[key]
                continue
            try:
                callback()
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                notes.append(f"on_heal: `{name}` raised {name_of(error)}: {text_of(error)}")
        return tuple(notes)
