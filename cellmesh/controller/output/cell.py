"""Shows a run's output in the output area of its notebook cell, over the Jupyter protocol.

A record of bounded size holds the content of the area, each display in its latest state. A batch of
output changes the record first; then new and changed entries are drawn. A front end can only clear
a whole cell, so after some ranks have cleared their output, all remaining output is redrawn.
"""

from __future__ import annotations

import collections
import itertools
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from ...wire.ranks import group_ranks
from .bars import Bars, as_html, as_lines
from .console import as_remark, as_text, is_textual, join_streams
from .fold import AlikeLines, Block, Item, Line, Live, Ranks, Rich, Trace
from .mime_bundle import heading, label, pre
from .rank_tabs import switch
from .terminal import as_html as as_coloured_html

BUDGET_BYTES = 1_000_000
_ENTRY_BYTES = 100  # size of an entry without its text
_MAX_RECORDS = 16
# Maximum number of displays whose places are kept, counted for each rank; the least recently
# changed are dropped.
_MAX_PLACES = 10_000
_SUMMARY = "cursor:pointer;font:11px monospace;opacity:.65;margin:2px 0"
_DROPPED = "… what was above is gone from here, and its text is in %dist_logs"

Publish = Callable[[str, dict[str, Any]], None]
Key = int | str  # of an entry: the display id if it is redrawn in place, else a number


class Record:
    """The content of a cell's output area, from top to bottom.

    Args:
        budget_bytes: approximate size limit; above twice this size, the oldest output is dropped.

    Attributes:
        entries: key -> block of output.
        dropped: ranks whose oldest output was dropped.
        num_bytes: approximate size of the entries.
    """

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget = budget_bytes
        self.entries: dict[Key, Block] = {}
        self.dropped: set[int] = set()
        self.num_bytes = 0

    def put(self, key: Key, block: Block) -> None:
        """Add a block of output below all others, or in place of the one with its key."""
        old = self.entries.get(key)
        self.num_bytes += size_of(block) - (0 if old is None else size_of(old))
        self.entries[key] = block

    def clear(self, gone: Collection[int]) -> bool:
        """Remove these ranks' output, and the remarks as well once no output is left; return
        whether the record had output of these ranks.
        """
        if not any(not set(gone).isdisjoint(ranks) for ranks in (self.dropped, *self._ranks())):
            return False
        self.dropped.difference_update(gone)
        left = {key: block.without(gone) for key, block in self.entries.items()}
        self._keep(
            {key: new for key, new in left.items() if new.ranks or not self.entries[key].ranks}
        )
        if not any(self._ranks()):
            self._keep({})
        return True

    def trim(self) -> None:
        """Drop the oldest output from the record if the record is too large."""
        if self.num_bytes <= 2 * self._budget:
            return
        for key, block in list(self.entries.items()):
            if self.num_bytes <= self._budget:
                return
            self.num_bytes -= size_of(self.entries.pop(key))
            self.dropped.update(block.ranks)

    def switch_off(self) -> None:
        """Drop all output from the record, and do not keep later output either."""
        self._budget = 0
        self.trim()

    def by_rank(self) -> dict[int, tuple[Item, ...]]:
        """Return the output of each rank, without progress bars, as these show all ranks."""
        items: dict[int, list[Item]] = {rank: [] for rank in sorted(self.dropped)}
        for block in self.entries.values():
            for rank, item in () if isinstance(block.item, Bars) else block.by_rank():
                items.setdefault(rank, []).append(item)
        return {rank: tuple(own) for rank, own in items.items()}

    def _ranks(self) -> Iterable[Ranks]:
        return (block.ranks for block in self.entries.values())

    def _keep(self, entries: dict[Key, Block]) -> None:
        self.entries, self.num_bytes = entries, sum(map(size_of, entries.values()))


def size_of(block: Block) -> int:
    """Return the approximate size of a block of output, in bytes."""
    fixed = _ENTRY_BYTES + 8 * len(block.ranks)
    match block.item:
        case Line(_, text):
            return fixed + len(text)
        case AlikeLines(lines):
            return fixed + sum(_ENTRY_BYTES + len(line.text) for _, line in lines)
        case Live(lines):
            return fixed + sum(_ENTRY_BYTES + len(text) for _, text in lines)
        case Rich(_, bundle):
            return fixed + len(bundle)
        case Trace(_, text, traceback, whole):
            return fixed + len(text) + len(traceback) + len(whole)
    return fixed


class DisplayPlace(msgspec.Struct, frozen=True):
    """The notebook's display id of a display that several ranks share, and the lowest of these
    ranks, the only one whose updates are shown.
    """

    display_id: str
    leader: int


