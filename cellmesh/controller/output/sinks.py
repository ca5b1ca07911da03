"""Sinks for folded output: stdout and stderr, or the output area of a notebook cell."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from ..progress.bars import Bars
from ..progress.console import ConsoleBars
from .cell import CellSink as CellSink
from .displays import Displays as Displays
from .displays import Publish as Publish
from .fold import Block, Live, Trace
from .live_lines import compact
from .mime_bundle import label as label
from .plain import as_remark
from .plain import as_text as as_text
from .plain import join_streams as join_streams


class Sink(Protocol):
    """Shows output; called from the link's loop, in order."""

    def show(self, blocks: Sequence[Block | Live]) -> None:
        """Show these blocks now."""

    def note(self, text: str) -> None:
        """Show a remark of cellmesh's own."""

    def status(self, text: str, final: bool) -> None:
        """Show a status line in place of the previous one, until one is `final`; a final "" removes
        it.
        """


class ConsoleSink:
    """Plain text on stdout and stderr.

    Args:
        out: where stdout goes; None for ``sys.stdout`` as it is at the time.
        err: likewise for stderr.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out, err
        self._has_status = False
        self._bars = ConsoleBars()

    def show(self, blocks: Sequence[Block | Live]) -> None:
        pieces: list[tuple[str, str]] = []
        going: str | None = None
        for block in blocks:
            try:
                if isinstance(block, Block) and isinstance(block.item, Bars):
                    pieces.append(("stderr", self._bars.ended(block.item)))
                    going = self._bars.going(block.item)
                else:
                    pieces += _as_texts(block)
            except (
                Exception
            ) as error:  # user code gives odd things to display, and prints more behind them
                pieces.append(as_remark(block, error))
        for stream, text in join_streams(pieces):
            self._write(stream, text)
        if going is not None:
            self.status(going, not going)

    def note(self, text: str) -> None:
        self._write("stderr", text + "\n")

    def status(self, text: str, final: bool) -> None:
        out = self._out or sys.stdout
        if not out.isatty():
            if final and text:
                self._write("stdout", text + "\n")
            return
        width = shutil.get_terminal_size().columns - 1  # a longer line could not be taken back
        self._write("stdout", (text + "\n" if text else "") if final else text[:width])
        self._has_status = not final

    def _write(self, stream: str, text: str) -> None:
        if self._has_status:
            self._has_status = False
            self._write("stdout", "\r\x1b[K")
        file = (self._out or sys.stdout) if stream == "stdout" else (self._err or sys.stderr)
        file.write(text)
        file.flush()


def _as_texts(block: Block | Live) -> list[tuple[str, str]]:
    if isinstance(block, Block):
        return [as_text(block)]
    if not block.closed:
        return []
    return [(block.stream, f"{label(ranks)} {text}\n") for ranks, text in compact(block.lines)]


class SilentSink:
    """Shows nothing but errors and remarks (``-q``).

    Args:
        sink: where those go.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def show(self, blocks: Sequence[Block | Live]) -> None:
        self._sink.show([b for b in blocks if isinstance(b, Block) and isinstance(b.item, Trace)])

    def note(self, text: str) -> None:
        self._sink.note(text)

    def status(self, text: str, final: bool) -> None: ...


class Unremarked:
    """A sink that drops cellmesh's remarks: the caller reports their content in another way.

    Args:
        sink: where that goes.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def show(self, blocks: Sequence[Block | Live]) -> None:
        self._sink.show(blocks)

    def note(self, text: str) -> None: ...

    def status(self, text: str, final: bool) -> None:
        self._sink.status(text, final)


def current_sink(displays: Displays | None = None, has_tabs: bool = False) -> Sink:
    """Return the caller's sink: its notebook cell in a Jupyter kernel, else the console.

    Args:
        displays: the mesh's.
        has_tabs: whether ranks that show different things get a switch.
    """
    publish = cell_publisher()
    return ConsoleSink() if publish is None else CellSink(publish, displays, has_tabs)


def cell_publisher() -> Publish | None:
    """Return a function that publishes in the caller's notebook cell, from any thread at any later
    time.

    Returns:
        None outside of a Jupyter kernel.
    """
    kernel = _kernel()
    if kernel is None:
        return None
    parent = kernel.get_parent()
    published: list[bool] = []

    def publish(kind: str, content: dict[str, Any]) -> None:
        if not published:
            # What the cell itself has printed before waits in buffers, and comes first.
            published.append(True)
            sys.stdout.flush()
            sys.stderr.flush()
        topic = f"kernel.{kernel.ident}.{kind}".encode()
        kernel.session.send(kernel.iopub_socket, kind, content, parent=parent, ident=topic)

    return publish


def is_attended() -> bool:
    """Whether the calling notebook has a front end that can answer `input()`.

    Programs that execute notebooks (nbclient, and nbconvert and papermill by it) take no questions;
    nobody would draw a widget, and where its page is shown later there is no kernel.
    """
    kernel = _kernel()
    return kernel is not None and bool(
        kernel.get_parent().get("content", {}).get("allow_stdin", True)
    )


def _kernel() -> Any:
    """Return the Jupyter kernel of this process; None if there is none."""
    if "ipykernel" not in sys.modules:
        return None
    interactive = sys.modules.get(
        "IPython.core.getipython"
    )  # IPython itself looks this up at each call
    shell = interactive.get_ipython() if interactive is not None else None
    kernel = getattr(shell, "kernel", None)
    return kernel if hasattr(kernel, "iopub_socket") else None
