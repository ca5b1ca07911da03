"""The debugger of a rank: IPython's, with its prompt in the notebook.

It stops in user code only, and ends with the cell. An interrupt leaves it, as ``q`` does.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from IPython.core.debugger import Pdb

from ...errors import CellmeshError
from ..static_lookup import traceback_of
from .stack_inspection import is_machinery, stack_of, user_part


class RankPdb(Pdb):
    """Pdb for a rank, which has no terminal: it reads by ``input()`` and prints to the cell."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Its handler of SIGINT would replace the rank's.
        super().__init__(*args, **{**kwargs, "nosigint": True})
        self.prompt = "(Pdb) "
        self._interrupt: KeyboardInterrupt | None = None
        self._bottom: types.FrameType | None = None  # outermost frame of the cell or call

    def set_trace(self, frame: types.FrameType | None = None, **kwargs: Any) -> None:
        frame = frame or sys._getframe().f_back
        stack = stack_of(frame)[::-1]
        users = stack[user_part(stack, self.shell)]
        self._bottom = users[0] if users else None
        super().set_trace(frame, **kwargs)  # type: ignore[no-untyped-call]

    def stop_here(self, frame: types.FrameType) -> bool:
        return bool(super().stop_here(frame)) and self._is_of_user(frame)  # type: ignore[no-untyped-call]

    def _is_of_user(self, frame: types.FrameType | None) -> bool:
        """Return whether a frame belongs to user code or was called from it without frames of
        cellmesh or IPython in between.
        """
        while frame is not None:
            if frame is self._bottom or self._is_cell(frame):
                return True
            if is_machinery(frame):
                return False
            frame = frame.f_back
        return True

    def _is_cell(self, frame: types.FrameType) -> bool:
        return bool(self.shell.cell_of(frame.f_code.co_filename))  # type: ignore[attr-defined]

    def get_stack(self, *args: Any, **kwargs: Any) -> tuple[list[tuple[types.FrameType, int]], int]:
        stack, position = super().get_stack(*args, **kwargs)  # type: ignore[no-untyped-call]
        part = user_part([frame for frame, _ in stack], self.shell)
        chosen = stack[part]
        if not chosen:
            return stack, position
        return chosen, min(max(position - part.start, 0), len(chosen) - 1)

    def format_stack_entry(
        self, frame_lineno: tuple[types.FrameType, int], *args: Any, **kwargs: Any
    ) -> str:
        text = super().format_stack_entry(frame_lineno, *args, **kwargs)
        name = frame_lineno[0].f_code.co_filename
        count = self.shell.cell_of(name)  # type: ignore[attr-defined]
        return text.replace(self.canonic(name), f"In[{count}]") if count else text

    def interaction(self, frame: types.FrameType | None, tb_or_exc: Any) -> None:
        super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            sys.settrace(None)
            raise interrupt

    def _cmdloop(self) -> None:
        # Pdb's own loop continues after an interrupt.
        try:
            self.cmdloop()
        except KeyboardInterrupt as interrupt:
            self._interrupt = interrupt

    def _error_exc(self) -> None:
        # A typed command may wait for other ranks, and be interrupted or released.
        error = sys.exc_info()[1]
        if isinstance(error, KeyboardInterrupt):
            raise error
        super()._error_exc()  # type: ignore[misc]


def break_here(*args: Any, **kwargs: Any) -> None:
    """Open the debugger for ``breakpoint()`` on a rank (`sys.breakpointhook`)."""
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and is_machinery(frame):
        frame = frame.f_back
    RankPdb().set_trace(frame)


def post_mortem() -> None:
    """Open the debugger where the last exception of this rank was raised."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or traceback_of(error) is None:
        raise CellmeshError("nothing has been raised on this rank that could be debugged")
    debugger = RankPdb()
    debugger.reset()
    debugger.interaction(None, error)
