"""Shows one run's output: queues it to join equal output of ranks, and passes it to a sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import RankDied
from ...wire.messages import Died, Failed
from ...wire.verbs import Bar
from ..failure_summary import describe_end
from .bars import BarBoard, Mark
from .cell import CellSink, size_of
from .console import SilentSink, Sink
from .fold import HOLD_S, Block, Folder, Line, Ranks, Rich

# Output after a run's end is added to the switch between ranks one second later, then two, four,
# ...
_LATE_S = 1.0
_MAX_LATE_S = 60.0
# Cleared and updated displays are shown at most ten times a second, less often if each time much
# output is redrawn.
FRAME_S = 0.1
_REDRAWN_BYTES_S = 1_000_000
MAX_HELD_BYTES = 8_000_000


class Printer:
    """Prints one run's output, also after its end, as threads may print late; used in the link's
    loop.

    Args:
        ranks: ranks of the run.
        sink: shows the output.
        shows_traces: whether exceptions are shown as they arrive, or only raised at the end.
        hold_s, folds_numbers: as in `Folder`.
        heading: returns the line to show above output, "" for none, if the process has several
            meshes; its argument is whether the output is the run's first.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        sink: Sink,
        shows_traces: bool = True,
        hold_s: float = HOLD_S,
        folds_numbers: bool = False,
        heading: Callable[[bool], str] | None = None,
    ) -> None:
        self._heading, self._is_first = heading, True
        self._folds_numbers = folds_numbers
        self._shows_traces = shows_traces
        self._hold_s = hold_s
        self._ranks = ranks
        self._left: list[int] = []
        self._folder: Folder | None = None  # made on demand, as most calls print nothing
        self._bars: BarBoard | None = None
        self._released: list[tuple[Ranks, Failed]] = []
        self._held: list[Block] = []  # output that waits for the next frame
        self._held_bytes = 0
        self._frame_at = float("-inf")  # earliest time of the next frame
        self._has_ended = False
        self._late_s = _LATE_S
        self._switch_at: float | None = None
        self._sink = sink
        self._advice = ""

    def feed(self, ranks: Ranks, verb: Any, now: float) -> None:
        """Add a message of these ranks: output, a display, progress, or a request for input."""
        if type(verb) is Bar:
            if self._bars is None:
                self._bars = BarBoard(self._ranks)
            for rank in ranks:
                if (mark := self._bars.take(rank, verb)) is not None:
                    self._need_folder(now).mark(rank, mark, now)
            return
        self._need_folder(now).feed(ranks, verb, now)

    def settle(self, ranks: Ranks, verb: Any, now: float, is_shown: bool = True) -> None:
        """Record how these ranks ended the run, and show their exception or death; exceptions that
        are not shown are raised by `Run.result`.
        """
        if type(verb) is Failed and self._shows_traces and is_shown:
            if not verb.traceback:  # of a script, whose rank has printed it
                pass
            elif verb.released:  # the exception raised at the end has it
                self._released.append((ranks, verb))
            else:
                self.feed(ranks, verb, now)
        if self._folder is None:
            self._left += ranks
        else:
            self._folder.leave(ranks, now)
        if type(verb) is Died:
            if self._bars is not None:
                self._bars.lose(ranks)
            if not is_shown:
                return
            text = describe_end(ranks, verb.reason)
            if len(ranks) == 1 and isinstance(self._sink, SilentSink):  # which hid the last output
                text = str(RankDied(ranks[0], verb.reason, verb.last_output))
            self.show(now, everything=True)
            self.note(text)

    def note(self, text: str, now: float | None = None) -> None:
        """Show a remark below the output so far."""
        if now is not None:
            self.show(now)
        if self._bars is not None:
            self._bars.bury()
        self._sink.note(f"{self._head()} {text}".lstrip())

    def status(self, text: str, now: float | None = None) -> None:
        """Show a status line below the output, in place of the previous one; "" removes it."""
        if now is not None:
            self.show(now)
        if text and self._advice:
            text = f"{self._advice}\n{text}"
        self._advice = self._advice if text else ""
        self._sink.status(text, not text)

    def advise(self, text: str) -> None:
        """Show a remark above the status line, until that line is removed; a sink that cannot
        remove text shows a permanent remark.
        """
        if isinstance(self._sink, CellSink):
            self._advice = text
            self._sink.status(text, False)
        else:
            self.note(text)

    def show(self, now: float, everything: bool = False) -> None:
        """Show the output that is due, or all of it."""
        if self._folder is None:
            return
        blocks: Sequence[Block] = self._folder.take(now, everything)
        if self._bars is not None:
            blocks = self._place_bars(self._bars, blocks, now, everything)
        if blocks := self._pace(blocks, now, everything):
            if head := self._head():
                self._sink.show([Block((), Line("stdout", head))])
            self._sink.show(blocks)
            if self._has_ended and self._switch_at is None:
                self._switch_at = now + self._late_s
                self._late_s = min(_MAX_LATE_S, 2 * self._late_s)
        if self._switch_at is not None and now >= self._switch_at:
            self._show_switch()

    def finish(self, now: float, is_raised: bool = False) -> None:
        """Record that all ranks have ended the run; their threads may still print.

        Args:
            now: current time, in seconds.
            is_raised: whether a caller gets the failures as one exception; otherwise the exceptions
                of released ranks are shown.
        """
        if self._folder is not None:
            self.show(now, everything=True)
        if self._released and not is_raised:
            for ranks, verb in self._released:
                self.feed(ranks, verb, now)
            self.show(now, everything=True)
        self._has_ended = True
        if self._folder is not None:
            self._show_switch()

    def _head(self) -> str:
        """Return the line to show above output, or before a remark."""
        text = self._heading(self._is_first) if self._heading is not None else ""
        self._is_first = False
        return text

    def _show_switch(self) -> None:
        self._switch_at = None
        if isinstance(self._sink, CellSink):
            self._sink.end(self._ranks)

    def deadline(self) -> float | None:
        """Return the time from which `show` has more to show even if no further output arrives;
        None if there is no such time.
        """
        if self._folder is None:
            return None
        bars = self._bars.deadline() if self._bars is not None else None
        frame_at = self._frame_at if self._held else None
        sources = (self._folder.deadline(), bars, frame_at, self._switch_at)
        return min((at for at in sources if at is not None), default=None)

    def _place_bars(
        self, bars: BarBoard, blocks: Sequence[Block], now: float, everything: bool
    ) -> list[Block]:
        """Place new progress bars among the other output, and redraw bars that are due."""
        shown: list[Block] = []
        ranks = tuple(self._ranks)
        has_new = False
        for block in blocks:
            if isinstance(block.item, Mark):
                has_new = bars.place(block.item) or has_new
                continue
            if has_new:  # a bar stays where it is first drawn: above later output
                shown += [Block(ranks, drawing) for drawing in bars.draw(now, at_once=True)]
            has_new = False
            bars.bury()
            shown.append(block)
        return [*shown, *(Block(ranks, drawing) for drawing in bars.draw(now, has_new, everything))]

    def _pace(self, blocks: Sequence[Block], now: float, everything: bool) -> Sequence[Block]:
        """Return the blocks of output to show now: all of them or, once a block clears or updates a
        display, all that were collected since the last frame, at most once per frame.
        """
        if not self._held and not any(map(_is_change, blocks)):
            return blocks
        self._held += blocks
        self._held_bytes += sum(map(size_of, blocks))
        if not everything and now < self._frame_at and self._held_bytes < MAX_HELD_BYTES:
            return []
        held, self._held, self._held_bytes = self._held, [], 0
        redrawn = self._sink.redrawn_bytes if isinstance(self._sink, CellSink) else 0
        self._frame_at = now + max(FRAME_S, redrawn / _REDRAWN_BYTES_S)
        return held

    def _need_folder(self, now: float) -> Folder:
        if self._folder is None:
            self._folder = Folder(self._ranks, self._hold_s, self._folds_numbers)
            self._folder.leave(self._left, now)
        return self._folder


def _is_change(block: Block) -> bool:
    return isinstance(block.item, Rich) and block.item.kind in ("clear", "update")
