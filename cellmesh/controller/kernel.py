"""Finds whether this process is a Jupyter kernel or IPython in a terminal, and handles the end of
this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# Maximum time between the interrupt and the shutdown request that `KernelManager.shutdown_kernel`
# sends to a kernel.
_LEAVE_S = 0.2


def own_shell() -> Any:
    """Return this process's IPython shell, if any."""
    # IPython's package looks for its attributes in Python, this module has the function.
    interactive = sys.modules.get("IPython.core.getipython") or sys.modules.get("IPython")
    return interactive.get_ipython() if interactive is not None else None


def own_kernel() -> Any:
    """Return the Jupyter kernel of this process; None if it is not a kernel."""
    return getattr(own_shell(), "kernel", None)


def own_notebook() -> str:
    """Return an identifier for the notebook of this process's kernel: its path if Jupyter's server
    has passed it, else the kernel's connection file, which a restart keeps; "" outside of a kernel.
    """
    kernel = own_kernel()
    if kernel is None:
        return ""
    application = getattr(kernel, "parent", None)
    connection_file = str(getattr(application, "abs_connection_file", ""))
    return os.environ.get("JPY_SESSION_NAME") or connection_file


def is_terminal() -> bool:
    """Return whether this process is IPython in a terminal."""
    shell = own_shell()
    return shell is not None and getattr(shell, "kernel", None) is None


def is_leaving() -> bool:
    """Return whether an interrupt is the first step of Jupyter's shutdown of the kernel, so that
    the request to shut down follows at once.
    """
    kernel = own_kernel()
    if not hasattr(kernel, "_shutdown_message"):
        return False
    until = time.monotonic() + _LEAVE_S
    while kernel._shutdown_message is None and time.monotonic() < until:
        with contextlib.suppress(KeyboardInterrupt):  # a double click counts as one press
            time.sleep(_LEAVE_S / 20)
    return kernel._shutdown_message is not None


def call_at_shutdown(call: Callable[[], None]) -> Callable[[], None]:
    """Register a function to call when the Jupyter kernel shuts down, other than for a restart.

    The function runs on the kernel's control thread, before the kernel answers: the kernel's main
    thread, its threads and its exit handlers may take longer than the seconds after which Jupyter
    kills the kernel.

    Returns:
        A function that unregisters it.
    """
    kernel = own_kernel()
    if kernel is None:
        return lambda: None
    calls: list[Callable[[], None]] | None = vars(kernel).get("_cellmesh_calls")
    if calls is None:
        calls = kernel._cellmesh_calls = []
        kernel.do_shutdown = _make_do_shutdown(kernel.do_shutdown, calls)
    calls.append(call)

    def take_back() -> None:
        with contextlib.suppress(ValueError):  # unregistered before
            calls.remove(call)

    return take_back


def _make_do_shutdown(
    do_shutdown: Callable[[bool], Any], calls: list[Callable[[], None]]
) -> Callable[[bool], Any]:
    def call_and_shut_down(restart: bool) -> Any:  # returns an awaitable in some kernels
        for call in [] if restart else list(calls):
            try:
                call()
            except Exception:
                traceback.print_exc(file=sys.__stderr__)
        return do_shutdown(restart)

    return call_and_shut_down


class AtExit:
    """Ends a mesh when its notebook or terminal ends for good; in other cases (a restart of the
    kernel) leaves it running until its lease ends.

    Args:
        is_kept: returns whether the mesh outlives the end of its notebook.
        end: ends the mesh.
        order_end: requests the end of the mesh, without waiting.
        leave: disconnects from the mesh, which runs until its lease ends, if it has one.
    """

    def __init__(
        self,
        is_kept: Callable[[], bool],
        end: Callable[[], None],
        order_end: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        self._is_kept, self._end, self._order_end, self._leave = is_kept, end, order_end, leave
        self._owner_pid = os.getpid()
        self._is_over = False  # whether the kernel or the terminal ends for good
        atexit.register(self._process_ends)
        self._forget_shutdown = call_at_shutdown(self._kernel_ends)

    def forget(self) -> None:
        """Unregister all handlers, so that the end of this process has no effect on the mesh."""
        atexit.unregister(self._process_ends)
        self._forget_shutdown()

    def _process_ends(self) -> None:
        if os.getpid() != self._owner_pid:
            return
        self._is_over |= is_terminal()
        if self._is_over and not self._is_kept():
            self._end()
        else:
            self._leave()

    def _kernel_ends(self) -> None:
        """Handle a shutdown of the kernel that is not a restart; called on its control thread,
        which must not wait.
        """
        self._is_over = True
        if not self._is_kept():
            self._order_end()