class Displays(msgspec.Struct):
    """The displays of a mesh that can be updated, also from a later cell.

    Attributes:
        places: (rank, the rank's own display id) -> place of the display in the notebook.
        has_tabs: whether cells whose ranks' output differs get a switch between ranks.
        folds_numbers: whether lines of ranks that differ only in numbers are joined.
        heading: returns the line to show above a run's output (`Printer`); None for no line.
        records: records of the newest cells, for output that arrives after a cell's end.
    """

    places: dict[tuple[int, str], DisplayPlace] = msgspec.field(default_factory=dict)
    has_tabs: bool = True
    folds_numbers: bool = True
    heading: Callable[[bool], str] | None = None
    records: collections.deque[Record] = msgspec.field(default_factory=collections.deque)

    def put(self, rank: int, theirs: str, place: DisplayPlace) -> None:
        """Record where the notebook shows a rank's display, so that it can be updated."""
        self.places.pop((rank, theirs), None)
        self.places[rank, theirs] = place  # last
        if len(self.places) > _MAX_PLACES:
            del self.places[next(iter(self.places))]

    def keep(self, record: Record) -> None:
        """Keep the record of a run that has ended, and drop the records of the oldest runs."""
        if record not in self.records:
            self.records.append(record)
        while len(self.records) > _MAX_RECORDS:
            self.records.popleft().switch_off()


