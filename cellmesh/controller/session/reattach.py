"""Runs that were in flight when a controller attached; the attaching cell shows their output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...wire.attach import RunInfo, Welcome
from ...wire.host import format_span
from ..output.fold import Block, Live
from ..output.printer import Printer
from ..output.sinks import Sink
from ..run import Run


@dataclass(frozen=True)
class Adopted:
    """The runs that a session takes over.

    Attributes:
        runs: those that nobody has taken in whole.
        others: shows what came of runs that had ended; None if there are none of earlier
            controllers.
    """

    runs: Sequence[Run[Any]]
    others: Printer | None


class HeadedSink:
    """A sink that shows a heading before its first output.

    Args:
        sink: where it goes.
        heading: what it says.
    """

    def __init__(self, sink: Sink, heading: str) -> None:
        self._sink = sink
        self._heading = heading

    def show(self, blocks: Sequence[Block | Live]) -> None:
        self._say_heading()
        self._sink.show(blocks)

    def note(self, text: str) -> None:
        self._say_heading()
        self._sink.note(text)

    def status(self, text: str, final: bool) -> None:
        self._sink.status(text, final)

    def _say_heading(self) -> None:
        heading, self._heading = self._heading, ""
        if heading:
            self._sink.note(heading)


def adopt(
    welcome: Welcome, num_ranks: int, sink: Sink, make_run: Callable[[RunInfo, Printer], Run[Any]]
) -> Adopted:
    """Take over the runs that an agent has in flight.

    Args:
        welcome: its greeting.
        num_ranks: of the mesh.
        sink: the attaching cell's.
        make_run: makes a run.
    """
    if welcome.next_run == 1:  # nobody was here before
        return Adopted((), None)
    headed = HeadedSink(sink, heading_for(welcome))
    runs = [make_run(info, Printer(info.ranks, headed)) for info in welcome.runs]
    return Adopted(runs, Printer(range(num_ranks), headed))


def heading_for(welcome: Welcome) -> str:
    """Return the heading of output that was kept while no controller was attached."""
    text = f"nobody was attached for {format_span(welcome.away_s)}; what the ranks have shown since"
    if welcome.num_dropped_bytes:
        text += (
            f" (without the first {welcome.num_dropped_bytes / 1e6:,.1f} MB; `%dist_logs` has "
            "them, as far as logs reach)"
        )
    return f"{text}:"
