"""Folds output: equal output of several ranks is shown once, as ``[0-7] step 3``. Pure.

Each rank has a queue of items (lines, displays, tracebacks). An item is shown as soon as every
running rank has it at the head of its queue, or once it has waited for a time limit (a line
`HOLD_S`). If the heads differ, the item that no other rank has further back is shown first, so that
one odd line does not prevent the folding of all later lines. Lines that differ only in numbers are
joined as well. Unfinished lines (progress bars) are kept in a block that is redrawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ...wire.messages import Failed
from ...wire.verbs import Display, DisplayKind, InputRequest, Output, Skipped, StreamName
from .bars import Bars, Mark
from .mime_bundle import unpack_bundle
from .number_folding import MIN_LINES, alike_keys
from .rank_queues import Queued, RankQueues
from .rank_queues import Ranks as Ranks
from .terminal import Canvas, has_controls, moves_up, strip_controls

HOLD_S = 0.1
# Output of ranks on other hosts may arrive later.
HOLD_HOSTS_S = 0.3
# How long an unfinished line waits for its end before it is shown unfinished, and redrawn.
OPEN_S = 0.1
# More unfinished lines than this are redrawn less often, as each redraw draws all of them.
_MANY_LINES = 16
_REDRAW_MANY_S = 0.25
# The value of the last expression may wait longer for equal values, as it ends its rank's cell.
HOLD_RESULT_S = 1.0
# So may an exception; ranks that wait for the failed rank are released later.
HOLD_TRACE_S = 0.5
# Ranks that share cores take different times to draw a plot.
HOLD_DISPLAY_S = 0.3
_STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")


class Line(NamedTuple):  # is hashed many times
    """A whole line of text that ranks printed, without its newline."""

    stream: StreamName
    text: str


class AlikeLines(msgspec.Struct, frozen=True):
    """Lines of ranks that differ only in numbers: pairs of rank and line, by ascending rank."""

    lines: tuple[tuple[int, Line], ...]


class Rich(msgspec.Struct, frozen=True):
    """A display of a rank; `bundle` is its MIME bundle as JSON."""

    kind: DisplayKind
    bundle: bytes

    def content(self) -> dict[str, Any]:
        """Return the bundle's data and metadata; empty for a request to clear."""
        return unpack_bundle(self.bundle)


@dataclass(frozen=True)
class Trace:
    """An exception that ended a rank's run."""

    type_name: str
    text: str
    traceback: str  # as shown
    whole: str = field(default="", compare=False)  # with all frames, if `traceback` lacks some


class Gap(msgspec.Struct, frozen=True):
    """Numbers of lines and bytes of a rank's output that were not sent; the rank's log has them."""

    num_lines: int
    num_bytes: int


class Live(msgspec.Struct, frozen=True):
    """Unfinished lines of ranks, redrawn in place; `closed` once they can no longer change."""

    lines: tuple[tuple[Ranks, str], ...]
    closed: bool = False
    stream: StreamName = "stdout"

    def without(self, gone: Container[int]) -> Live:
        """Return a copy without the lines of these ranks."""
        left = ((tuple(r for r in ranks if r not in gone), text) for ranks, text in self.lines)
        return msgspec.structs.replace(self, lines=tuple(line for line in left if line[0]))


Item = Line | AlikeLines | Rich | Trace | Gap | Live | Mark | Bars


class Block(msgspec.Struct, frozen=True):
    """An item of output to show, with the ranks that printed it and, for a display, each rank's
    display id.
    """

    ranks: Ranks
    item: Item
    display_ids: tuple[str, ...] = ()

    def without(self, gone: Container[int]) -> Block:
        """Return a copy without the output of these ranks."""
        ranks = tuple(rank for rank in self.ranks if rank not in gone)
        item = self.item.without(gone) if isinstance(self.item, Live) else self.item
        return Block(ranks, item)

    def by_rank(self) -> Iterator[tuple[int, Item]]:
        """Yield the output of each rank by itself, as (rank, item)."""
        match self.item:
            case AlikeLines(lines):
                yield from (pair for pair in lines if pair[0] in self.ranks)
            case Live(lines, _, stream):
                for ranks, text in lines:
                    rows = [Line(stream, row) for row in text.split("\n")]
                    yield from ((rank, row) for rank in ranks for row in rows)
            case _:
                yield from ((rank, self.item) for rank in self.ranks)