class CellSink:
    """Shows output in one notebook cell, also output that arrives after the cell has ended.

    Args:
        publish: sends an iopub message (type, content) with the cell as its parent.
        displays: displays of the mesh; None to keep only those of the cell.
        has_tabs: whether to show a switch between ranks at the end if their output differs, unless
            `displays` has switches turned off.

    Attributes:
        redrawn_bytes: amount of output that was last redrawn because ranks had cleared theirs.
    """

    def __init__(
        self, publish: Publish, displays: Displays | None = None, has_tabs: bool = False
    ) -> None:
        self._publish = publish
        self._displays = displays if displays is not None else Displays()
        self._has_tabs = has_tabs
        self._record = Record()
        self._numbers = itertools.count()
        self._display_ids: dict[object, str] = {}  # bars by number, other parts by name -> id
        self._undrawn: dict[Key, None] = {}  # entries that are new or have changed
        self._updates: dict[str, Block] = {}  # of displays that are not in the record
        self._placed: set[str] = set()  # ids of displays that are in the area
        self._clearing: set[int] = set()  # ranks whose next output clears their earlier output
        self._is_cleared = False
        self.redrawn_bytes = 0
        self._status = self._tabs = ""

    def show(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._take(block)
        self._draw()

    def note(self, text: str) -> None:
        self.show([Block((), Line("stderr", text))])

    def status(self, text: str, final: bool) -> None:
        if not text and "status" not in self._display_ids:
            return
        self._put(self._id_of("status"), {"text/plain": text})
        self._status = "" if final else text
        if final:
            del self._display_ids["status"]

    def end(self, ranks: Sequence[int]) -> None:
        """Show or update the tabs that switch between the ranks' output, after the run's end or
        after later output.
        """
        record = self._record
        self._displays.keep(record)
        if not (self._has_tabs and self._displays.has_tabs and len(ranks) > 1):
            return
        identity = self._id_of("tabs")
        is_joined = any(isinstance(block.item, AlikeLines) for block in record.entries.values())
        heading = self._displays.heading
        text = switch(record.by_rank(), record.dropped, identity, is_joined, heading=heading)
        if text and text != self._tabs:
            # Without text/plain, so that consoles, in which it would not work, do not show it.
            self._put(identity, {"text/html": text})
            self._tabs = text

    # ---- the record

    def _take(self, block: Block) -> None:
        """Apply a block of output to the record."""
        item = block.item
        if isinstance(item, Rich) and item.kind == "update":
            self._update(block, item)
        elif isinstance(item, Rich) and item.kind == "clear":
            self._clearing.update(block.ranks)
            if item.bundle != b"wait":
                self._clear(block.ranks)
        else:
            self._clear(self._clearing.intersection(block.ranks))
            key = self._key(block)
            self._record.put(key, block)
            self._undrawn[key] = None

    def _key(self, block: Block) -> Key:
        if isinstance(block.item, Bars):
            return self._id_of(block.item.number)
        if isinstance(block.item, Live):
            key = self._id_of("live")
            if block.item.closed:
                del self._display_ids["live"]
            return key
        known = [(r, i) for r, i in zip(block.ranks, block.display_ids, strict=False) if i]
        if not known:
            return next(self._numbers)
        ours = uuid.uuid4().hex
        for rank, theirs in known:
            self._displays.put(rank, theirs, DisplayPlace(ours, block.ranks[0]))
        return ours

    def _id_of(self, name: object) -> str:
        """Return the display id of the part of the cell's output with this name, which is redrawn
        in place.
        """
        if name not in self._display_ids:
            self._display_ids[name] = uuid.uuid4().hex
        return self._display_ids[name]

    def _update(self, block: Block, rich: Rich) -> None:
        # A display that several ranks share shows the updates of its lowest rank.
        shown: dict[int, DisplayPlace] = {}
        for rank, theirs in zip(block.ranks, block.display_ids, strict=True):
            place = self._displays.places.get((rank, theirs))
            if place is not None:
                self._displays.put(rank, theirs, place)
                shown[rank] = place
        for place, ranks in group_ranks(shown).items():
            new = Block(tuple(ranks), Rich("display", rich.bundle))
            if place.leader not in ranks:
                continue
            if place.display_id in self._record.entries:
                self._record.put(place.display_id, new)
                self._undrawn[place.display_id] = None
            else:
                self._updates[place.display_id] = new

    def _clear(self, ranks: Iterable[int]) -> None:
        gone = set(ranks)
        self._clearing -= gone
        if gone and self._record.clear(gone):
            self._is_cleared = True

    # ---- drawing

    def _draw(self) -> None:
        """Draw new and changed entries, or all entries if ranks have cleared their output."""
        entries = self._record.entries
        drawn: Iterable[Key] = self._undrawn
        texts: list[tuple[str, str]] = []
        if self._is_cleared:
            self._publish("clear_output", {"wait": bool(entries or self._status)})
            self._is_cleared, self._tabs, drawn = False, "", entries
            self.redrawn_bytes = self._record.num_bytes
            self._placed.clear()
            if self._record.dropped:
                ranks = tuple(sorted(self._record.dropped))
                texts.append(("stderr", f"{label(ranks)} {_DROPPED}\n"))
        self._placed.update(self._updates)
        for key, block in [*((key, entries[key]) for key in drawn), *self._updates.items()]:
            try:
                self._draw_one(key, block, texts)
            except (
                Exception
            ) as error:  # a display of user code may be malformed; later output is still shown
                remark = as_remark(block, error)
                texts.append(as_text(remark))
                if key in entries:
                    self._record.put(key, remark)
        self._flush(texts)
        if self._status and self._id_of("status") not in self._placed:
            self.status(self._status, False)
        self._undrawn.clear()
        self._updates.clear()
        self._record.trim()

    def _draw_one(self, key: Key, block: Block, texts: list[tuple[str, str]]) -> None:
        """Draw a block of output, or add its text to `texts`, to be sent as one stream message."""
        if is_textual(block):
            texts.append(as_text(block))
            return
        self._flush(texts)
        item = block.item
        if isinstance(item, Trace):
            self._publish("error", error_content(block.ranks, item))
            if item.whole:
                # Without text/plain, so that consoles do not show it.
                self._publish("display_data", {"data": {"text/html": _whole(item)}, "metadata": {}})
        elif isinstance(item, Rich):
            self._draw_rich(key, block.ranks, item.content())
        elif isinstance(item, Bars):
            data = {"text/plain": "\n".join(as_lines(item)), "text/html": as_html(item)}
            self._put(str(key), data)
        elif isinstance(item, Live):
            _, text = as_text(Block(block.ranks, msgspec.structs.replace(item, closed=True)))
            self._put(str(key), {"text/plain": text.removesuffix("\n")})

    def _draw_rich(self, key: Key, ranks: Ranks, content: dict[str, Any]) -> None:
        if key not in self._placed:
            self._publish("display_data", heading(ranks))
        if isinstance(key, str):
            self._put(key, **content)
        else:
            self._publish("display_data", content)

    def _put(self, display_id: str, data: Any, metadata: Any = None, **more: Any) -> None:
        """Display a MIME bundle, or update the display that was shown with this id."""
        kind = "update_display_data" if display_id in self._placed else "display_data"
        self._placed.add(display_id)
        content = {**more, "data": data, "metadata": metadata or {}}
        self._publish(kind, {**content, "transient": {"display_id": display_id}})

    def _flush(self, texts: list[tuple[str, str]]) -> None:
        for stream, text in join_streams(texts):
            self._publish("stream", {"name": stream, "text": text})
        texts.clear()


def error_content(ranks: Ranks, trace: Trace) -> dict[str, Any]:
    """Return a traceback as the content of an iopub message of type ``error``."""
    return {
        "ename": f"{label(ranks)} {trace.type_name}",
        "evalue": trace.text,
        "traceback": [label(ranks), *trace.traceback.rstrip().split("\n")],
    }


def _whole(trace: Trace) -> str:
    """Return a rank's whole traceback, with the frames of libraries, as collapsed HTML."""
    return (
        f'<details><summary style="{_SUMMARY}">the traceback with the frames of libraries</summary>'
        f"{pre(as_coloured_html(trace.whole.rstrip()))}</details>"
    )
