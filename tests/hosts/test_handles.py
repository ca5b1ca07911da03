"""Calls between ranks of several hosts, which go by way of the notebook."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RankFailure, RanksInterrupted
from tests.conftest import own_runtime_dir
from tests.faults.watching import wait_until
from tests.mesh.test_handles import Counter
from tests.mesh.test_links import CODE, both, wait_in_link

from .netns import Host

FORKS_AGENTS = True
WAIT_S = 60.0
MB = 1 << 20
# As in `test_bulk`: an answer on one host, and the tenths of a second that are under way.
SOON_S = 2.0


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
    assert own.call("double", bytes(20 * MB)) == bytes(40 * MB)
    assert own.call_async("double", bytes(20 * MB)) == bytes(40 * MB)
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


def test_a_link_over_hosts_works_again_after_a_death(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    far, near = meshes
    with pytest.raises(MeshUsageError, match=r"near runs on this machine alone.* start it"):
        cm.link(far, near)
    with cm.start(hosts="cm2:1", lease_s=60, name="beyond") as beyond:
        pair = far, beyond
        for mesh in pair:
            mesh.cell(CODE)
        cm.link(*pair, timeout_s=WAIT_S)
        assert both(pair, "total()") == [111] * 3
        waiting = wait_in_link(beyond)
        pid = next(info.pid for info in far.ready_ranks if info.rank == 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailure, match="weights"):
            waiting.result(WAIT_S)
        assert far.heal().failure == ""
        far.cell(CODE)
        assert both(pair, "total()") == [111] * 3


class Source:
    """Gives large values to another actor.

    Args:
        other: the other actor.
    """

    def __init__(self, other: Any) -> None:
        self.other = other

    def give(self, num_bytes: int) -> int:
        doubled = self.other.double(num_bytes * b"x")
        return len(doubled) if set(doubled) == {ord("x")} else 0


def num_segments(machine: Host) -> int:
    """Return how many the ranks of a host have open; they keep some more, to write them again."""
    found = 0
    for process in machine.meshes():
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    flags = Path(f"/proc/{process.pid}/fdinfo/{link.name}").read_text().split()[3]
                    is_read = not int(flags, 8) & os.O_RDWR
                    found += is_read and "memfd:cellmesh-" in str(link.readlink())
    return found


def test_a_large_value_delays_nothing_and_nothing_is_left_of_one_that_does_not_arrive(
    meshes: tuple[cm.Mesh, cm.Mesh], machines: list[Host]
) -> None:
    far, near = meshes
    called: Any = far[1].spawn(Counter, name="taking")
    source = near.spawn(Source, called, name="source")
    machine, session = machines[1], far.rank_set.session
    held = psutil.Process().memory_info().rss

    def begin(num_bytes: int) -> cm.Run[Any]:
        before = machine.num_bytes()[0]
        run = source.give.submit(num_bytes)
        wait_until(lambda: machine.num_bytes()[0] > before + 2 * MB, WAIT_S, "it is under way")
        return run

    machine.slow_down("100mbit")
    run = begin(400 * MB)
    for ask in (far.report, lambda: called.add(1), lambda: far[1].run(abs, -1)):
        began = time.monotonic()
        ask()
        assert time.monotonic() - began < SOON_S
    assert not run.done()
    assert psutil.Process().memory_info().rss - held < 100 * MB
    run.cancel()
    with pytest.raises(RanksInterrupted):
        run.result(WAIT_S)
    wait_until(lambda: not num_segments(machine), WAIT_S, "nothing is left of it")

    run = begin(20 * MB)
    machine.cut()
    assert session._hosts is not None
    connection = session._hosts._all[1]
    wait_until(lambda: connection.lost_at is not None, WAIT_S, "the connection is lost")
    machine.mend()
    assert run.result(WAIT_S) == 40 * MB

    machine.slow_down("100mbit")
    run = begin(400 * MB)
    os.kill(next(info.pid for info in far.ready_ranks if info.rank == 1), signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"rank 1 of far .*SIGKILL"):
        run.result(WAIT_S)
    machine.mend()
    assert far.heal().failure == ""
    far.drop(called)
    far[1].spawn(Counter, name="taking")
    assert source.give(MB) == 2 * MB
    wait_until(lambda: not num_segments(machine), 10.0, "nothing is left of it")


_CALL = """
import pathlib, threading
def call():
    try:
        own.other.never.submit().result()
    except Exception as error:
        pathlib.Path(path).write_text(str(error))
threading.Thread(target=call).start()
"""
_KILLED = """
import sys, time
import cellmesh as cm
from tests.mesh.test_handles import Counter
mesh = cm.start(hosts="cm1:1,cm2:1", lease_s=60, host_lease_s=1, name="killed")
called = mesh[1].spawn(Counter, name="called")
mesh[0].spawn(Counter, called, name="own")
mesh.push(path=sys.argv[1])
mesh[0].cell(sys.argv[2])
while mesh[1].pull("called.count") != -1:
    time.sleep(0.01)
print("it waits", flush=True)
sys.stdin.read()
"""


def test_calls_fail_after_their_notebook_was_killed(machines: list[Host], tmp_path: Path) -> None:
    failure = tmp_path / "failure"
    command = [sys.executable, "-c", _KILLED, str(failure), _CALL]
    with own_runtime_dir():
        notebook = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert notebook.stdout is not None
        assert any("it waits" in line for line in notebook.stdout)
        notebook.kill()
        notebook.communicate()
        wait_until(failure.exists, WAIT_S, "the call has failed")
        with cm.attach("killed") as again:
            assert "rank 1 cannot be called, as no notebook is attached" in failure.read_text()
            wait_until(lambda: again[1].pull("called.count") == -2, WAIT_S, "it is cancelled")
            assert again.actors["own"].call("add", 3) > 0


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
