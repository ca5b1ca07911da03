"""Ends or leaves a mesh when the process of its controller ends."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

from ..kernel import call_at_shutdown, is_terminal


class AtExit:
    """Ends a mesh with its notebook or terminal, and leaves it to its lease in other cases.

    Args:
        is_kept: whether the mesh lives on although its notebook has ended for good.
        end: ends the mesh.
        order_end: has the mesh end; must not wait.
        leave: leaves the mesh to its lease, if it has one.
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
        self._is_over = False  # the kernel or the terminal ends for good
        atexit.register(self._process_ends)
        self._forget_shutdown = call_at_shutdown(self._kernel_ends)

    def forget(self) -> None:
        """Do nothing for the mesh when this process ends."""
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
        """Handle the kernel's shutdown, which is no restart; called on its control thread, which
        must not wait.
        """
        self._is_over = True
        if not self._is_kept():
            self._order_end()
