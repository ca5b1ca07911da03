"""Sinks, which show the output of runs, among them one that writes plain text to stdout and stderr.

In a terminal, each finished progress bar has its own line; running bars share one redrawn line.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

import msgspec

from .bars import Bars, as_lines
from .fold import AlikeLines, Block, Gap, Line, Live, Rich, Trace
from .mime_bundle import label
from .number_folding import compact, join_lines

COLOUR = re.compile(r"\x1b\[[\d;]*m")
# Maximum number of running bars in the shared line.
_MAX_GOING = 2


class Sink(Protocol):
    """Protocol of a destination of a run's output; called in order, in the event loop of the
    connection to the agent.
    """

    def show(self, blocks: Sequence[Block]) -> None:
        """Show blocks of output now."""

    def note(self, text: str) -> None:
        """Show a remark of cellmesh itself."""

    def status(self, text: str, final: bool) -> None:
        """Show a status line in place of the previous one, unless that was `final`; a final ""
        removes it.
        """


def in_terminal(text: str, mesh: str = "") -> str:
    """Return a text with commands in place of the magics that it names, for a command's user.

    Args:
        text: the text. Magics without a command are left: ``cellmesh shell`` has them.
        mesh: name of the mesh, for magics that need none; "" if it is not known.
    """
    magics = r"%dist_(heal|status|logs|stacks|interrupt|stop(?! [\w-]))"
    text = re.sub(magics, lambda magic: f"cellmesh {magic[1]} {mesh}".rstrip(), text)
    text = re.sub(r"%dist_(start|stop)", r"cellmesh \1", text)
    text = text.replace("%dist_attach", "cellmesh shell")
    return text.replace(" or cellmesh.start()", "")


class ConsoleSink:
    """Writes output as plain text to two files, by default to ``sys.stdout`` and ``sys.stderr`` as
    they are at the time of writing.

    Args:
        out, err: the files.
        mesh: name of the mesh that a command acts on: its remarks are those `in_terminal`.
    """

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, mesh: str = ""
    ) -> None:
        self._out, self._err, self._mesh = out, err, mesh
        self._has_status = False

    @functools.cached_property
    def _bars(self) -> ConsoleBars:
        return ConsoleBars()  # few runs have output

    def show(self, blocks: Sequence[Block]) -> None:
        pieces: list[tuple[str, str]] = []
        going: str | None = None
        for block in blocks:
            try:
                stream, text = self._bars.text_of(block)
                if isinstance(block.item, Trace) and not self._file("stderr").isatty():
                    text = COLOUR.sub("", text)
                if self._mesh and isinstance(block.item, Trace | Gap):
                    text = in_terminal(text, self._mesh)
                pieces.append((stream, text))
                if isinstance(block.item, Bars):
                    going = self._bars.going(block.item)
            except (
                Exception
            ) as error:  # a display of user code may be malformed; later output is still shown
                pieces.append(as_text(as_remark(block, error)))
        for stream, text in join_streams(pieces):
            self._write(stream, text)
        if going is not None:
            self.status(going, not going)

    def note(self, text: str) -> None:
        self._write("stderr", (in_terminal(text, self._mesh) if self._mesh else text) + "\n")

    def status(self, text: str, final: bool) -> None:
        if not self._file("stdout").isatty():
            if final and text:
                self._write("stdout", text + "\n")
            return
        width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be redrawn
        self._write("stdout", (text + "\n" if text else "") if final else text[:width])
        self._has_status = not final

    def _write(self, stream: str, text: str) -> None:
        if self._has_status:
            self._has_status = False
            self._write("stdout", "\r\x1b[K")
        file = self._file(stream)
        with contextlib.suppress(BrokenPipeError):  # as of `| head`
            file.write(text)
            file.flush()

    def _file(self, stream: str) -> TextIO:
        """Return the file of a stream, or one that drops all text if the stream is closed."""
        given = self._out if stream == "stdout" else self._err
        file: TextIO | None = given or getattr(sys, stream)
        return io.StringIO() if file is None or getattr(file, "closed", False) else file


class SilentSink:
    """Passes only errors and remarks on to another sink (``-q``)."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def show(self, blocks: Sequence[Block]) -> None:
        self._sink.show([block for block in blocks if isinstance(block.item, Trace)])

    def note(self, text: str) -> None:
        self._sink.note(text)

    def status(self, text: str, final: bool) -> None: ...


