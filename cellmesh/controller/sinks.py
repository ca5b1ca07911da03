"""Where folded output goes: stdout and stderr, or the output area of a notebook's cell."""

from __future__ import annotations

import html
import json
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from ..wire.ranks import describe_ranks, format_ranks
from .bar_console import ConsoleBars
from .bar_drawing import as_html, as_lines
from .bars import Bars, Mark
from .fold import VIEW_MIME, Block, Gap, Line, Live, Ranks, Rich, Trace, WidgetView


class Sink(Protocol):
    """Takes what is to be shown; called from the link's thread, in order."""

    def show(self, blocks: Sequence[Block | Live]) -> None:
        """Show these now."""

    def note(self, text: str) -> None:
        """Show a remark of cellmesh's own."""

    def status(self, text: str, final: bool) -> None:
        """Show a line that replaces the one before it, until one is `final`; a final "" takes it away."""


def label(ranks: Ranks) -> str:
    """``[0-3,5]``."""
    return f"[{format_ranks(ranks)}]"


def as_text(block: Block) -> tuple[str, str]:
    """A block as plain text: (stream, text with newline)."""
    mark = label(block.ranks)
    match block.item:
        case Line(stream, text):
            return stream, f"{mark} {text}\n"
        case Gap(num_lines, num_bytes):
            rank = block.ranks[0]
            return "stdout", (
                f"{mark} … {num_lines:,} lines ({num_bytes / 1e6:.1f} MB) not shown; "
                f"all of it: %dist_logs {rank}\n"
            )
        case Trace(_, _, traceback):
            return "stderr", f"{mark} {traceback.rstrip()}\n"
        case Rich(kind, bundle):
            if kind == "clear":
                return "stdout", ""
            text = str(json.loads(bundle)["data"].get("text/plain", ""))
            return "stdout", f"{mark}\n{text}\n" if "\n" in text else f"{mark} {text}\n"
        case Bars():
            return "stderr", "".join(f"{line}\n" for line in as_lines(block.item))
        case Mark():  # a place, and nothing there
            return "stdout", ""
    raise AssertionError(block.item)


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
            if isinstance(block, Block) and isinstance(block.item, Bars):
                pieces.append(("stderr", self._bars.ended(block.item)))
                going = self._bars.going(block.item)
            elif isinstance(block, Block):
                pieces.append(as_text(block))
            elif block.closed:
                pieces += [(block.stream, f"{label(ranks)} {text}\n") for ranks, text in block.lines]
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


Publish = Callable[[str, dict[str, Any]], None]


class Widgets(Protocol):
    """The ranks' widgets that the front end knows."""

    def is_open(self, model_id: str) -> bool:
        """Whether it knows this one."""

    def shown(self, model_id: str, publish: Publish, display_id: str, text: str) -> None:
        """One is displayed; without it, this text would be."""


@dataclass
class Displays:
    """The displays of a mesh that can be updated, also from a later cell.

    Attributes:
        ids: a rank's own id, as (rank, id) -> ours, of the display that was shown for it.
        owners: ours -> the lowest of its ranks, which it follows.
        widgets: None where there are none.
    """

    ids: dict[tuple[int, str], str] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    widgets: Widgets | None = None


