"""The destination of the calling code's output: its notebook cell, a capture of the cell's output
(``%%capture``, ``capture_output`` or ``redirect_stdout``), or the console.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Sequence
from typing import Any

from ..kernel import own_kernel, own_shell
from .bars import Bars
from .cell import CellSink, Displays
from .console import ConsoleSink, Sink, as_text, is_textual
from .fold import Block, Line, Rich, Trace
from .mime_bundle import heading


class CellPublisher:
    """Publishes iopub messages (type, content) in one notebook cell, from any thread, also after
    the cell's end.

    Args:
        kernel: the Jupyter kernel that executes the cell.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._parent = _parent_of_caller(kernel)
        self._has_flushed = False

    def __call__(self, kind: str, content: dict[str, Any]) -> None:
        if not self._has_flushed:
            # The cell's own earlier output is still in buffers, and must be shown first.
            self._has_flushed = True
            for file in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, ValueError):  # the stream is closed
                    file.flush()
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.{kind}".encode()
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent, ident=topic)

    def display(self, content: dict[str, Any]) -> None:
        """Display a MIME bundle made in the notebook's own process, or pass it to the object that
        captures displays.
        """
        shell = self._kernel.shell
        if holds_displays(shell):
            data, metadata = content["data"], content["metadata"]
            shell.display_pub.publish(data, metadata, transient=content["transient"])
        else:
            self("display_data", content)


def current_sink(displays: Displays | None = None, has_tabs: bool = False) -> Sink:
    """Return the sink for the caller's output: its cell in a Jupyter kernel, else the console."""
    shell = own_shell()
    kernel = getattr(shell, "kernel", None)
    if not hasattr(kernel, "iopub_socket"):  # as `_kernel`, in fewer calls
        return ConsoleSink()
    sink = CellSink(CellPublisher(kernel), displays, has_tabs)
    is_captured = holds_displays(shell) or holds("stdout") or holds("stderr")
    return CapturedSink(shell, sink) if is_captured else sink


def holds(stream: str) -> bool:
    """Return whether the stream of `sys` with this name is an object that captures text, not the
    kernel's own.
    """
    file, own = getattr(sys, stream), sys.modules["ipykernel.iostream"].OutStream
    return not (file is None or isinstance(file, own) or getattr(file, "closed", False))


def holds_displays(shell: Any) -> bool:
    """Return whether the shell's display publisher is replaced by an object that captures
    displays.
    """
    return type(shell.display_pub) is not shell.display_pub_class


class CapturedSink:
    """Passes output to the objects that capture the calling cell's output, as long as they do;
    passes output that none of them captures, and tracebacks, to the cell itself.

    Args:
        shell: the kernel's IPython shell.
        cell: sink for the rest.
    """

    def __init__(self, shell: Any, cell: CellSink) -> None:
        self._shell, self._cell, self._console = shell, cell, ConsoleSink()
        self._files = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._publisher = shell.display_pub
        # A file that passes text on to the kernel's stream finds the cell in the context.
        self._context = contextvars.copy_context()

    def show(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if self._is_captured(block):
                with contextlib.suppress(Exception):  # the user's file may fail
                    self._context.run(self._capture, block)
            else:
                self._cell.show([block])

    def note(self, text: str) -> None:
        self.show([Block((), Line("stderr", text))])

    def status(self, text: str, final: bool) -> None:
        self._cell.status("" if final else text, final)
        if final and text:
            self.show([Block((), Line("stdout", text))])

    def _is_captured(self, block: Block) -> bool:
        if isinstance(block.item, Trace):
            return False
        if isinstance(block.item, Rich) and not is_textual(block):
            is_same = self._shell.display_pub is self._publisher
            return is_same and holds_displays(self._shell)
        stream = "stderr" if isinstance(block.item, Bars) else as_text(block)[0]
        return getattr(sys, stream) is self._files[stream] and holds(stream)

    def _capture(self, block: Block) -> None:
        item, publisher = block.item, self._shell.display_pub
        if not isinstance(item, Rich) or is_textual(block):
            self._console.show([block])
        elif item.kind == "clear":
            publisher.clear_output()
        else:
            ids = [f"{r}:{i}" for r, i in zip(block.ranks, block.display_ids, strict=False) if i]
            transient, is_update = {"display_id": ids[0]} if ids else {}, item.kind == "update"
            if not is_update:
                publisher.publish(**heading(block.ranks))
            content = item.content()
            data, metadata = content["data"], content["metadata"]
            publisher.publish(data, metadata, transient=transient, update=is_update)


def cell_publisher() -> CellPublisher | None:
    """Return a publisher for the caller's notebook cell; None outside of a Jupyter kernel."""
    kernel = _kernel()
    return None if kernel is None else CellPublisher(kernel)


def _parent_of_caller(kernel: Any) -> dict[str, Any]:
    """Return the request that executes the calling thread's cell, or at least its header.

    A thread that has set its cell keeps it: for all output (ipykernel's `set_thread_parent`), or
    for printed text only, in versions of ipykernel that record the cell which started a thread.
    """
    parent: dict[str, Any] = getattr(kernel.shell, "get_parent", kernel.get_parent)()
    printed = getattr(sys.stdout, "parent_header", None)
    if not isinstance(printed, dict) or "msg_id" not in printed:
        return parent  # standard output is captured, or closed
    is_same = printed["msg_id"] == parent.get("header", {}).get("msg_id")
    return parent if is_same else {"header": printed}


def is_attended() -> bool:
    """Return whether the calling notebook has a front end that can answer `input()`.

    Programs that execute notebooks (nbclient, used by nbconvert and papermill) do not: they answer
    no requests for input and draw no widgets, and the page has no kernel when it is read later.
    """
    kernel = _kernel()
    return kernel is not None and bool(
        kernel.get_parent().get("content", {}).get("allow_stdin", True)
    )


def is_executed() -> bool:
    """Return whether a program executes the calling notebook, and so drops output that arrives
    after a cell's end.
    """
    return _kernel() is not None and not is_attended()


def _kernel() -> Any:
    kernel = own_kernel()
    return kernel if hasattr(kernel, "iopub_socket") else None
