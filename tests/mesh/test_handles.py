"""Handles of actors on the ranks of two meshes."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RankFailure, RanksInterrupted
from cellmesh.wire.handles import CHALLENGE_BYTES, PROOF_BYTES, prove
from tests.faults.watching import wait_until
from tests.mesh.conftest import Recorder, state_of

WAIT_S = 60.0


class Counter:
    """What the tests call."""

    def __init__(self, other: Any = None) -> None:
        self.count, self.other = 0, other

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    def double(self, values: bytes) -> bytes:
        return 2 * values

    def fail(self) -> None:
        raise KeyError("no such")

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.other, method)(*args)

    async def call_async(self, method: str, *args: Any) -> Any:
        return await getattr(self.other, method)(*args)

    def call_all_ways(self) -> Any:
        add = self.other.add
        run = add.submit(10)
        add.send(100)
        return add(1), run.result(WAIT_S), add.any(0).result(WAIT_S), len(self.other)

    def cross(self, own: str, others: str) -> int:
        """Call the other rank once that is about to call this one."""
        import time
        from pathlib import Path

        Path(own).touch()
        until = time.monotonic() + WAIT_S
        while not Path(others).exists() and time.monotonic() < until:
            time.sleep(0.001)
        return int(self.other.add(1))

    def notify(self) -> str:
        """Call the waiting caller, without need of the answer before this ends."""
        self.other.add.send(1)
        run = self.other.add.submit(10)
        try:
            run.result(0.2)  # cycles are looked for after 0.05
        except TimeoutError:
            return "has not waited"
        return "has waited"

    async def never(self) -> None:
        import asyncio

        self.count = -1
        try:
            await asyncio.Event().wait()
        finally:
            self.count = -2

    async def reach(self, count: int) -> int:
        import asyncio

        while self.count < count:
            await asyncio.sleep(0.001)
        return self.count

    async def lose_patience(self) -> Any:
        run = self.other.reach.submit(await self.other.add(0) + 1)
        try:
            run.result(0.01)
        except TimeoutError as error:
            await self.other.add(1)
            return str(error), await run, run.result(WAIT_S)

    def values(self, num: int) -> Any:
        for number in range(num):
            yield number
            self.count = number

    async def ticks(self, other: Any = None) -> Any:
        try:
            yield 0
            yield await other.add(1) if other else 1
            await self.never()
        finally:
            self.count = -3

    def back(self, other: Any) -> Any:
        yield 0
        yield other.add(1)

    def read(self, method: str, *args: Any) -> Any:
        return [*getattr(self.other, method).stream(*args)]

    async def read_async(self, *args: Any, last: int = -1) -> Any:
        found = []
        async for value in self.other.ticks.stream(*args):
            found.append(value)
            if value == last:
                break
        return found

    def rows(self, rows: Any) -> Any:
        return {"rows": rows * 2, "num": len(rows)}

    def share(self, num: int) -> Any:
        import torch

        found = self.other.rows.sharded(torch.arange(num), dim="dp").result(WAIT_S)
        return found["rows"].tolist(), found["num"]

    async def share_async(self, num: int) -> Any:
        import torch

        found = await self.other.rows.sharded(rows=torch.arange(num))
        return found["rows"].tolist(), found["num"]

    def give_self(self) -> Any:
        return {"self": self, "other": self.other}


class Named(Counter):
    """Its methods have the names of what handles, methods and meshes have."""

    stop = send = submit = ranks = any = stream = sharded = drop = name = Counter.add


class Teller:
    """An actor that prints."""

    def tell(self, text: str) -> None:
        print(text)


@pytest.fixture(scope="module")
def left(meshes: tuple[cm.Mesh, cm.Mesh]) -> Any:
    """An actor on two ranks."""
    return meshes[0].spawn(Counter, name="left")


@pytest.fixture(scope="module")
def right(meshes: tuple[cm.Mesh, cm.Mesh], left: Any) -> Any:
    """An actor on one rank, which has got a handle of the other."""
    return meshes[1].spawn(Counter, left, name="right")


def test_a_handle_is_the_object_on_a_rank_that_has_it(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any
) -> None:
    def raise_by(number: int, of: Any) -> tuple[int, bool]:
        of.count = 0
        return left.add(number), of is left

    assert meshes[0].run(raise_by, 3, of=left).list == [(3, True)] * 2
    assert meshes[0][1].run(raise_by, 4, of=left[1]) == (4, True)
    meshes[0].push(kept=[left])
    meshes[0].cell("kept[0].add(); assert kept[0] is left")


def test_an_object_and_a_handle_return_as_handles(left: Any, right: Any) -> None:
    found = left.give_self()
    assert [repr(each["self"]) for each in found.list] == [repr(left[0]), repr(left[1])]
    assert found[1]["self"].add(0) == left[1].add(0)
    found = right.give_self()
    assert (repr(found["self"]), repr(found["other"])) == (repr(right[0]), repr(left))


def test_a_method_travels_as_its_handle_does(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any, right: Any
) -> None:
    method = left[0].add
    assert [mesh[0].run(lambda: method(0)) for mesh in meshes] == [left[0].add(0)] * 2
    with pytest.raises(MeshUsageError, match=r"no method: 'version' .*mesh.pull"):
        meshes[1][0].run(lambda: left.version)


def test_a_handle_in_another_process_says_why_it_cannot_be_used(left: Any, tmp_path: Path) -> None:
    (tmp_path / "handle").write_bytes(pickle.dumps(left))
    script = (
        "import pickle, sys; h = pickle.load(open(sys.argv[1], 'rb')); print(len(h), repr(h))\n"
        "try: h.add(1)\n"
        "except ValueError as e: print(e)"
    )
    command = [sys.executable, "-c", script, tmp_path / "handle"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert shown.stdout.startswith("2 <actor left: Counter on ranks 0-1 of left, not usable here>")
    assert "neither the notebook that made it nor a rank of a mesh" in shown.stdout


def test_a_handle_whose_actor_was_dropped_says_so(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    brief = meshes[0].spawn(Counter, name="brief")
    pickled = pickle.dumps(brief)
    meshes[0].drop(brief)
    with pytest.raises(MeshUsageError, match="brief, an actor of left, was dropped"):
        pickle.loads(pickled).add()


def test_ranks_call_ranks(meshes: tuple[cm.Mesh, cm.Mesh], left: Any, right: Any) -> None:
    meshes[0].cell("left.count = 0")
    assert right.call("add", 5) == {0: 5, 1: 5}
    assert right.call_async("add", 5) == {0: 10, 1: 10}
    one = meshes[1].spawn(Counter, left[1], name="one")
    assert one.call_all_ways() == (121, 20, 121, 1)
    assert left.add(0).list == [10, 121]
    assert one.call("double", bytes(10 << 20)) == bytes(20 << 20)
    with pytest.raises(RankFailure) as caught:
        one.call("fail")
    (error,) = caught.value.exceptions
    assert isinstance(error, KeyError)
    assert "raised by left.fail on left 1:" in error.__notes__[0]
    for method, text in (("ad", "did you mean 'add'"), ("fail", "no such"), ("_x", "private")):
        with pytest.raises(RankFailure, match=text):
            one.call_async(method)


def test_a_call_goes_on_after_a_time_out(meshes: tuple[cm.Mesh, cm.Mesh], left: Any) -> None:
    one = meshes[1].spawn(Counter, left[1], name="impatient")
    count = left[1].add(0) + 1
    assert one.lose_patience() == ("left.reach on left 1 has not ended after 0.01 s", count, count)


def test_no_name_of_a_method_collides(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    named = meshes[0][0].spawn(Named, name="named")
    caller = meshes[1].spawn(Counter, named, name="caller")
    names = [name for name, each in vars(Named).items() if each is Counter.add]
    assert len(names) == 9
    for name in names:
        method, before = getattr(named, name), named.add(0)
        method.send()
        runs = method.submit(), method.any()
        found = [run.result(WAIT_S) for run in runs]
        found += method(), caller.call(name), caller.call_async(name)
        assert found == [*range(before + 2, before + 7)], name


def test_ranks_share_rows_among_ranks(right: Any) -> None:
    assert right.share(3) == right.share_async(3) == ([0, 2, 4], [2, 1])
    with pytest.raises(RankFailure, match=r"cannot split 1 rows into 2 parts.*as in left\[:1\]"):
        right.share(1)


def test_ranks_read_streams(meshes: tuple[cm.Mesh, cm.Mesh], left: Any, right: Any) -> None:
    assert [each.list for each in right.read("values", 2)] == [[0, 0], [1, 1]]
    one = meshes[1].spawn(Counter, left[0], name="reader")
    assert one.read("values", 9) == [*range(9)]
    with pytest.raises(RankFailure, match=r"left.add returns a int and yields no values"):
        one.read("add", 1)
    assert one.read_async(last=1) == [0, 1]
    wait_until(lambda: meshes[0].pull("left.count")[0] == -3)
    assert one.read_async(one, last=1) == [0, 1]  # its call waits beside its reading
    run = one.read_async.submit()
    wait_until(lambda: meshes[0].pull("left.count")[0] == -1)
    run.cancel()
    with pytest.raises(RanksInterrupted):
        run.result(WAIT_S)
    wait_until(lambda: meshes[0].pull("left.count")[0] == -3)
    with pytest.raises(RankFailure, match=r"can never end, as right 0 waits for left.back"):
        one.read("back", one)


def test_what_a_called_method_prints_is_below_the_last_run_of_its_mesh(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any
) -> None:
    teller = meshes[0][0].spawn(Teller, name="teller")
    caller = meshes[1].spawn(Counter, teller, name="caller")
    sink = Recorder()
    meshes[0].submit_cell("1", sink=sink).result(WAIT_S)
    caller.call("tell", "hello")
    sink.wait_for_line("hello", WAIT_S)


def test_nothing_is_read_from_a_process_without_the_key(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any
) -> None:
    path = Path(meshes[0].rank_set.session.ticket.directory) / "0.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    for proof in (bytes(PROOF_BYTES), b"short", prove("another key", bytes(CHALLENGE_BYTES))):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(str(path))
            assert len(connection.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
            connection.sendall(proof)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert left.add(0)


def test_a_cycle_raises_where_it_is_closed(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any, right: Any
) -> None:
    first = meshes[0][0].spawn(Counter, right[0], name="first")
    second = meshes[1].spawn(Counter, first, name="second")
    for method in ("call", "call_async"):
        with pytest.raises(RankFailure, match="can never end, as right 0 waits for first"):
            second.call(method, "add")
    assert second.call_async("call", "add") == right.add(0)


def test_calls_back_for_which_nobody_waits_are_no_cycle(
    meshes: tuple[cm.Mesh, cm.Mesh], right: Any
) -> None:
    notifier = meshes[0][0].spawn(Counter, right[0], name="notifier")
    notified = meshes[1].spawn(Counter, notifier, name="notified")
    before = right.add(0)
    assert notified.call("notify") == "has not waited"
    assert right.add(0) == before + 11


def test_a_cycle_of_independent_calls_raises_once(
    meshes: tuple[cm.Mesh, cm.Mesh], right: Any, tmp_path: Path
) -> None:
    third = meshes[0][0].spawn(Counter, right[0], name="third")
    fourth = meshes[1].spawn(Counter, third, name="fourth")
    files = str(tmp_path / "a"), str(tmp_path / "b")
    runs = third.cross.submit(*files), fourth.cross.submit(*reversed(files))
    failures = [run.gather(WAIT_S)[1] for run in runs]
    assert sum(map(len, failures)) == 1
    (error,) = (error for each in failures for error in each.values())
    assert "left 0 waits for right.add on right 0" in str(error)
    assert "right 0 waits for third.add on left 0" in str(error)


def test_an_interrupt_reaches_the_caller_and_the_called(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any
) -> None:
    waiter = meshes[1].spawn(Counter, left[0], name="waiter")
    run = waiter.call.submit("never")
    wait_until(lambda: meshes[0].pull("left.count")[0] == -1)
    assert state_of(meshes[1], 0).peer == "left.never on left 0"
    assert "rank 0 is waiting for left.never on left 0" in meshes[1].why()
    run.cancel()
    with pytest.raises(RanksInterrupted):
        run.result(WAIT_S)
    wait_until(lambda: meshes[0].pull("left.count")[0] == -2)


def test_a_call_of_a_rank_that_ends_raises_at_once(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any
) -> None:
    lost = meshes[1].spawn(Counter, left[1], name="lost")
    stream, run = lost.read_async.submit(), lost.call.submit("never")
    wait_until(lambda: meshes[0].pull("left.count")[1] == -1)
    os.kill(meshes[0].pull("__import__('os').getpid()")[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match="RankDied: rank 1 has ended, or was replaced"):
        run.result(WAIT_S)
    with pytest.raises(RankFailure, match="RankDied: rank 1 "):
        stream.result(WAIT_S)
    with pytest.raises(RankFailure, match="rank 1 of left is dead"):
        lost.call("add")
    assert meshes[0].heal().failure == ""
    meshes[0].drop(left)
    meshes[0].spawn(Counter, name="left")
    assert lost.call("add", 2) == 2