class CellSink:
    """The output area of one notebook cell, however late the output comes.

    Args:
        publish: sends an iopub message (type, content) with that cell as its parent.
        displays: the mesh's; None for none but the cell's own.
    """

    def __init__(self, publish: Publish, displays: Displays | None = None) -> None:
        self._publish = publish
        self._live_id = ""
        self._status_id = ""
        self._bar_ids: dict[int, str] = {}
        self._displays = displays if displays is not None else Displays()

    def show(self, blocks: Sequence[Block | Live]) -> None:
        texts: list[tuple[str, str]] = []
        for block in blocks:
            if isinstance(block, Block) and _is_textual(block):
                texts.append(as_text(block))
                continue
            self._write(texts)
            texts = []
            if isinstance(block, Live):
                self._show_live(block)
            elif isinstance(block.item, Trace):
                self._show_trace(block.ranks, block.item)
            elif isinstance(block.item, Bars):
                self._show_bars(block.item)
            elif isinstance(block.item, Rich):
                self._show_rich(block, block.item)
        self._write(texts)

    def note(self, text: str) -> None:
        self._publish("stream", {"name": "stderr", "text": text + "\n"})

    def status(self, text: str, final: bool) -> None:
        if text or self._status_id:
            self._status_id = self._redraw(self._status_id, text, final)

    def _write(self, pieces: Sequence[tuple[str, str]]) -> None:
        for stream, text in join_streams(pieces):
            self._publish("stream", {"name": stream, "text": text})

    def _show_trace(self, ranks: Ranks, trace: Trace) -> None:
        self._publish(
            "error",
            {
                "ename": f"{label(ranks)} {trace.type_name}",
                "evalue": trace.text,
                "traceback": [f"{label(ranks)}", *trace.traceback.rstrip().split("\n")],
            },
        )

    def _show_bars(self, bars: Bars) -> None:
        is_new = bars.number not in self._bar_ids
        display_id = self._bar_ids.setdefault(bars.number, uuid.uuid4().hex)
        content = {
            "data": {"text/plain": "\n".join(as_lines(bars)), "text/html": as_html(bars)},
            "metadata": {},
            "transient": {"display_id": display_id},
        }
        self._publish("display_data" if is_new else "update_display_data", content)

    def _show_live(self, live: Live) -> None:
        text = "\n".join(f"{label(ranks)} {line}" for ranks, line in live.lines)
        self._live_id = self._redraw(self._live_id, text, live.closed)

    def _redraw(self, display_id: str, text: str, final: bool) -> str:
        """Show a text, in place of what has this id; gives the id under which it can be replaced."""
        kind = "update_display_data" if display_id else "display_data"
        display_id = display_id or uuid.uuid4().hex
        content = {
            "data": {"text/plain": text},
            "metadata": {},
            "transient": {"display_id": display_id},
        }
        self._publish(kind, content)
        return "" if final else display_id

    def _show_rich(self, block: Block, rich: Rich) -> None:
        if rich.kind == "clear":
            self._publish("clear_output", {"wait": rich.bundle == b"wait"})
            return
        content: dict[str, Any] = json.loads(rich.bundle)
        if isinstance(rich, WidgetView):
            self._show_widget(block.ranks, rich.class_name, content)
            return
        if rich.kind == "update":
            self._update(block, content)
            return
        known = [(r, i) for r, i in zip(block.ranks, block.display_ids, strict=True) if i]
        if known:
            ours = uuid.uuid4().hex
            self._displays.ids.update(dict.fromkeys(known, ours))
            self._displays.owners[ours] = block.ranks[0]
            content["transient"] = {"display_id": ours}
        self._publish("display_data", _labelled(content, block.ranks))

    def _show_widget(self, ranks: Ranks, class_name: str, content: dict[str, Any]) -> None:
        """Show the lowest rank's, which it answers; of the others it is told that they have one, too."""
        widgets, data = self._displays.widgets, content["data"]
        model_id, text = data[VIEW_MIME].get("model_id", ""), str(data.get("text/plain", class_name))
        if widgets is None or not widgets.is_open(model_id):
            first = f"`%%dist --ranks {ranks[0]}` shows rank {ranks[0]}'s"
            self._publish("display_data", _heading(ranks, f"{class_name} (not shown; {first})"))
            return
        remark = ""
        if others := ranks[1:]:
            verb = "has" if len(others) == 1 else "have"
            first = f"`%%dist --ranks {others[0]}` shows rank {others[0]}'s"
            remark = f"({describe_ranks(others)} {verb} one, too: {first})"
        self._publish("display_data", _heading(ranks[:1], remark))
        display_id = uuid.uuid4().hex
        self._publish("display_data", {**content, "transient": {"display_id": display_id}})
        widgets.shown(model_id, self._publish, display_id, text)

    def _update(self, block: Block, content: dict[str, Any]) -> None:
        # A display that several ranks share follows its lowest rank.
        shown: dict[str, list[int]] = {}
        for rank, theirs in zip(block.ranks, block.display_ids, strict=True):
            ours = self._displays.ids.get((rank, theirs))
            if ours is not None:
                shown.setdefault(ours, []).append(rank)
        for ours, ranks in shown.items():
            if self._displays.owners[ours] in ranks:
                labelled = _labelled(content, tuple(ranks))
                self._publish("update_display_data", {**labelled, "transient": {"display_id": ours}})


