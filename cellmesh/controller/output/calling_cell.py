"""Where the output of the calling code goes: its notebook cell, what captures that cell's output,
or the console.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from .capture import Capture, CapturedConsole, CapturedSink, find_capture
from .cell import CellSink
from .cell_record import Displays
from .console import ConsoleSink, Sink


class CellPublisher:
    """Publishes iopub messages (type, content) in one notebook cell, from any thread, also later.

    Args:
        kernel: the Jupyter kernel that executes the cell now.

    Attributes:
        capture: what captures the output of the cell; None if nothing does.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._parent = _parent_of_caller(kernel)
        self._has_flushed = False
        self.capture: Capture | None = find_capture(
            kernel.shell, sys.modules["ipykernel.iostream"].OutStream
        )

    def __call__(self, kind: str, content: dict[str, Any]) -> None:
        if not self._has_flushed:
            # What the cell itself has printed before waits in buffers, and comes first.
            self._has_flushed = True
            for file in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, ValueError):  # there is none any more
                    file.flush()
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.{kind}".encode()
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent, ident=topic)

    def display(self, content: dict[str, Any]) -> None:
        """Display a bundle of the notebook's own, captured where the cell's displays are."""
        if self.capture is not None and self.capture.holds_displays():
            self.capture.publish("display_data", content)
        else:
            self("display_data", content)


def current_sink(displays: Displays | None = None, has_tabs: bool = False) -> Sink:
    """Return the sink for the caller's output: its cell in a Jupyter kernel, else the console."""
    shell = _shell()
    if shell is None:
        return ConsoleSink()
    publish = cell_publisher()
    if publish is not None:
        if publish.capture is not None:
            return CapturedSink(publish, publish.capture, displays)
        return CellSink(publish, displays, has_tabs)
    capture = find_capture(shell, None)
    return ConsoleSink() if capture is None else CapturedConsole(capture)


def cell_publisher() -> CellPublisher | None:
    """Return what publishes in the caller's notebook cell; None outside of a Jupyter kernel."""
    kernel = _kernel()
    return None if kernel is None else CellPublisher(kernel)


def _parent_of_caller(kernel: Any) -> dict[str, Any]:
    """Return the message of the calling thread's cell, or at least that message's header.

    A thread that has set its cell keeps it: in ipykernel for all output (`set_thread_parent`), or
    for what it prints, where a version of ipykernel also notes which cell has started a thread.
    """
    parent: dict[str, Any] = getattr(kernel.shell, "get_parent", kernel.get_parent)()
    printed = getattr(sys.stdout, "parent_header", None)
    if not isinstance(printed, dict) or "msg_id" not in printed:
        return parent  # standard output is captured, or closed
    is_same = printed["msg_id"] == parent.get("header", {}).get("msg_id")
    return parent if is_same else {"header": printed}


def is_attended() -> bool:
    """Return whether the calling notebook has a front end that can answer `input()`.

    Programs that execute notebooks (nbclient, and nbconvert and papermill by it) take no questions;
    nobody would draw a widget, and where its page is shown later there is no kernel.
    """
    kernel = _kernel()
    return kernel is not None and bool(
        kernel.get_parent().get("content", {}).get("allow_stdin", True)
    )


def is_executed() -> bool:
    """Return whether a program executes the calling notebook, which takes what a cell shows before
    its end and nothing later.
    """
    return _kernel() is not None and not is_attended()


def _kernel() -> Any:
    """Return the Jupyter kernel of this process; None if there is none."""
    if "ipykernel" not in sys.modules:
        return None
    kernel = getattr(_shell(), "kernel", None)
    return kernel if hasattr(kernel, "iopub_socket") else None


def _shell() -> Any:
    """Return the IPython shell of this process; None if there is none."""
    # IPython itself looks this up at each call.
    interactive = sys.modules.get("IPython.core.getipython")
    return None if interactive is None else interactive.get_ipython()
