"""Output of ranks in a notebook cell that captures it: with ``%%capture``, ``capture_output`` or
``redirect_stdout``.

What stands in place of the kernel's own streams and display publisher when a run begins receives
the run's output, as it receives that of the notebook's own code. Output that follows once the
capture has ended is shown in the cell.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Sequence
from typing import Any

from .bar_drawing import Bars
from .cell import CellSink
from .cell_record import Displays, Publish
from .console import ConsoleBars, ConsoleSink, as_texts, is_textual, join_streams
from .fold import AlikeLines, Block, Gap, Line, Live, Ranks, Rich
from .mime_bundle import labelled


class Capture:
    """What stands in place of a kernel's own stdout, stderr and display publisher.

    Args:
        shell: the kernel's IPython shell.
        files: by name of the stream, those that are not the kernel's.
        display_pub: the display publisher; None if it is the kernel's.
    """

    def __init__(self, shell: Any, files: dict[str, Any], display_pub: Any) -> None:
        self._shell, self._files, self._display_pub = shell, files, display_pub
        # A stream that passes text on to the kernel's finds the cell in the context.
        self._context = contextvars.copy_context()

    def holds(self, stream: str) -> bool:
        """Return whether text of this stream is captured now."""
        file = self._files.get(stream)
        return (
            file is not None and getattr(sys, stream) is file and not getattr(file, "closed", False)
        )

    def holds_displays(self) -> bool:
        """Return whether displays are captured now."""
        return self._display_pub is not None and self._shell.display_pub is self._display_pub

    def write(self, stream: str, text: str) -> None:
        """Write text to the file that captures this stream."""

        def write() -> None:
            self._files[stream].write(text)
            self._files[stream].flush()

        self._call(write)

    def publish(self, kind: str, content: dict[str, Any]) -> None:
        """Publish as IPython's ``display`` and ``clear_output`` do."""
        pub = self._display_pub
        if kind == "clear_output":
            self._call(lambda: pub.clear_output(content["wait"]))
            return
        data, metadata = content["data"], content.get("metadata", {})
        more = {"transient": content.get("transient", {}), "update": kind != "display_data"}
        self._call(lambda: pub.publish(data, metadata, **more))

    def _call(self, function: Any) -> None:
        with contextlib.suppress(Exception):  # of the user's file: the run's other output follows
            self._context.copy().run(function)


def find_capture(shell: Any, own_stream: type | None) -> Capture | None:
    """Return what captures the output of the calling cell; None if nothing does.

    Args:
        shell: the IPython shell.
        own_stream: the class of the kernel's own streams; None in a terminal, where text is written
            to the streams of the moment.
    """
    out, err, display_pub = sys.stdout, sys.stderr, shell.display_pub
    is_own = type(display_pub) is shell.display_pub_class
    files = {}
    if own_stream is not None and not (isinstance(out, own_stream) and isinstance(err, own_stream)):
        named = {"stdout": out, "stderr": err}
        files = {k: f for k, f in named.items() if f is not None and not isinstance(f, own_stream)}
    return Capture(shell, files, None if is_own else display_pub) if files or not is_own else None


class CapturedSink(CellSink):
    """Gives captured output to its capture, and shows the rest in the cell: tracebacks, as the
    kernel does, status lines, and what is not captured.

    Progress is captured once it has ended, as a file would get it.

    Args:
        publish: as of `CellSink`.
        capture: what captures output of this cell.
        displays: as of `CellSink`.
    """

    def __init__(self, publish: Publish, capture: Capture, displays: Displays | None) -> None:
        super().__init__(publish, displays)
        self._capture = capture
        self._ended_bars = ConsoleBars()

    def status(self, text: str, final: bool) -> None:
        if final and text and self._capture.holds("stdout"):
            super().status("", True)
            self._write([("stdout", text + "\n")])
        else:
            super().status(text, final)

    def _show_one(self, block: Block | Live, texts: list[tuple[str, str]]) -> None:
        if not self._capture.holds(_stream(block)):
            super()._show_one(block, texts)
        elif isinstance(block, Block) and isinstance(block.item, Bars):
            texts.append(("stderr", self._ended_bars.ended(block.item)))
        else:
            texts += as_texts(block)

    def _write(self, pieces: Sequence[tuple[str, str]]) -> None:
        for stream, text in join_streams(pieces):
            if self._capture.holds(stream):
                self._capture.write(stream, text)
            else:
                super()._write([(stream, text)])

    def _publish_display(self, kind: str, content: dict[str, Any]) -> None:
        if self._capture.holds_displays():
            self._capture.publish(kind, content)
        else:
            super()._publish_display(kind, content)

    def _show_figure(self, ranks: Ranks, content: dict[str, Any]) -> None:
        if self._capture.holds_displays():  # each by itself, for code that reads them
            self._capture.publish("display_data", labelled(content, ranks))
        else:
            super()._show_figure(ranks, content)


class CapturedConsole(ConsoleSink):
    """Gives displays of a cell in a terminal to their capture, and writes the rest as text.

    Args:
        capture: what captures displays of this cell.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def show(self, blocks: Sequence[Block | Live]) -> None:
        for block in blocks:
            if self._capture.holds_displays() and isinstance(block, Block) and _is_display(block):
                assert isinstance(block.item, Rich)
                content = labelled(block.item.content(), block.ranks)
                self._capture.publish("display_data", content)
            else:
                super().show([block])


def _is_display(block: Block) -> bool:
    is_rich = isinstance(block.item, Rich) and block.item.kind != "clear"
    return is_rich and not is_textual(block)


def _stream(block: Block | Live) -> str:
    """Return the stream that shows a block of output as text; "" for displays and tracebacks."""
    if isinstance(block, Live):
        return block.stream
    match block.item:
        case Line(stream, _):
            return stream
        case AlikeLines(lines):
            return lines[0][1].stream
        case Bars():
            return "stderr"
        case Gap():
            return "stdout"
    return "stdout" if is_textual(block) else ""
