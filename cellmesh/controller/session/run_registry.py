"""The runs of one session: numbers them, bounds how many are in flight, and takes over those of an
earlier controller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...stdlib import time
from ...wire.attach import RunInfo, Welcome
from ...wire.host import format_span
from ...wire.limits import COUNTED_BYTES, MAX_RUN_BYTES, MAX_RUNS, may_wait_for
from ...wire.status import RankState
from ...wire.user_code import RunCall, RunCell
from ...wire.values import PullNames
from ..news import News
from ..output.console import Sink
from ..output.fold import Block, Live
from ..output.printer import Printer
from ..run import Run
from ..run_waiter import RunControl
from ..work_item import WorkItem


@dataclass(frozen=True)
class Adopted:
    """The runs of an earlier controller that a session takes over when it attaches.

    Attributes:
        runs: those that nobody has taken in whole.
        others: shows what came of runs that had ended; None if there are none of earlier
            controllers.
    """

    runs: Sequence[Run[Any]]
    others: Printer | None


class HeadedSink:
    """A sink of output that shows a heading before its first output.

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
    """Make runs of those that an agent has in flight from an earlier controller.

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
    """Return the heading of output that the agent kept while no controller was attached."""
    text = f"nobody was attached for {format_span(welcome.away_s)}; what the ranks have shown since"
    if welcome.num_dropped_bytes:
        text += (
            f" (without the first {welcome.num_dropped_bytes / 1e6:,.1f} MB; `%dist_logs` has "
            "them, as far as logs reach)"
        )
    return f"{text}:"


# How often a thread that waits until it may submit asks ranks whether they wait for idle ones.
_LOOK_UP_S = 0.5


class RunRegistry:
    """The runs of one session that are in flight; usable on any thread.

    Args:
        num_ranks: of the mesh.
        control: what runs need of the session.

    Attributes:
        living: the runs in flight by their numbers, in the order sent.
    """

    def __init__(self, num_ranks: int, control: RunControl) -> None:
        self.num_ranks = num_ranks
        self._control = control
        self._lock = threading.Lock()
        self._num_runs = 0
        self._num_cells = 0
        self.living: dict[int, Run[Any]] = {}
        self._num_bytes: dict[int, int] = {}  # run -> of its arguments, where they are not small
        self._ends = News()  # of runs
        self._adopted: tuple[Run[Any], ...] = ()

    def new_run(self, item: WorkItem, printer: Printer) -> Run[Any]:
        """Make a run with a number that the mesh has not used; `add` registers it as in flight."""
        with self._lock:
            self._num_runs += 1
            number = self._num_runs
        return Run(number, item, printer, self._control)

    def add(self, run: Run[Any], num_bytes: int = 0) -> None:
        """Register a run as in flight until it ends, with the bytes of its arguments."""
        self.living[run.number] = run
        if num_bytes >= COUNTED_BYTES:
            self._num_bytes[run.number] = num_bytes
        run.on_end(lambda: self.forget(run.number))

    def has_room(self, ranks: Iterable[int], num_bytes: int) -> bool:
        """Return whether another run with so many bytes of arguments may be sent to these ranks.

        What a rank may be executing does not count, and one more may always wait: runs of several
        ranks may have to meet.
        """
        if len(self.living) >= MAX_RUNS:
            return False
        sizes = self._num_bytes.copy()
        if num_bytes < COUNTED_BYTES or sum(sizes.values()) + num_bytes <= MAX_RUN_BYTES:
            return True
        waiting: dict[int, list[int]] = {rank: [] for rank in ranks}
        for number, each in sizes.items():
            run = self.living.get(number)
            for rank in run.waiting_ranks() if run is not None else ():
                if rank in waiting:
                    waiting[rank].append(each)
        return all(
            len(own) < 2 or sum(own[1:]) + num_bytes <= MAX_RUN_BYTES for own in waiting.values()
        )

    def make_room(
        self,
        ranks: Sequence[int],
        num_bytes: int,
        is_over: Callable[[], bool],
        states: Callable[[Sequence[int]], Mapping[int, RankState]],
    ) -> None:
        """Wait until a run may be sent (`has_room`), unless a rank waits for idle ranks, which may
        need that very run.

        Args:
            ranks: of the run that there is to be room for.
            num_bytes: of its arguments.
            is_over: whether there is nothing more to wait for.
            states: asks ranks what they are doing.
        """

        def may_go_on() -> bool:
            return is_over() or self.has_room(ranks, num_bytes)

        all_ranks = range(self.num_ranks)
        while not may_go_on():
            until = time.monotonic() + _LOOK_UP_S
            self._ends.wait_for(may_go_on, _LOOK_UP_S)
            if time.monotonic() >= until:
                idle = set(all_ranks) - self.busy_ranks()
                if any(may_wait_for(state, idle) for state in states(all_ranks).values()):
                    return

    def count_cell(self) -> int:
        """Return an execution count for a cell that has none from a notebook."""
        self._num_cells += 1
        return self._num_cells

    def all(self) -> tuple[Run[Any], ...]:
        """Return the runs in flight, oldest first; after an attach, also those that were in flight
        then.
        """
        runs = {run.number: run for run in (*self._adopted, *self._in_flight())}
        return tuple(run for _, run in sorted(runs.items()))

    def on(self, ranks: Iterable[int]) -> list[Run[Any]]:
        """Return the runs in flight on any of these ranks, oldest first."""
        wanted = set(ranks)
        return [run for run in self._in_flight() if wanted.intersection(run.waiting_ranks())]

    def busy_ranks(self) -> set[int]:
        """Return the ranks that have work they have not ended; queries do not count."""
        return {
            rank for run in self._in_flight() if not run.is_query for rank in run.waiting_ranks()
        }

    def adopt(self, welcome: Welcome, sink: Sink) -> Adopted:
        """Take over the runs that an agent has in flight, and number new runs after them."""
        with self._lock:
            self._num_runs = max(self._num_runs, welcome.next_run - 1)
        self._num_cells = max(
            (info.execution_count for info in welcome.runs), default=self._num_cells
        )
        adopted = adopt(welcome, self.num_ranks, sink, self._adopt_run)
        self._adopted = tuple(adopted.runs)
        return adopted

    def _adopt_run(self, info: RunInfo, printer: Printer) -> Run[Any]:
        kind = RunCell if info.execution_count else RunCall
        # Another controller has sent the work; only its kind is known.
        item = WorkItem(PullNames(info.run, ""), kind, info.ranks, title=info.title or "a call")
        run: Run[Any] = Run(info.run, item, printer, self._control)
        self.add(run)
        return run

    def forget(self, number: int) -> None:
        """Note that a run is not in flight any more."""
        self.living.pop(number, None)
        if self._num_bytes:
            self._num_bytes.pop(number, None)
        self._ends.report()

    def _in_flight(self) -> list[Run[Any]]:
        return list(self.living.copy().values())
