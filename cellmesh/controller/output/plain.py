"""Folded output as plain text, for streams."""

from __future__ import annotations

from collections.abc import Sequence

from ..progress.bars import Bars, Mark
from ..progress.drawing import as_lines
from .fold import Block, Gap, Line, Live, Rich, Trace
from .mime_bundle import label


def as_text(block: Block) -> tuple[str, str]:
    """A block as plain text: (stream, text with newline)."""
    mark = label(block.ranks)
    match block.item:
        case Line(stream, text):
            return stream, f"{mark} {text}\n" if block.ranks else f"{text}\n"
        case Gap(num_lines, num_bytes):
            rank = block.ranks[0]
            return "stdout", (
                f"{mark} … {num_lines:,} lines ({num_bytes / 1e6:.1f} MB) not shown; "
                f"all of it: %dist_logs {rank}\n"
            )
        case Trace(_, _, traceback):
            return "stderr", f"{mark} {traceback.rstrip()}\n"
        case Rich(kind, _):
            if kind == "clear":
                return "stdout", ""
            text = str(block.item.content()["data"].get("text/plain", ""))
            return "stdout", f"{mark}\n{text}\n" if "\n" in text else f"{mark} {text}\n"
        case Bars():
            return "stderr", "".join(f"{line}\n" for line in as_lines(block.item))
        case Mark():  # a place, and nothing there
            return "stdout", ""
    raise AssertionError(block.item)


def is_textual(block: Block) -> bool:
    """Whether a stream shows the block as well as a display would."""
    if isinstance(block.item, Line | Gap):
        return True
    if not isinstance(block.item, Rich) or block.item.kind != "result":
        return False
    return list(block.item.content()["data"]) == ["text/plain"]


def as_remark(block: Block | Live, error: Exception) -> tuple[str, str]:
    """Return a remark that replaces a block which cannot be shown, in the form of `as_text`."""
    if isinstance(block, Live):
        ranks, what = tuple(sorted({rank for each, _ in block.lines for rank in each})), "output"
    elif isinstance(block.item, Trace):
        ranks, what = block.ranks, block.item.type_name
    else:
        ranks, what = block.ranks, "a display" if isinstance(block.item, Rich) else "output"
    return "stderr", f"{label(ranks)} {what} could not be shown: {type(error).__name__}: {error}\n"


def join_streams(pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighbouring texts of one stream; drop empty texts."""
    joined: list[tuple[str, list[str]]] = []
    for stream, text in pieces:
        if not text:
            continue
        if joined and joined[-1][0] == stream:
            joined[-1][1].append(text)
        else:
            joined.append((stream, [text]))
    return [(stream, "".join(texts)) for stream, texts in joined]
