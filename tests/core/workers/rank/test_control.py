"""What the control thread says of a main thread that is in a collective's call."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellmesh.wire.stopping import Steps, StopState
from cellmesh.workers.groups.ledger import GroupRecord, Operation
from cellmesh.workers.rank import control
from cellmesh.workers.rank.control import ControlThread
from cellmesh.workers.rank.stack_inspection import Activity

GROUP = GroupRecord("g", "", ())
SEEN = Activity(execution_count=1, line=2, where="dist.all_reduce", collective="all_reduce")


class Clocked:
    """A control thread with a clock, and groups of which the last operation has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(control.time, "monotonic", lambda: self.now)
        groups = SimpleNamespace(
            ledger=SimpleNamespace(current=lambda: None, last=None),
            calls=SimpleNamespace(missing=lambda: ""),
            making=None,
        )
        context = SimpleNamespace(
            shell=None, groups=groups, interrupts=SimpleNamespace(running=7), device=None
        )
        parts = cast(Any, [None, context, None, None])
        self.thread = ControlThread(*parts)
        self.ledger = groups.ledger

    def waited_s(self, at: float) -> float:
        self.now = at
        waited = self.thread._waits(SEEN)
        assert waited is not None
        return waited.waited_s


def test_rank_that_makes_a_group_waits_as_long_as_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked = Clocked(monkeypatch)
    assert clocked.waited_s(100.0) == 0
    assert clocked.waited_s(103.0) == 3
    clocked.ledger.last = Operation("barrier", GROUP, 90.0)
    assert clocked.waited_s(104.0) == 0
    assert clocked.waited_s(106.0) == 2
    for second in (110.0, 111.0):  # a loop of collectives
        clocked.ledger.last = Operation("all_reduce", GROUP, second - 0.5)
        assert clocked.waited_s(second) == 0


def test_operations_before_a_run_do_not_count_in_its_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    said: list[StopState] = []
    monkeypatch.setattr(control, "encode", lambda parcels: said.append(parcels[0].verb))
    thread, ledger = cast(Any, clocked.thread), clocked.ledger
    ledger.gate = SimpleNamespace(is_paused=False)
    ledger.main_thread = threading.get_ident()
    ledger.before_run = 100.02
    thread._interrupts = contextlib.nullcontext()
    thread._channel = SimpleNamespace(send=lambda frames: None)
    thread._groups.counts = lambda: ()
    thread._shell = SimpleNamespace(user_ns={})
    thread._context.steps = SimpleNamespace(is_inside=False, describe=lambda names: Steps())
    clocked.now = 100.8
    for since, has_begun in ((100.02, False), (100.5, True)):
        clocked.ledger.last = Operation("all_reduce", GROUP, since)
        thread._report_stop(7)
        assert said.pop().has_begun is has_begun
