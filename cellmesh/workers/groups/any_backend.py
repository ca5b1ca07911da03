"""Makes blocked operations of third-party backends, and of gloo groups that a program constructs
itself, raise once other ranks no longer take part.

For gloo and NCCL, `connections` can end an operation. A backend that a program has registered
(``Backend.register_backend``, in Python or C++) may block anywhere: in the operation, in the
``wait`` of its Work, or in its constructor. Here each of these runs in a helper thread, which a
release abandons.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work

from ...stdlib import os
from ..linux_process import start_thread
from . import connections
from .waits import NO_TIMEOUT, PatientWork, Waits

# How long a heal waits for a backend's `shutdown`, which may free a port that the heal needs.
_SHUTDOWN_S = 2.0
_OF_TORCH = frozenset({"gloo", "nccl"})


def is_foreign(group: Any) -> bool:
    """Return whether a plain ``ProcessGroup`` uses a backend other than gloo and NCCL."""
    names = {connections.name_of_backend(backend) for backend in connections.backends_of(group)}
    return not names or not names <= _OF_TORCH


class ForeignGroup:
    """Wraps a ``ProcessGroup`` whose backend is neither gloo nor NCCL, so that `Waits.end` makes
    its blocked operations on CPU tensors, and waits for them, raise.

    Operations on other devices return at once: the device waits, not the rank.
    """

    def __init__(self, plain: Any, waits: Waits, is_operation: Callable[[str], bool]) -> None:
        vars(self).update(plain=plain, _waits=waits, _is_operation=is_operation)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.plain, name)
        return functools.partial(self._begin, member) if self._is_operation(name) else member

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.plain, name, value)

    def _begin(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A dispatch mode (CommDebugMode) observes only the operations of its own thread.
        if not _is_on_cpu(args) or torch._C._len_torch_dispatch_stack():
            return call(*args, **kwargs)
        work = self._waits.run(_as_here(functools.partial(call, *args, **kwargs)))
        return ForeignWork(work, self._waits) if isinstance(work, Work) else work


class ForeignWork(PatientWork):
    """The Work of a backend that is neither gloo nor NCCL; `Waits.end` makes its blocked `wait`
    raise.

    The backend's own `wait` is called in another thread, as some backends do all their work there,
    and are not completed before.
    """

    _has_ended = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        limits = () if timeout == NO_TIMEOUT else (timeout,)  # a Python Work may take no time-out
        wait = functools.partial(self._work.wait, *limits)
        done = self._waits.run(_as_here(wait))
        self._has_ended = True
        return bool(done)

    def is_completed(self) -> bool:
        return self._has_ended or bool(self._work.is_completed())


def _is_on_cpu(args: Any) -> bool:
    """Return whether the first tensor that an operation is called with is on the CPU."""
    first = args[0] if args else None
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return not isinstance(first, torch.Tensor) or first.device.type == "cpu"


def _as_here(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that, called on another thread, calls `function` in this thread's grad
    mode.
    """
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call() -> Any:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
            return function()

    return call


def abort_foreign(group: Any) -> None:
    """Call `abort` of a ``ProcessGroup``'s third-party backends on another thread, as it may never
    return.
    """
    start_thread(_call_each, group, "abort")


def shut_down_foreign(group: Any) -> None:
    """Call `shutdown` of a ``ProcessGroup``'s third-party backends on another thread, and wait for
    `_SHUTDOWN_S` at most until it returns.
    """
    has_ended = _thread.allocate_lock()
    has_ended.acquire()

    def shut_down() -> None:
        _call_each(group, "shutdown")
        has_ended.release()

    if start_thread(shut_down):
        has_ended.acquire(timeout=_SHUTDOWN_S)


def _call_each(group: Any, method: str) -> None:
    with contextlib.suppress(BaseException):  # code of the program
        for backend in connections.backends_of(group) or [group]:
            if connections.name_of_backend(backend) not in _OF_TORCH:
                getattr(backend, method)()


