"""Calls between ranks of several hosts, which go by way of the notebook."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import RankFailure, RanksInterrupted
from tests.conftest import own_runtime_dir
from tests.faults.watching import wait_until
from tests.mesh.test_handles import Counter

from .netns import Host

FORKS_AGENTS = True
WAIT_S = 60.0


@pytest.fixture(scope="module")
def meshes(machines: list[Host]) -> Iterator[tuple[cm.Mesh, cm.Mesh]]:
    """A mesh on two hosts, and one on the notebook's."""
    with (
        own_runtime_dir(),
        cm.start(hosts="cm1:1,cm2:1", lease_s=60, name="far") as far,
        cm.start(1, name="near", group=False) as near,
    ):
        yield far, near


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """Not while the meshes go on."""


def test_ranks_of_different_hosts_call_each_other(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    far, near = meshes
    called = far[1].spawn(Counter, name="called")
    own = far[0].spawn(Counter, called, name="own")
    other = near.spawn(Counter, far[0, 1].spawn(Counter, called, name="both"), name="other")
    assert [own.call("add", 2), own.call_async("add", 3)] == [2, 5]
    assert other.call("add", 4) == {0: 4, 1: 4}
    assert own.call("double", bytes(5 << 20)) == bytes(10 << 20)
    for size in (9 << 20, 17 << 20):  # the result, or the argument, is too large
        with pytest.raises(RankFailure, match="too much for a call between hosts"):
            own.call("double", bytes(size))
    assert own.read("values", 3) == [0, 1, 2]
    assert own.read_async(last=1) == [0, 1]
    assert other.share_async(3) == ([0, 2, 4], [2, 1])
    with pytest.raises(RankFailure, match="no such"):
        other.call("fail")
    back = far[1].spawn(Counter, near.spawn(Counter, name="plain"), name="back")
    assert [back.call("add", 6), back.call_async("add", 1)] == [6, 7]


def test_a_cycle_over_hosts_raises(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    far, near = meshes
    first = far[0].spawn(Counter, name="first")
    second = far[1].spawn(Counter, first, name="second")
    third = near.spawn(Counter, second, name="third")
    far[0].run(lambda actor, other: setattr(actor, "other", other), first, third)
    for method in ("call", "call_async"):
        with pytest.raises(RankFailure, match="can never end"):
            first.call("call", method, "call", "add", 1)
    assert second.call("add", 1) == 1
    assert first.call_async("call_async", "call_async", "add", 1) == 2


def test_a_cancel_and_a_death_reach_the_other_host(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    far, near = meshes
    slow = far[1].spawn(Counter, name="slow")
    waiter = near.spawn(Counter, slow, name="waiter")
    run = waiter.call.submit("never")
    wait_until(lambda: far[1].pull("slow.count") == -1, WAIT_S, "it is called")
    run.cancel()
    with pytest.raises(RanksInterrupted):
        run.result(WAIT_S)
    wait_until(lambda: far[1].pull("slow.count") == -2, WAIT_S, "it is cancelled")

    run = waiter.call.submit("never")
    wait_until(lambda: far[1].pull("slow.count") == -1, WAIT_S, "it is called again")
    pid = next(info.pid for info in far.ready_ranks if info.rank == 1)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of far .*SIGKILL"):
        run.result(WAIT_S)
    assert time.monotonic() - began < 5.0
    with pytest.raises(RankFailure, match=r"rank 1 of far .*SIGKILL"):
        waiter.call("add")
    assert far.heal().failure == ""
    with pytest.raises(RankFailure, match="rank 1 was replaced, and has no actors"):
        waiter.call("add")
    far.drop(slow)
    far[1].spawn(Counter, name="slow")
    assert waiter.call("add", 2) == 2


def test_calls_fail_at_once_without_a_notebook(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    far, _ = meshes
    called: Any = far[1].spawn(Counter, name="called")
    far[0].spawn(Counter, called, name="own")
    far[0].cell(
        "import threading\n"
        "failures = []\n"
        "def call_again():\n"
        "    try:\n"
        "        while True:\n"
        "            own.other.add(1)\n"
        "    except Exception as error:\n"
        "        failures.append(str(error))\n"
        "threading.Thread(target=call_again).start()"
    )
    wait_until(lambda: called.add(0) > 0, WAIT_S, "it is called")
    far.detach()
    with cm.attach("far") as again:
        wait_until(lambda: bool(again[0].pull("failures")), WAIT_S, "the call has failed")
        assert "no notebook is attached" in again[0].pull("failures[0]")
        assert again.actors["own"].call("add", 0) > 0
