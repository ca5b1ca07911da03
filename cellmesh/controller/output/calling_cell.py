"""The destination of the calling code's output: its notebook cell, a capture of the cell's output
(``%%capture``, ``capture_output`` or ``redirect_stdout``), or the console.

Objects that replace the kernel's own streams and display publisher when a run begins receive the
run's output, like that of the notebook's own code. Output after the end of the capture is shown in
the cell.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..kernel import own_kernel, own_shell
from .cell import CellSink, Displays
from .console import ConsoleBars, ConsoleSink, Sink, is_textual
from .fold import Block, Rich, Trace
from .mime_bundle import labelled


class CellPublisher:
    """Publishes iopub messages (type, content) in one notebook cell, from any thread, also after
    the cell's end.

    Args:
        kernel: the Jupyter kernel that executes the cell.

    Attributes:
        capture: the capture of the cell's output, if any.
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
            # The cell's own earlier output is still in buffers, and must be shown first.
            self._has_flushed = True
            for file in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, ValueError):  # the stream is closed
                    file.flush()
        kernel = self._kernel
        topic = f"kernel.{kernel.ident}.{kind}".encode()
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent, ident=topic)

    def display(self, content: dict[str, Any]) -> None:
        """Display a bundle of the notebook itself, or pass it to the capture of displays."""
        if self.capture is not None and self.capture.holds_displays():
            self.capture.display(lambda: content, content["transient"])
        else:
            self("display_data", content)


def current_sink(displays: Displays | None = None, has_tabs: bool = False) -> Sink:
    """Return the sink for the caller's output: its cell in a Jupyter kernel, else the console."""
    shell = own_shell()
    if shell is None:
        return ConsoleSink()
    publish = cell_publisher()
    capture = find_capture(shell, None) if publish is None else publish.capture
    sink = ConsoleSink() if publish is None else CellSink(publish, displays, has_tabs)
    return sink if capture is None else CapturedSink(capture, sink)


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


# ---------------------------------------------------------------- captured output


class Capture:
    """The objects that replace a kernel's own stdout, stderr and display publisher.

    Args:
        shell: the kernel's IPython shell.
        files: name of a stream -> file that replaces it; without streams that are not replaced.
        display_pub: display publisher that replaces the kernel's; None if it is not replaced.
    """

    def __init__(self, shell: Any, files: dict[str, Any], display_pub: Any) -> None:
        self._shell, self._files, self._display_pub = shell, files, display_pub
        # A file that passes text on to the kernel's stream finds the cell in the context.
        self._context = contextvars.copy_context()

    def holds(self, stream: str) -> bool:
        """Return whether text of this stream is still captured."""
        file = self._files.get(stream)
        return (
            file is not None and getattr(sys, stream) is file and not getattr(file, "closed", False)
        )

    def holds_displays(self) -> bool:
        """Return whether displays are still captured."""
        return self._display_pub is not None and self._shell.display_pub is self._display_pub

    def write(self, stream: str, text: str) -> None:
        """Write text to the file that captures this stream."""

        def write() -> None:
            self._files[stream].write(text)
            self._files[stream].flush()

        self._call(write)

    def publish(self, block: Block, rich: Rich) -> None:
        """Publish a display of ranks, or clear the output on their request, as IPython does."""
        if rich.kind == "clear":
            self._call(lambda: self._display_pub.clear_output(rich.bundle == b"wait"))
            return
        known = [f"{r}:{i}" for r, i in zip(block.ranks, block.display_ids, strict=True) if i]
        transient = {"display_id": known[0]} if known else {}
        is_update = rich.kind == "update"
        self.display(lambda: labelled(rich.content(), block.ranks), transient, is_update)

    def display(
        self, content: Callable[[], dict[str, Any]], transient: Any, is_update: bool = False
    ) -> None:
        """Publish a bundle as IPython's ``display`` does."""

        def publish() -> None:
            data, metadata = (content()[key] for key in ("data", "metadata"))
            self._display_pub.publish(data, metadata, transient=transient, update=is_update)

        self._call(publish)

    def _call(self, function: Any) -> None:
        with contextlib.suppress(Exception):  # the user's file may fail; other output is shown
            self._context.copy().run(function)


def find_capture(shell: Any, own_stream: type | None) -> Capture | None:
    """Return the capture of the calling cell's output, if any.

    Args:
        shell: the IPython shell.
        own_stream: class of the kernel's own streams; None in a terminal, where text is written to
            the current streams anyway.
    """
    out, err, display_pub = sys.stdout, sys.stderr, shell.display_pub
    is_own = type(display_pub) is shell.display_pub_class
    files = {}
    if own_stream is not None and not (isinstance(out, own_stream) and isinstance(err, own_stream)):
        named = {"stdout": out, "stderr": err}
        files = {k: f for k, f in named.items() if f is not None and not isinstance(f, own_stream)}
    return Capture(shell, files, None if is_own else display_pub) if files or not is_own else None


class CapturedSink:
    """Passes captured output to its capture, and other output to another sink: tracebacks (which
    the kernel shows as well), status lines, and streams that are not captured.

    Progress bars are captured once they have ended.

    Args:
        capture: the capture of the cell's output.
        shown: sink for the other output.
    """

    def __init__(self, capture: Capture, shown: Sink) -> None:
        self._capture, self.shown = capture, shown
        self._bars = ConsoleBars()

    def show(self, blocks: Sequence[Block]) -> None:
        self.shown.show([block for block in blocks if not self._is_captured(block)])

    def note(self, text: str) -> None:
        if self._capture.holds("stderr"):
            self._capture.write("stderr", text + "\n")
        else:
            self.shown.note(text)

    def status(self, text: str, final: bool) -> None:
        if final and text and self._capture.holds("stdout"):
            self.shown.status("", True)
            self._capture.write("stdout", text + "\n")
        else:
            self.shown.status(text, final)

    def _is_captured(self, block: Block) -> bool:
        """Pass a block of output to the capture; return whether it takes such output."""
        item = block.item
        if isinstance(item, Trace):
            return False
        if isinstance(item, Rich) and not is_textual(block):
            if self._capture.holds_displays():
                self._capture.publish(block, item)
            return self._capture.holds_displays()
        stream, text = self._bars.text_of(block)
        if self._capture.holds(stream) and text:
            self._capture.write(stream, text)
        return self._capture.holds(stream)