@contextlib.contextmanager
def patient_constructors(waits: Waits, limit_s: float | None) -> Iterator[None]:
    """Enter a context in which torch calls the constructors of registered backends on another
    thread, so that `Waits.end` makes a blocked call raise.
    """
    plugins: dict[str, Any] = c10d.Backend._plugins
    before = dict(plugins)

    def patient(create: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: waits.run(functools.partial(create, *args), limit_s)

    for name, plugin in before.items():
        plugins[name] = plugin._replace(creator_fn=patient(plugin.creator_fn))
    try:
        yield
    finally:
        plugins.update(before)


def constructor_of(backend: str) -> str:
    """Return the name of the function that constructs the first third-party backend in a backend
    string; "" if the string contains none.
    """
    for name in _names_in(backend):
        if (plugin := c10d.Backend._plugins.get(name.upper())) is not None:
            return str(getattr(plugin.creator_fn, "__qualname__", type(plugin.creator_fn).__name__))
    return ""


def find_unregistered(backend: str) -> str:
    """Return the first name in a backend string ("gloo", "cpu:gloo,cuda:nccl") that is not
    registered in this process; "" if all are.
    """
    known = c10d.Backend.backend_list
    return next((name for name in _names_in(backend) if name.lower() not in known), "")


def _names_in(backend: str) -> list[str]:
    return [part.rpartition(":")[2] for part in backend.split(",")]


class GlooGroups:
    """Records each ``ProcessGroupGloo`` constructed in this process: by torch, within `noting`, or
    by a user's program, as ``ProcessGroupGloo(store, rank, size)``.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._is_installed = False
        self._noted: list[ProcessGroupGloo] | None = None
        self._limit_s: float | None = None
        # Groups that a program has constructed, with their connections.
        self._own: list[tuple[weakref.ref[ProcessGroupGloo], dict[int, int]]] = []
        self._kept: weakref.WeakKeyDictionary[ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()
        self._cut: list[str] = []

    def install(self) -> None:
        """Patch ``ProcessGroupGloo`` to record each new gloo group, and to construct it on another
        thread, so that `Waits.end` makes a blocked construction raise.
        """
        if self._is_installed:
            return
        self._is_installed = True
        construct, pid = ProcessGroupGloo.__init__, os.getpid()
        register = ProcessGroup._register_backend

        def __init__(group: Any, *args: Any, **kwargs: Any) -> None:
            make = functools.partial(construct, group, *args, **kwargs)
            if os.getpid() != pid:  # a process that user code has forked
                make()
            elif self._noted is not None:
                self._waits.run(make, self._limit_s)
                self._noted.append(group)
            else:
                before = connections.open_sockets()
                self._waits.run(make)
                sockets = connections.connected(connections.new_sockets(before))
                self._own = [one for one in self._own if one[0]() is not None]
                self._own.append((weakref.ref(group), sockets))

        def register_backend(group: Any, device: Any, kind: Any, backend: Any = None) -> None:
            register(group, device, kind, backend)
            if isinstance(backend, ProcessGroupGloo):
                # C++ keeps the group alive; keep its Python object, which `cut` needs, as long.
                self._kept.setdefault(group, []).append(backend)

        ProcessGroupGloo.__init__ = __init__  # type: ignore[assignment, method-assign]
        ProcessGroup._register_backend = register_backend  # type: ignore[assignment, method-assign]

    @contextlib.contextmanager
    def noting(self, limit_s: float | None) -> Iterator[list[ProcessGroupGloo]]:
        """Enter a context in which new gloo groups count as torch's, not as the program's own, and
        are appended to the list that the context yields.
        """
        noted: list[ProcessGroupGloo] = []
        self._noted, self._limit_s = noted, limit_s
        try:
            yield noted
        finally:
            self._noted = self._limit_s = None

    def cut(self, kept: connections.KeptConnections) -> int:
        """Close the connections of the gloo groups that a user's program has constructed itself;
        return the number of connections.
        """
        num_cut = 0
        for find, sockets in list(self._own):
            if (group := find()) is None:
                continue
            connections.await_quiet(sockets)
            if num := connections.cut_gloo([group], sockets, kept):
                self._cut.append(f"rank {group.rank()} of {group.size()}")
            num_cut += num
        self._own = []
        return num_cut

    def take_notes(self) -> tuple[str, ...]:
        """Return a note for the user on each gloo group of a program that `cut` has disconnected
        since the last call of this method.
        """
        cut, self._cut = self._cut, []
        return tuple(
            f"a ProcessGroupGloo that code constructed itself ({each}) was cut: construct it again"
            for each in dict.fromkeys(cut)
        )
