"""Shows one run's output: folds it, holds it as long as folding needs, passes it to its sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RankDied
from ..wire.messages import Died, Failed
from ..wire.ranks import describe_ranks
from .fold import Folder, Ranks
from .sinks import Sink


class Printer:
    """The output of one run; used on the link's thread. It outlives the run, for threads that print late.

    Args:
        ranks: who runs it.
        sink: where the output goes.
        shows_traces: whether exceptions are shown as they come, or only raised in the end.
    """

    def __init__(self, ranks: Sequence[int], sink: Sink, shows_traces: bool = True) -> None:
        self._shows_traces = shows_traces
        self._ranks = ranks
        self._left: list[int] = []
        self._folder: Folder | None = None  # most calls print nothing
        self._sink = sink

    def feed(self, ranks: Ranks, verb: Any, now: float) -> None:
        """These ranks printed or displayed something, or ask the user."""
        self._need_folder(now).feed(ranks, verb, now)

    def settle(self, ranks: Ranks, verb: Any, now: float) -> None:
        """These ranks have ended the run, in this way."""
        if type(verb) is Failed and self._shows_traces:
            self.feed(ranks, verb, now)
        if self._folder is None:
            self._left += ranks
        else:
            self._folder.leave(ranks, now)
        if type(verb) is Died:
            one = str(RankDied(ranks[0], verb.reason, verb.last_output))
            self.note(one if len(ranks) == 1 else f"{describe_ranks(ranks)} {verb.reason}", now)

    def note(self, text: str, now: float | None = None) -> None:
        """Show a remark, after the output that is due."""
        if now is not None:
            self.show(now)
        self._sink.note(text)

    def status(self, text: str, now: float | None = None) -> None:
        """Show a line that replaces the one before it, after the output that is due; "" takes it away."""
        if now is not None:
            self.show(now)
        self._sink.status(text, not text)

    def show(self, now: float, everything: bool = False) -> None:
        """Show what is due."""
        if self._folder is None:
            return
        blocks = self._folder.take(now, everything)
        if blocks:
            self._sink.show(blocks)

    def deadline(self) -> float | None:
        """When `show` has more; None: not before something is fed."""
        return None if self._folder is None else self._folder.deadline()

    def _need_folder(self, now: float) -> Folder:
        if self._folder is None:
            self._folder = Folder(self._ranks)
            self._folder.leave(self._left, now)
        return self._folder