class Folder:
    """Folds the output of one run: joins equal output of its ranks.

    Args:
        ranks: ranks of the run.
        hold_s: how long a rank's line waits for the same line of other ranks, in seconds.
        folds_numbers: whether lines that differ only in numbers are joined.
    """

    def __init__(
        self, ranks: Iterable[int], hold_s: float = HOLD_S, folds_numbers: bool = False
    ) -> None:
        self._running = set(ranks)
        self._hold_s = hold_s
        self._queues: RankQueues[Item] = RankQueues(
            _is_trace, _keys_of if folds_numbers else lambda rank, item: ()
        )
        self._partial: dict[tuple[int, StreamName], str] = {}
        self._partial_since: dict[tuple[int, StreamName], float] = {}
        self._canvases: dict[tuple[int, StreamName], Canvas] = {}
        self._live: dict[tuple[int, StreamName], str] = {}
        self._open: set[tuple[int, StreamName]] = set()
        self._live_changed = False
        self._drawn_at = float("-inf")
        self._is_buried = False  # whether lines were shown below the live block
        self._ready: list[Block] = []

    def feed(self, ranks: Ranks, verb: Any, now: float) -> None:
        """Add output that these ranks have sent."""
        match verb:
            case Output():
                if self._all_alike(ranks, verb.text):
                    lines = verb.text[:-1].split("\n")
                    self._ready += [Block(ranks, Line(verb.stream, line)) for line in lines]
                    return
                for rank in ranks:
                    self._feed_text(rank, verb.stream, verb.text, now)
            case Skipped():
                for rank in ranks:
                    self._finish_partials(rank, now)
                self._queue(ranks, Gap(verb.num_lines, verb.num_bytes), now)
            case Display():
                for rank in ranks:
                    self._finish_partials(rank, now)
                self._queue(ranks, Rich(verb.kind, verb.bundle), now, verb.display_id)
            case Failed():
                for rank in ranks:
                    self._finish_partials(rank, now)
                self._queue(
                    ranks,
                    Trace(verb.type_name, verb.text, verb.traceback, verb.whole_traceback),
                    now,
                )
            case InputRequest():  # the user's answer ends the line
                for rank in ranks:
                    self._finish_partials(rank, now)

    def mark(self, rank: int, mark: Mark, now: float) -> None:
        """Queue the place of a rank's progress bar, below the rank's output so far."""
        self._finish_partials(rank, now)
        self._queue((rank,), mark, now)

    def leave(self, ranks: Iterable[int], now: float) -> None:
        """Record that these ranks have ended the run, so that output of other ranks does not wait
        for theirs.
        """
        for rank in ranks:
            self._finish_partials(rank, now)
            self._running.discard(rank)

    def take(self, now: float, everything: bool = False) -> list[Block]:
        """Return the blocks of output to show now.

        Args:
            now: current time, in seconds of the clock of `feed`.
            everything: whether to return all output, as the run has ended.
        """
        self._close_finished_live()
        self._vacate(self._passed(), now)
        if self._queues and self._queues.agree(self._running):
            ranks, rows = self._queues.take_common()
            self._ready += [_join(ranks, row) for row in rows]
        while ranks := self._choose(now, everything):
            self._ready.append(_join(ranks, self._queues.take(ranks)))
        self._is_buried = bool(self._live) and (self._is_buried or bool(self._ready))
        self._update_live(now, everything)
        ready, self._ready = self._ready, []
        return ready

    def deadline(self) -> float | None:
        """Return the time from which `take` returns queued output even if no further output
        arrives; None if no output is queued.
        """
        if self._ready:
            return 0.0
        if self._queues and self._queues.agree(self._running):
            return 0.0
        opens_at = next(
            (since + OPEN_S for key, since in self._partial_since.items() if self._may_open(key)),
            None,
        )
        redraws_at = self._redraws_at() if self._live_changed or self._passed() else None
        due_at = self._queues.due_at() if self._queues else None
        times = (opens_at, redraws_at, due_at)
        return min((at for at in times if at is not None), default=None)

    # ---- text

    def _all_alike(self, ranks: Ranks, text: str) -> bool:
        """Return whether a text can be shown without queueing: it is whole lines of all running
        ranks, and nothing is queued.
        """
        return (
            not self._queues
            and not self._partial
            and not self._live
            and text.endswith("\n")
            and "\r" not in text
            and not has_controls(text)
            and self._running.issubset(ranks)
        )

    def _feed_text(self, rank: int, stream: StreamName, text: str, now: float) -> None:
        key = (rank, stream)
        if (key in self._canvases or moves_up(text)) and not self._draw_canvas(key, text, now):
            return
        *lines, rest = (self._partial.pop(key, "") + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            self._end_line(key, _after_returns(line), now)
        self._partial_since.pop(key, None) if lines else None
        if rest:
            self._make_way(key, now)
            self._partial[key] = _after_returns(rest, keep_return=True)
            if key in self._open:
                self._live[key] = _after_returns(rest)
                self._live_changed = True
            else:
                self._partial_since.setdefault(key, now)

    def _draw_canvas(self, key: tuple[int, StreamName], text: str, now: float) -> bool:
        """Add text to the lines that a rank redraws by moving the cursor, which are shown as one
        unfinished line; return whether the redrawing has ended, and the text was not added.
        """
        canvas = self._canvases.get(key)
        if canvas is not None and canvas.ends(text, now):
            self._finish_partial(key, now)
            return True
        if canvas is None:
            canvas = self._canvases[key] = Canvas(self._partial.pop(key, ""))
        for line in canvas.write(text, now):
            self._queue((key[0],), Line(key[1], line), now)
        self._make_way(key, now)
        self._partial[key] = canvas.text()
        if key in self._open:
            self._live[key] = self._partial[key]
            self._live_changed = True
        else:
            self._partial_since.setdefault(key, now)
        return False

    def _end_line(self, key: tuple[int, StreamName], line: str, now: float) -> None:
        if key in self._open:
            self._open.discard(key)
            self._live[key] = line
            self._live_changed = True
        else:
            for each in line.split("\n"):
                self._queue((key[0],), Line(key[1], each), now)

    def _finish_partials(self, rank: int, now: float) -> None:
        for stream in _STREAMS:
            if (rank, stream) in self._partial:
                self._finish_partial((rank, stream), now)

    def _finish_partial(self, key: tuple[int, StreamName], now: float) -> None:
        self._partial_since.pop(key, None)
        is_canvas = self._canvases.pop(key, None) is not None
        text = _after_returns(self._partial.pop(key))
        if text or key in self._open or not is_canvas:
            self._end_line(key, text, now)

    def _may_open(self, key: tuple[int, StreamName]) -> bool:
        """Return whether an unfinished line may be shown, because all earlier output of its rank
        has been shown.
        """
        return key[0] not in self._queues

    def _update_live(self, now: float, everything: bool) -> None:
        due = itertools.takewhile(  # the dict is in the order of times
            lambda pair: now >= pair[1] + OPEN_S, self._partial_since.items()
        )
        opening = [key for key, _ in due if self._may_open(key)]
        if opening and self._is_buried:
            # The block is above later lines: its unfinished lines move below them.
            moving = {key: self._live.pop(key) for key in self._open}
            self._ready.append(self._draw(closed=True))
            self._live, self._is_buried = moving, False
        for key in opening:
            del self._partial_since[key]
            self._open.add(key)
            self._live[key] = _after_returns(self._partial[key])
            self._live_changed = True
        if not self._live_changed or not (everything or now >= self._redraws_at()):
            return
        self._live_changed, self._drawn_at = False, now
        closed = everything or not self._open
        self._ready.append(self._draw(closed))
        if closed:
            self._live.clear()
            self._open.clear()
            self._is_buried = False

    def _redraws_at(self) -> float:
        """Return the time from which changed unfinished lines may be redrawn."""
        is_paced = self._open and len(self._live) > _MANY_LINES
        return self._drawn_at + _REDRAW_MANY_S if is_paced else 0.0

    def _close_finished_live(self) -> None:
        """Close the block of unfinished lines if all of its lines are finished; later output is
        shown below it.
        """
        if self._live and not self._open:
            self._ready.append(self._draw(closed=True))
            self._live.clear()
            self._live_changed = self._is_buried = False

    def _make_way(self, key: tuple[int, StreamName], now: float) -> None:
        """Move a rank's finished line out of the block of unfinished lines before the rank begins a
        new line in it.
        """
        if key in self._live and key not in self._open:
            self._close_finished_live()
            self._vacate([key] if key in self._live else [], now)

    def _passed(self) -> list[tuple[int, StreamName]]:
        """Return the finished lines in the block of unfinished lines whose ranks have printed
        further output.
        """
        if not self._queues or len(self._live) == len(self._open):
            return []
        return [key for key in self._live if key[0] in self._queues and key not in self._open]

    def _vacate(self, keys: Sequence[tuple[int, StreamName]], now: float) -> None:
        """Move finished lines out of the block of unfinished lines, back to the front of their
        ranks' queues.
        """
        for key in reversed(keys):
            for line in reversed(self._live.pop(key).split("\n")):
                self._queues.prepend(key[0], Line(key[1], line), now, self._hold_s)
            self._live_changed = True

    def _draw(self, closed: bool) -> Block:
        by_text: dict[str, list[int]] = {}
        for (rank, _), text in sorted(self._live.items()):
            by_text.setdefault(text, []).append(rank)
        lines = tuple((tuple(ranks), text) for text, ranks in by_text.items())
        stream = min(self._live)[1] if self._live else "stdout"
        return Block(tuple(sorted({rank for rank, _ in self._live})), Live(lines, closed, stream))

    # ---- queues

    def _queue(self, ranks: Ranks, item: Item, now: float, display_id: str = "") -> None:
        show_by = now + _hold_s(item, self._hold_s)
        for rank in ranks:
            self._queues.append(rank, Queued(item, now, show_by, display_id))

    def _choose(self, now: float, everything: bool) -> Ranks:
        """Return the ranks whose first items are equal or can be joined, and are to be shown next;
        () if no item is due.
        """
        if not self._queues:
            return ()
        is_due = everything or now >= self._queues.due_at()
        if not is_due and not self._queues.agree(self._running):
            return ()
        ranks = self._queues.choose()
        alike = self._queues.alike(ranks[0])
        if len({self._queues.first(rank) for rank in alike}) >= MIN_LINES and ranks[0] in alike:
            return alike
        return ranks


def _join(ranks: Ranks, taken: Sequence[Queued[Item]]) -> Block:
    """Return the block with the first items of these ranks, which are equal or can be joined."""
    first = taken[0].item
    if all(queued.item == first for queued in taken):
        return Block(ranks, first, tuple(queued.display_id for queued in taken))
    lines = [queued.item for queued in taken if isinstance(queued.item, Line)]
    return Block(ranks, AlikeLines(tuple(zip(ranks, lines, strict=True))))


def _keys_of(rank: int, item: Item) -> tuple[Hashable, ...]:
    return alike_keys(rank, item.stream, item.text) if isinstance(item, Line) else ()


def _is_trace(item: Item) -> bool:
    return isinstance(item, Trace)


def _hold_s(item: Item, hold_s: float) -> float:
    """Return how many seconds an item of output is kept back in case other ranks print an equal
    one; `hold_s` for an item that is a line.
    """
    if isinstance(item, Rich) and item.kind == "result":
        return HOLD_RESULT_S
    if isinstance(item, Trace):
        return HOLD_TRACE_S
    is_drawn = isinstance(item, Rich) and item.kind == "display"
    return HOLD_DISPLAY_S if is_drawn else hold_s


def _after_returns(text: str, keep_return: bool = False) -> str:
    """Return the part of a line that a terminal shows: the text after the last carriage return."""
    text = strip_controls(text) if has_controls(text) else text
    if "\r" not in text:
        return text
    ends = text.endswith("\r")
    parts = [part for part in text.split("\r") if part]
    last = parts[-1] if parts else ""
    return last + "\r" if ends and keep_return else last