def _is_textual(block: Block) -> bool:
    """Whether a stream shows the block as well as a display would."""
    if isinstance(block.item, Line | Gap):
        return True
    if not isinstance(block.item, Rich) or block.item.kind != "result":
        return False
    return list(json.loads(block.item.bundle)["data"]) == ["text/plain"]


def _labelled(content: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The bundle with its ranks written over it, where its type has room for that."""
    mark = label(ranks)
    data = dict(content["data"])
    if "text/html" in data:
        data["text/html"] = f"{html_label(ranks)}{data['text/html']}"
    elif "image/png" in data and isinstance(data["image/png"], str):
        data["text/html"] = (
            f'{html_label(ranks)}<img src="data:image/png;base64,{data["image/png"].strip()}"/>'
        )
        del data["image/png"]
    elif "image/svg+xml" in data:
        data["text/html"] = f"{html_label(ranks)}{data.pop('image/svg+xml')}"
    elif "text/latex" in data or "text/markdown" in data:
        text = data.pop("text/markdown", None) or data.pop("text/latex")
        data["text/markdown"] = f"`{mark}`\n\n{text}"
    if "text/plain" in data:
        data["text/plain"] = f"{mark} {data['text/plain']}"
    return {**content, "data": data}


def _heading(ranks: Ranks, text: str) -> dict[str, Any]:
    """A line that stands before what has no room for a label."""
    line = f"{label(ranks)} {text}".rstrip()
    style = "font:11px monospace;opacity:.65;margin:2px 0"
    data = {"text/plain": line, "text/html": f'<div style="{style}">{html.escape(line)}</div>'}
    return {"data": data, "metadata": {}}


def html_label(ranks: Ranks) -> str:
    """The label as HTML, a line of its own."""
    return f'<div style="font:11px monospace;opacity:.65;margin:2px 0">{html.escape(label(ranks))}</div>'


def join_streams(pieces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighbours of the same stream; empty text goes."""
    joined: list[tuple[str, list[str]]] = []
    for stream, text in pieces:
        if not text:
            continue
        if joined and joined[-1][0] == stream:
            joined[-1][1].append(text)
        else:
            joined.append((stream, [text]))
    return [(stream, "".join(texts)) for stream, texts in joined]


def current_sink(displays: Displays | None = None) -> Sink:
    """The sink for the code that asks: its notebook cell in a Jupyter kernel, else the console.

    Args:
        displays: the mesh's.
    """
    publish = cell_publisher()
    return ConsoleSink() if publish is None else CellSink(publish, displays)


def cell_publisher() -> Publish | None:
    """What publishes in the output area of the notebook cell that asks, from any thread and at any time.

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
    """Whether somebody sits before the notebook whose cell asks.

    Programs that execute notebooks (nbclient, and nbconvert and papermill by it) take no questions; nobody
    would draw a widget, and where its page is shown later there is no kernel.
    """
    kernel = _kernel()
    return kernel is not None and bool(kernel.get_parent().get("content", {}).get("allow_stdin", True))


def _kernel() -> Any:
    """The Jupyter kernel that this is, None if it is none."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    kernel = getattr(shell, "kernel", None)
    return kernel if hasattr(kernel, "iopub_socket") else None
