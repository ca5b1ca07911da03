"""The runs of one session: numbered, in flight, taken over from an earlier controller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..wire.messages import RunInfo, Welcome
from .adopting import Adopted, adopt
from .output.printer import Printer
from .output.sinks import Sink
from .run import Run

# Makes a run of a number, on some ranks; whether its value is the one rank's; how it is shown; its title;
# whether it is a cell.
MakeRun = Callable[[int, Sequence[int], bool, Printer, str, bool], Run[Any]]


class Catalog:
    """Knows which runs are in flight; used on any thread.

    Args:
        num_ranks: of the mesh.
        make_run: makes a run.
    """

    def __init__(self, num_ranks: int, make_run: MakeRun) -> None:
        self._num_ranks = num_ranks
        self._make_run = make_run
        self._lock = threading.Lock()
        self._num_runs = 0
        self._num_cells = 0
        self._living: dict[int, Run[Any]] = {}
        self._adopted: tuple[Run[Any], ...] = ()

    def new_run(
        self, ranks: Sequence[int], single: bool, printer: Printer, title: str, is_cell: bool
    ) -> Run[Any]:
        """A run with a number that the mesh has not seen; `add` puts it in flight."""
        with self._lock:
            self._num_runs += 1
            number = self._num_runs
        return self._make_run(number, ranks, single, printer, title, is_cell)

    def add(self, run: Run[Any]) -> None:
        """A run is in flight until it ends."""
        self._living[run.number] = run
        run.on_end(lambda: self._forget(run.number))

    def count_cell(self) -> int:
        """A number for a cell that has none from a notebook."""
        self._num_cells += 1
        return self._num_cells

    def all(self) -> tuple[Run[Any], ...]:
        """The runs in flight, and those that were when this controller attached, oldest first."""
        runs = {run.number: run for run in (*self._adopted, *self._in_flight())}
        return tuple(run for _, run in sorted(runs.items()))

    def on(self, ranks: Iterable[int]) -> list[Run[Any]]:
        """The runs in flight on any of these ranks, oldest first."""
        wanted = set(ranks)
        return [run for run in self._in_flight() if wanted.intersection(run.waiting_ranks())]

    def busy_ranks(self) -> set[int]:
        """Ranks that have been given work and not ended it; looks do not count."""
        return {rank for run in self._in_flight() if not run.is_look for rank in run.waiting_ranks()}

    def adopt(self, welcome: Welcome, sink: Sink) -> Adopted:
        """Take over what an agent has in flight, and go on with its numbers."""
        with self._lock:
            self._num_runs = max(self._num_runs, welcome.next_run - 1)
        self._num_cells = max((info.execution_count for info in welcome.runs), default=self._num_cells)
        adopted = adopt(welcome, self._num_ranks, sink, self._adopt_run)
        self._adopted = tuple(adopted.runs)
        return adopted

    def _adopt_run(self, info: RunInfo, printer: Printer) -> Run[Any]:
        is_cell = info.execution_count > 0
        run = self._make_run(info.run, info.ranks, False, printer, info.title or "a call", is_cell)
        self.add(run)
        return run

    def _forget(self, number: int) -> None:
        self._living.pop(number, None)

    def _in_flight(self) -> list[Run[Any]]:
        return list(self._living.copy().values())
