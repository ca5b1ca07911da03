"""A reader of folded output: asks the folder when it says that there is more, as the link does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cellmesh.controller.output.fold import HOLD_S, Block, Folder, Item, Line, Live, Ranks
from cellmesh.wire.messages import Failed
from cellmesh.wire.ranks import format_ranks
from cellmesh.wire.verbs import Display, Output, StreamName

ALL = (0, 1, 2, 3)
SHORT_S = HOLD_S / 10
LONG_S = HOLD_S * 2
Entry = tuple[Ranks, Item | str]
Step = float | tuple[int | Sequence[int], Any]
LEAVES = object()


class Screen:
    """What a reader has before them, with a clock that only `wait` moves.

    Attributes:
        shown: blocks in their places. An unfinished line is a plain text, replaced until it is
            closed.
        redraws: every state of unfinished lines that was shown.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)
        self.folder = Folder(self.ranks)
        self.now = 0.0
        self.redraws: list[tuple[tuple[Ranks, str], ...]] = []
        self._entries: list[Block] = []
        self._live_at: int | None = None

    def play(self, *steps: Step) -> Screen:
        """Take each step: seconds that pass, or ranks with the text that they print, the verb that
        they send, or `LEAVES`, where they end the run.
        """
        for step in steps:
            if isinstance(step, float):
                self.wait(step)
            elif step[1] is LEAVES:
                self.leave(*(step[:1] if isinstance(step[0], int) else step[0]))
            else:
                (self.print if isinstance(step[1], str) else self.say)(*step)
        return self

    def say(self, ranks: int | Sequence[int], verb: Any) -> None:
        """These ranks say the same thing now."""
        self.folder.feed((ranks,) if isinstance(ranks, int) else tuple(ranks), verb, self.now)
        self._catch_up()

    def print(self, ranks: int | Sequence[int], text: str, stream: StreamName = "stdout") -> None:
        """These ranks print the same text now."""
        self.say(ranks, Output(1, stream, text))

    def leave(self, *ranks: int) -> None:
        """These ranks end the run now."""
        self.folder.leave(ranks, self.now)
        self._catch_up()

    def wait(self, seconds: float) -> None:
        """Let time pass, and look whenever there should be more."""
        until = self.now + seconds
        while True:
            due = self.folder.deadline()
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            self._catch_up()
        self.now = until

    def finish(self) -> None:
        """Every rank has ended the run."""
        self.folder.leave(self.ranks, self.now)
        self._put(self.folder.take(self.now, everything=True))

    @property
    def shown(self) -> list[Entry]:
        entries: list[Entry] = []
        for entry in self._entries:
            if isinstance(entry.item, Live):
                entries += entry.item.lines
            else:
                entries.append((entry.ranks, entry.item))
        return entries

    @property
    def text(self) -> list[str]:
        """Lines as a reader reads them; what is no line as its type's name."""
        return [f"[{format_ranks(ranks)}] {as_text(item)}" for ranks, item in self.shown]

    @property
    def blocks(self) -> list[Block]:
        return [entry for entry in self._entries if not isinstance(entry.item, Live)]

    @property
    def has_unfinished_lines(self) -> bool:
        return self._live_at is not None

    def _catch_up(self) -> None:
        for _ in range(1000):
            due = self.folder.deadline()
            if due is None or due > self.now:
                return
            more = self.folder.take(self.now)
            assert more, f"due at {due}, but at {self.now} there is nothing"
            self._put(more)
        raise AssertionError("it says for ever that there is more")

    def _put(self, entries: Sequence[Block]) -> None:
        for entry in entries:
            if not isinstance(entry.item, Live):
                self._entries.append(entry)
                continue
            self.redraws.append(entry.item.lines)
            if self._live_at is None:
                self._live_at = len(self._entries)
                self._entries.append(entry)
            else:
                self._entries[self._live_at] = entry
            if entry.item.closed:
                self._live_at = None


def as_text(item: Item | str) -> str:
    """A line's text; another item's type."""
    if isinstance(item, str):
        return item
    return item.text if isinstance(item, Line) else type(item).__name__


def display(text: str, kind: Any = "display", display_id: str = "") -> Display:
    return Display(1, kind, text.encode(), display_id)


def failure(text: str = "no") -> Failed:
    return Failed(1, "ValueError", text, f"Traceback: {text}", 4)
