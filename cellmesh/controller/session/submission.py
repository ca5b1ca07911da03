"""Submits cells and calls to ranks, and waits before that while too much work is in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import NoMeshError
from ...wire.limits import COUNTED_BYTES, MAX_RUNS
from ...wire.status import RankState
from ..core.core import Effect
from ..output.printer import Printer
from ..run import Run
from ..work_item import WorkItem
from .link import Link
from .run_registry import RunRegistry


class Submission:
    """Submits a session's cells, calls and queries to ranks; usable on any thread.

    Args:
        link: sends the work.
        runs: keeps the runs in flight.
        follow: prepares the session's features for a run.
        check_usable: raises if the mesh has ended or one of some ranks is dead.
        is_over: returns whether the mesh has ended or the session has left it.
        states: asks ranks what they are doing.
        bring_code: makes the user's modules the same on all hosts (`CodeSync.bring`); None on one
            host.
    """

    def __init__(
        self,
        link: Link,
        runs: RunRegistry,
        follow: Callable[[Run[Any]], None],
        check_usable: Callable[[Sequence[int]], None],
        is_over: Callable[[], bool],
        states: Callable[[Sequence[int]], Mapping[int, RankState]],
        bring_code: Callable[[bool], None] | None = None,
    ) -> None:
        self._link = link
        self._runs = runs
        self._follow = follow
        self._check_usable = check_usable
        self._is_over = is_over
        self._states = states
        self._bring_code = bring_code

    def start_run(self, item: WorkItem, printer: Printer) -> Run[Any]:
        """Send work to ranks as a run; waits while too much work is in flight (`make_room`).

        Args:
            item: the work.
            printer: shows its output.

        Raises:
            NoMeshError: the mesh has ended.
            RankDied: one of the ranks is dead.
        """
        is_full = len(self._runs.living) >= MAX_RUNS or item.num_bytes >= COUNTED_BYTES
        if is_full and item.kind.needs_room:
            self.make_room(item.ranks, item.num_bytes)
        self._check_usable(item.ranks)
        if self._bring_code is not None and item.kind.fills and not self._link.is_in_loop():
            self._bring_code(not item.kind.is_cell)
        run = self._runs.new_run(item, printer)
        parcel = item.relay(run.number)
        try:
            self._runs.add(run, item.num_bytes)
            self._follow(run)
            self._link.submit(run, parcel)
        except BaseException:  # Ctrl-C, before or after it was sent
            with contextlib.suppress(NoMeshError):
                self._link.post(lambda core, now: self._forget_unsent(run.number))
            raise
        return run

    def make_room(self, ranks: Sequence[int], num_bytes: int) -> None:
        """Wait until a run with so many bytes of arguments may be sent (`RunRegistry.make_room`).

        Ctrl-C ends the wait. A callback in the link's loop does not wait, as only that loop
        receives the answers that make room.

        Raises:
            NoMeshError, RankDied: as `start_run`.
        """
        self._check_usable(ranks)
        if not self._link.is_in_loop():
            self._runs.make_room(ranks, num_bytes, self._is_over, self._states)

    def _forget_unsent(self, number: int) -> Sequence[Effect]:
        """Forget a run if it was not sent, as it would keep its ranks busy forever."""
        if not self._link.has(number):
            self._runs.forget(number)
        return ()
