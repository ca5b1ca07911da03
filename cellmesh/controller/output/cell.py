"""Shows a run's output in the output area of its notebook cell, over the Jupyter protocol."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from ...wire.ranks import group_ranks
from .bar_drawing import Bars, as_html, as_lines
from .cell_record import DisplayPlace, Displays, Publish, Record, RecordEntry
from .clear_output import Pane
from .console import as_remark, as_text, is_textual, join_streams
from .fold import Block, Line, Live, Ranks, Rich, Trace
from .mime_bundle import FigureRow, has_room, heading, is_figure, label, labelled, pre
from .number_folding import compact
from .rank_tabs import switch
from .terminal import as_html as as_coloured_html

_SUMMARY = "cursor:pointer;font:11px monospace;opacity:.65;margin:2px 0"
_STAYS = "cleared: what stands above stays, as others have shown too much to show it again"
# When a rank clears, others' output is shown again: always if it is little, else until that comes
# to so much.
_SMALL_BYTES = 40_000
_MAX_AGAIN_BYTES = 1_000_000


class CellSink:
    """Shows output in one notebook cell, also output that arrives after the cell has ended.

    Args:
        publish: sends an iopub message (type, content) with that cell as its parent.
        displays: the mesh's; None for none but the cell's own.
        has_tabs: whether ranks that show different things get a switch in the end, if the mesh's
            have.
    """

    def __init__(
        self, publish: Publish, displays: Displays | None = None, has_tabs: bool = False
    ) -> None:
        self._send = publish
        self._row: FigureRow | None = None  # figures that stand at the end of the area
        self._live_id = ""
        self._status_id = ""
        self._live: Live | None = None
        self._status = ""
        self._has_tabs = has_tabs
        self._tabs_id = self._tabs = ""
        self._record = Record()
        self._clearing: set[int] = set()  # ranks whose next output clears what they have shown
        self._again_bytes = 0.0
        self._pane = Pane()
        self._pane_id = ""
        self._bar_ids: dict[int, str] = {}
        self._displays = displays if displays is not None else Displays()

    def show(self, blocks: Sequence[Block | Live]) -> None:
        texts: list[tuple[str, str]] = []
        for block in blocks:
            try:
                self._show_one(block, texts)
            except (
                Exception
            ) as error:  # user code gives odd things to display, and prints more behind them
                texts.append(as_remark(block, error))
        self._write(texts)
        if self._pane.is_changed:
            self._draw_pane()

    def _show_one(self, block: Block | Live, texts: list[tuple[str, str]]) -> None:
        """Show a block of output, or add its text to the stream message of the blocks beside it."""
        if self._clearing:
            self._flush(texts)
            self._clear_for(block)
        if self._pane.take(block):
            assert isinstance(block, Block)
            self._record.add(RecordEntry(block.ranks, block.item))
            return
        if isinstance(block, Block) and is_textual(block):
            texts.append(as_text(block))
            self._record.add(RecordEntry(block.ranks, block.item))
            return
        self._flush(texts)
        if isinstance(block, Live):
            self._show_live(block)
        elif isinstance(block.item, Trace):
            self._show_trace(block.ranks, block.item)
        elif isinstance(block.item, Bars):
            self._show_bars(block.ranks, block.item)
        elif isinstance(block.item, Rich):
            self._show_rich(block, block.item)

    def note(self, text: str) -> None:
        self._record.add(RecordEntry((), Line("stderr", text)))
        self._write([("stderr", text + "\n")])

    def status(self, text: str, final: bool) -> None:
        if text or self._status_id:
            self._status = "" if final else text
            self._status_id = self._redraw(self._status_id, text, final)

    def end(self, ranks: Sequence[int]) -> None:
        """Show the switch to each rank's output, as the run has ended or has printed more since."""
        self._displays.keep(self._record)
        if not (self._has_tabs and self._displays.has_tabs and len(ranks) > 1):
            return
        identity = self._tabs_id or uuid.uuid4().hex
        record = self._record
        text = switch(record.by_rank(), identity, joined=record.joined_lines())
        if not text or text == self._tabs:
            return
        # Without text: in a console, where it would have nothing to switch, it is not shown.
        self._put({"data": {"text/html": text}, "metadata": {}}, identity, not self._tabs_id)
        self._tabs_id, self._tabs = identity, text

    def _publish(self, kind: str, content: dict[str, Any]) -> None:
        if kind != "update_display_data":
            self._row = None  # the next figure stands below this
        self._send(kind, content)

    def _put(self, content: dict[str, Any], display_id: str, is_new: bool) -> None:
        """Display a bundle under a new display id, or update the display that has its id."""
        kind = "display_data" if is_new else "update_display_data"
        self._publish(kind, _with_id(content, display_id))

    def _flush(self, texts: list[tuple[str, str]]) -> None:
        self._write(texts)
        texts.clear()

    def _write(self, pieces: Sequence[tuple[str, str]]) -> None:
        for stream, text in join_streams(pieces):
            self._publish("stream", {"name": stream, "text": text})

    def _publish_display(self, kind: str, content: dict[str, Any]) -> None:
        """Publish what ranks display, or that they clear."""
        self._publish(kind, content)

    def _show_trace(self, ranks: Ranks, trace: Trace) -> None:
        self._publish_trace(ranks, trace)
        self._record.add(RecordEntry(ranks, trace))

    def _publish_trace(self, ranks: Ranks, trace: Trace) -> None:
        self._publish(
            "error",
            {
                "ename": f"{label(ranks)} {trace.type_name}",
                "evalue": trace.text,
                "traceback": [f"{label(ranks)}", *trace.traceback.rstrip().split("\n")],
            },
        )
        if trace.whole:
            # Without text, as the switch between ranks is.
            self._publish("display_data", {"data": {"text/html": _whole(trace)}, "metadata": {}})

    def _show_bars(self, ranks: Ranks, bars: Bars) -> None:
        is_new = bars.number not in self._bar_ids
        display_id = self._bar_ids.setdefault(bars.number, uuid.uuid4().hex)
        content = {
            "data": {"text/plain": "\n".join(as_lines(bars)), "text/html": as_html(bars)},
            "metadata": {},
        }
        self._put(content, display_id, is_new)
        entry = RecordEntry(ranks, None, display_id, _with_id(content, display_id))
        self._record.add(entry) if is_new else self._record.replace(entry)

    def _show_live(self, live: Live) -> None:
        text = _live_text(live)
        self._live_id = self._redraw(self._live_id, text, live.closed)
        self._live = None if live.closed else live
        if live.closed:
            for ranks, text in live.lines:
                for line in text.split("\n"):
                    self._record.add(RecordEntry(ranks, Line(live.stream, line)))

    def _redraw(self, display_id: str, text: str, final: bool) -> str:
        """Replace the text of the display with this id; return the id under which the new text can
        be replaced.
        """
        identity = display_id or uuid.uuid4().hex
        self._put({"data": {"text/plain": text}, "metadata": {}}, identity, not display_id)
        return "" if final else identity

    def _show_rich(self, block: Block, rich: Rich) -> None:
        if rich.kind == "clear":
            self._clear(block.ranks, rich.bundle == b"wait")
            return
        content = rich.content()
        if rich.kind == "update":
            self._update(block, content)
            return
        known = [(r, i) for r, i in zip(block.ranks, block.display_ids, strict=True) if i]
        ours = ""
        if known:
            ours = uuid.uuid4().hex
            for rank, theirs in known:
                self._displays.put(rank, theirs, DisplayPlace(ours, block.ranks[0]))
        self._display(block.ranks, content, ours)
        self._record.add(RecordEntry(block.ranks, rich, ours))

    def _display(self, ranks: Ranks, content: dict[str, Any], display_id: str) -> None:
        if not display_id and is_figure(content):
            self._show_figure(ranks, content)
            return
        if not has_room(content):
            self._publish_display("display_data", heading(ranks, ""))
        if display_id:
            content = _with_id(content, display_id)
        self._publish_display("display_data", labelled(content, ranks))

    def _show_figure(self, ranks: Ranks, content: dict[str, Any]) -> None:
        row = self._row
        if row is not None and row.has_room(ranks, content):
            self._publish("update_display_data", row.add(ranks, content))
            return
        row = FigureRow()
        self._publish("display_data", row.add(ranks, content))
        self._row = row

    def _update(self, block: Block, content: dict[str, Any]) -> None:
        # A display that several ranks share follows its lowest rank.
        shown: dict[int, DisplayPlace] = {}
        for rank, theirs in zip(block.ranks, block.display_ids, strict=True):
            place = self._displays.places.get((rank, theirs))
            if place is not None:
                self._displays.put(rank, theirs, place)
                shown[rank] = place
        for place, ranks in group_ranks(shown).items():
            if place.leader in ranks:
                shown_now = _with_id(labelled(content, ranks), place.display_id)
                self._publish_display("update_display_data", shown_now)
                self._record.replace(RecordEntry(ranks, _as_display(block.item), place.display_id))

    # ---- clearing

    def _clear(self, ranks: Ranks, wait: bool) -> None:
        """Handle ``clear_output`` of these ranks: remove their output, now or when they show more;
        keep that of others.
        """
        others = self._record.cost_of_others(ranks)
        if not others and all(set(each) <= set(ranks) for each, _ in self._live_lines()):
            self._forget_places()
            self._record.empty()
            self._live = None
            self._clearing.clear()
            self._publish_display("clear_output", {"wait": wait})
            return
        self._clearing.update(ranks)
        if not wait:
            self._clear_now(ranks)

    def _live_lines(self) -> Sequence[tuple[Ranks, str]]:
        return self._live.lines if self._live is not None else ()

    def _clear_for(self, block: Block | Live) -> None:
        """Clear the earlier output of those ranks of a block that called
        ``clear_output(wait=True)`` before it.
        """
        if isinstance(block, Live):
            ranks = {rank for each, _ in block.lines for rank in each}
        elif isinstance(block.item, Rich) and block.item.kind in ("clear", "update"):
            return
        else:
            ranks = set(block.ranks)
        if due := self._clearing & ranks:
            self._clear_now(due)

    def _clear_now(self, ranks: Iterable[int]) -> None:
        """Clear the whole cell, which is all that a front end can do, and show again what other
        ranks have shown, unless it is much.
        """
        gone = set(ranks)
        self._clearing -= gone
        if not self._record.holds(gone) and not any(
            gone.intersection(each) for each, _ in self._live_lines()
        ):
            return
        cost = self._record.cost_of_others(gone)
        self._record.clear(gone)
        if cost <= _SMALL_BYTES:
            self._show_again(gone)
        elif self._again_bytes + cost <= _MAX_AGAIN_BYTES:
            self._again_bytes += cost
            self._show_again(gone)
        else:
            if not gone <= self._pane.ranks:
                self._write([("stderr", f"{label(tuple(sorted(gone)))} {_STAYS}\n")])
            self._pane.clear(gone)

    def _show_again(self, gone: set[int]) -> None:
        self._forget_places()
        self._publish_display("clear_output", {"wait": True})
        texts: list[tuple[str, str]] = []
        for entry in self._record.entries:
            if entry.item is not None and is_textual(block := Block(entry.ranks, entry.item)):
                texts.append(as_text(block))
                continue
            self._write(texts)
            texts = []
            if entry.content:
                self._publish("display_data", dict(entry.content))
            elif isinstance(entry.item, Trace):
                self._publish_trace(entry.ranks, entry.item)
            elif isinstance(entry.item, Rich):
                self._display(entry.ranks, entry.item.content(), entry.display_id)
        self._write(texts)
        if self._live is not None:
            self._live_id = self._redraw("", _live_text(self._live, gone), False)
        if self._status:
            self._status_id = self._redraw("", self._status, False)

    def _draw_pane(self) -> None:
        is_new = not self._pane_id
        self._pane_id = self._pane_id or uuid.uuid4().hex
        self._put(self._pane.content(), self._pane_id, is_new)

    def _forget_places(self) -> None:
        """Forget the ids of displays that were redrawn in place, as the cell was cleared."""
        self._live_id = self._status_id = self._tabs_id = self._tabs = self._pane_id = ""
        self._pane = Pane()
        self._bar_ids.clear()


def _live_text(live: Live, gone: Iterable[int] = ()) -> str:
    without = set(gone)
    lines = [
        (tuple(rank for rank in ranks if rank not in without), line) for ranks, line in live.lines
    ]
    return "\n".join(
        f"{label(ranks)} {line}" for ranks, line in compact([each for each in lines if each[0]])
    )


def _with_id(content: dict[str, Any], display_id: str) -> dict[str, Any]:
    return {**content, "transient": {"display_id": display_id}}


def _as_display(item: Any) -> Rich:
    assert isinstance(item, Rich)
    return Rich("display", item.bundle)


def _whole(trace: Trace) -> str:
    """Return a rank's whole traceback, with the frames of libraries, as HTML that opens on a
    click.
    """
    return (
        f'<details><summary style="{_SUMMARY}">the traceback with the frames of libraries</summary>'
        f"{pre(as_coloured_html(trace.whole.rstrip()))}</details>"
    )
