"""Stops of a rank's runs by its control thread."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellmesh.wire.stopping import Steps, StopState
from cellmesh.workers.groups.groups import Groups
from cellmesh.workers.groups.ledger import GroupRecord, Operation
from cellmesh.workers.rank import control
from cellmesh.workers.rank.control import ControlThread
from cellmesh.workers.rank.stack_inspection import Waited


def test_operations_before_a_run_do_not_count_in_its_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[StopState] = []
    monkeypatch.setattr(control, "encode", lambda parcels: said.append(parcels[0].verb))
    monkeypatch.setattr(control.time, "monotonic", lambda: 100.8)
    ledger = SimpleNamespace(
        current=lambda: None,
        last=None,
        gate=SimpleNamespace(is_paused=False),
        main_thread=threading.get_ident(),
        before_run=100.02,
    )
    calls = SimpleNamespace(missing=lambda: "")
    groups = SimpleNamespace(ledger=ledger, calls=calls, making=None, counts=lambda: ())
    steps = SimpleNamespace(is_inside=False, describe=lambda names: Steps())
    context = SimpleNamespace(
        shell=SimpleNamespace(user_ns={}),
        groups=groups,
        device=None,
        interrupts=SimpleNamespace(),
        steps=steps,
    )
    thread = cast(Any, ControlThread)(None, context, None, None)
    thread._interrupts = contextlib.nullcontext()
    thread._channel = SimpleNamespace(send=lambda frames: None)
    for since, has_begun in ((100.02, False), (100.5, True)):
        ledger.last = Operation("all_reduce", GroupRecord("g", "", ()), since)
        thread._report_stop(7)
        assert said.pop().has_begun is has_begun


def test_a_stop_that_is_late_cuts_no_connections_of_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "look_at_main_thread", lambda shell: None)
    groups: Any = SimpleNamespace(_is_broken=False)  # it has no connections to cut
    groups.release = lambda is_needed: Groups.release(groups, is_needed)
    context = SimpleNamespace(
        shell=None, groups=groups, device=None, interrupts=SimpleNamespace(running=8)
    )
    thread = cast(Any, ControlThread)(None, context, None, None)
    thread._waits = lambda seen: Waited("all_reduce", "", 9.0)
    thread._free_if_stuck(7)
    assert groups._is_broken is False
