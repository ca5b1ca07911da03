"""Reports of the control thread for a stop."""

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