class Unremarked:
    """Passes output on to another sink, without cellmesh's remarks, which the caller reports."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def show(self, blocks: Sequence[Block]) -> None:
        self._sink.show(blocks)

    def note(self, text: str) -> None: ...

    def status(self, text: str, final: bool) -> None:
        self._sink.status(text, final)


class ConsoleBars:
    """Records which progress bars of one run a terminal has shown."""

    def __init__(self) -> None:
        self._shown: dict[int, object] = {}

    def text_of(self, block: Block) -> tuple[str, str]:
        """Return a block of output as plain text, like `as_text`; progress bars once they have
        ended.
        """
        if isinstance(block.item, Bars):
            return "stderr", self.ended(block.item)
        return as_text(block)

    def ended(self, bars: Bars) -> str:
        """Return lines, with newlines, for bars that have ended and are not yet shown as ended."""
        if not bars.closed:
            return ""
        rows = tuple(
            row for row in bars.rows if self._shown.get(row.number) != (row.ranks, row.state)
        )
        self._shown.update((row.number, (row.ranks, row.state)) for row in rows)
        lines = as_lines(
            msgspec.structs.replace(bars, rows=rows, num_hidden=bars.num_hidden if rows else 0)
        )
        return "".join(f"{line}\n" for line in lines)

    def going(self, bars: Bars) -> str:
        """Return one line with the running bars, the innermost last; "" without running bars."""
        rows = tuple(row for row in bars.rows if row.state == "open")
        if bars.closed or not rows:
            return ""
        return "   ".join(as_lines(Bars(bars.number, rows[-_MAX_GOING:])))


def as_text(block: Block) -> tuple[str, str]:
    """Return a block of output as plain text: (stream, text with newline)."""
    mark = label(block.ranks)
    match block.item:
        case Line(stream, text):
            return stream, f"{mark} {text}\n" if block.ranks else f"{text}\n"
        case AlikeLines(lines):
            texts = [(rank, line.text) for rank, line in lines if rank in block.ranks]
            return lines[0][1].stream, f"{mark} {join_lines(texts)}\n"
        case Gap(num_lines, num_bytes):
            rank = block.ranks[0]
            return "stdout", (
                f"{mark} … {num_lines:,} lines ({num_bytes / 1e6:.1f} MB) not shown; "
                f"all of it: %dist_logs {rank}\n"
            )
        case Trace():
            return "stderr", f"{mark} {block.item.traceback.rstrip()}\n"
        case Rich(kind, _):
            if kind == "clear":
                return "stdout", ""
            text = str(block.item.content()["data"].get("text/plain", ""))
            return "stdout", f"{mark}\n{text}\n" if "\n" in text else f"{mark} {text}\n"
        case Live(lines, closed, stream):
            rows = compact(lines) if closed else []
            return stream, "".join(f"{label(ranks)} {text}\n" for ranks, text in rows)
    raise AssertionError(block.item)


def is_textual(block: Block) -> bool:
    """Return whether a block of output can be shown as plain text without loss."""
    if isinstance(block.item, Line | AlikeLines | Gap):
        return True
    if not isinstance(block.item, Rich) or block.item.kind != "result":
        return False
    return list(block.item.content()["data"]) == ["text/plain"]


def as_remark(block: Block, error: Exception) -> Block:
    """Return the remark that replaces a block of output which cannot be shown."""
    what = "a display" if isinstance(block.item, Rich) else "output"
    if isinstance(block.item, Trace):
        what = block.item.type_name
    text = f"{what} could not be shown: {type(error).__name__}: {error}"
    return Block(block.ranks, Line("stderr", text))


def join_streams(pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join adjacent texts of the same stream; drop empty texts."""
    joined: list[tuple[str, list[str]]] = []
    for stream, text in pieces:
        if not text:
            continue
        if joined and joined[-1][0] == stream:
            joined[-1][1].append(text)
        else:
            joined.append((stream, [text]))
    return [(stream, "".join(texts)) for stream, texts in joined]
