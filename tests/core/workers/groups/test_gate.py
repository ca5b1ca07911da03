"""The gate before operations: who passes, who pauses, and what a strike raises."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cellmesh.errors import Released
from cellmesh.wire.groups import GroupCount
from cellmesh.wire.stopping import Owed
from cellmesh.workers.groups.gate import Gate

RUN = 7


class Rank:
    """A thread that stands for a rank's main thread, and its gate."""

    def __init__(self) -> None:
        self.num_begun, self.num_steps = 3, 2
        self.reports: list[bool] = []
        self.raised: BaseException | None = None
        self.has_reported = threading.Event()
        self.is_pending = self.is_over = False
        self.gate = Gate(-1)
        self.gate.running = lambda: RUN
        self.gate.counts = lambda: (GroupCount("0", (), self.num_begun),)
        self.gate.num_steps = lambda optimizer: self.num_steps
        self.gate.is_pending = lambda run: self.is_pending
        self.gate.report = self._report
        self._thread = threading.Thread(target=self._begin_operations)
        self.goes = threading.Semaphore(0)

    def _report(self, run: int) -> None:
        assert run == RUN
        self.reports.append(self.gate.is_paused)
        self.has_reported.set()

    def _begin_operations(self) -> None:
        self.gate._main_thread = threading.get_ident()
        while True:
            self.goes.acquire()
            if self.is_over:
                return
            try:
                if self.gate.is_closed:
                    self.gate.enter(2)
                self.num_begun += 1
                if self.gate.is_closed:
                    self.gate.note_begun()
            except BaseException as error:
                self.raised = error
                return

    def start(self) -> None:
        self._thread.start()

    def begin(self) -> None:
        self.has_reported.clear()
        self.goes.release()

    def await_report(self) -> bool:
        assert self.has_reported.wait(10)
        self.has_reported.clear()
        return self.reports[-1]

    def pauses(self) -> bool:
        """Begin an operation; return whether the thread pauses before it."""
        self.begin()
        return self.await_report()

    def await_open(self) -> None:
        while self.gate.is_closed:
            self.has_reported.wait(0.005)
        assert self.raised is None

    def end(self) -> None:
        self.is_over = True
        self.gate.open()
        self.goes.release()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    made.start()
    yield made
    made.end()


def test_a_rank_pauses_before_its_next_operation_and_a_strike_raises_there(rank: Rank) -> None:
    rank.gate.close(RUN, Owed())
    assert rank.pauses()
    assert rank.num_begun == 3
    assert rank.gate.strike(RUN, Released)
    rank._thread.join(10)
    assert type(rank.raised) is Released
    assert not rank.gate.is_closed  # what handlers of the user's begin passes


@pytest.mark.parametrize("owed", [Owed((GroupCount("0", (), 4),)), Owed((), (("SGD 1", 3),))])
def test_a_rank_that_owes_goes_on_and_reports_what_it_begins(rank: Rank, owed: Owed) -> None:
    rank.gate.close(RUN, Owed())
    assert rank.pauses()
    rank.gate.close(RUN, owed)
    assert not rank.await_report()
    assert rank.num_begun == 4
    rank.num_steps = 3
    assert rank.pauses()
    assert rank.num_begun == 4


def test_operations_of_a_step_pass_for_a_while(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.gate.is_in_step = lambda: True
    rank.gate.close(RUN, Owed())
    assert not rank.pauses()
    assert rank.num_begun == 4
    monkeypatch.setattr("cellmesh.workers.groups.gate._IN_STEP_S", 0.0)
    assert rank.pauses()
    assert rank.num_begun == 4


def test_a_rank_that_runs_python_is_signalled_and_begins_nothing_until_then(rank: Rank) -> None:
    rank.gate.close(RUN, Owed())
    rank.is_pending = True
    assert not rank.gate.strike(RUN, KeyboardInterrupt)
    rank.begin()
    assert not rank.has_reported.wait(0.1)
    assert rank.num_begun == 3
    rank.is_pending = False  # its handler has raised, and handlers of the user's go on
    rank.await_open()


def test_another_run_and_groups_of_one_rank_pass() -> None:
    gate = Gate(threading.get_ident())
    reports: list[Any] = []
    gate.report = reports.append
    gate.close(RUN, Owed())
    gate.enter(1)
    gate.running = lambda: RUN - 1
    gate.enter(2)
    assert gate.is_closed
    gate.running = lambda: RUN + 1
    gate.enter(2)
    assert not gate.is_closed
    assert reports == []


def test_threads_of_the_autograd_engine_pause(rank: Rank) -> None:
    """Python knows nothing of them; they run backward on behalf of the main thread."""
    raised: list[BaseException] = []
    has_ended = threading.Event()

    def begin_operation() -> None:
        try:
            rank.gate.enter(2)
        except BaseException as error:
            raised.append(error)
        has_ended.set()

    rank.gate.close(RUN, Owed())
    _thread.start_new_thread(begin_operation, ())
    assert rank.await_report()
    assert rank.gate.strike(RUN, Released)
    assert has_ended.wait(10)
    assert [type(each) for each in raised] == [Released]


def test_a_rank_whose_controller_ends_goes_on(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellmesh.workers.groups.gate._HEARD_WITHIN_S", 0.0)
    rank.gate.close(RUN, Owed())
    rank.begin()
    rank.await_open()
