"""Calls between ranks, of which each is a `Handles` in this process, over real sockets."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.errors import HostError, MeshUsageError, RankDied, RemoteError, UnpicklableError
from cellmesh.wire import limits, payload
from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.handles import (
    CHALLENGE_BYTES,
    Address,
    Link,
    PeerCall,
    mark_of,
    prove,
    socket_of,
)
from cellmesh.wire.hosts import HostPart
from cellmesh.wire.messages import Done, Pickled
from cellmesh.wire.peer_calls import PEER_RUNS, Routed
from cellmesh.wire.segment_pool import SegmentPool
from cellmesh.wire.stream import Channel
from cellmesh.wire.ticket import write_ticket
from cellmesh.wire.verbs import Imports
from cellmesh.workers.rank import handles, peer_connections
from cellmesh.workers.rank.actors import Actors
from cellmesh.workers.rank.features import RankContext
from cellmesh.workers.rank.handles import Handles, _await_in
from cellmesh.workers.rank.interrupts import Interrupts
from cellmesh.workers.rank.relayed import MAX_UNDER_WAY_BYTES, hear
from cellmesh.workers.rank.remote_actors import PeerRun, RankActor

from ....support.tickets import make_ticket
from .conftest import KEY

WAIT_S = 60.0


class Rank(RankContext):
    """A rank of a mesh in a directory, with actors of some names; its main thread does nothing.

    Attributes:
        arrived: calls of other ranks.
        answer: sends answers.
    """

    def __init__(self, directory: Path, rank: int, *names: str) -> None:
        nothing: Any = SimpleNamespace(rank=rank, running=-1, tasks={}, mesh=None)
        super().__init__(nothing, nothing, nothing, nothing, nothing, f"{directory}/code/current")
        self.interrupts = Interrupts()
        self.segments: Any = SimpleNamespace(pool=SegmentPool("cellmesh-rank-test"))
        self.arrived: list[Parcel[Any]] = []
        self.answer: Callable[[Any], Any]
        named = dict.fromkeys(names, object())
        vars(self)["actors"] = SimpleNamespace(get=named.get, name_of=lambda value: "", streams={})
        self.tasks = SimpleNamespace(
            let_wake=lambda peers: None, add=self.arrived.append, wake=1, awaits_heal=False
        )
        self.divert = lambda choose: setattr(self, "answer", choose)
        if names:
            self.handles.listen()


@pytest.fixture
def caller(directory: Path) -> Handles:
    """A rank of it without actors."""
    return Rank(directory, 3).handles


def address_of(directory: Path, *ranks: int) -> Address:
    return Address(mark_of(KEY), "left", str(directory), "counter", "Counter", ranks)


@pytest.fixture
def silent(directory: Path) -> Iterator[socket.socket]:
    """A rank (1) that listens, but does nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_of(str(directory), 1))
        listener.listen()
        listener.settimeout(WAIT_S)
        yield listener


def wait_until(is_true: Callable[[], object]) -> None:
    for _ in range(int(100 * WAIT_S)):
        if is_true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not come true")


def test_no_rank_is_called_if_one_of_them_cannot_be(directory: Path, caller: Handles) -> None:
    zero = Rank(directory, 0, "counter")
    with pytest.raises(RankDied, match="rank 1 of left is dead, or was replaced"):
        caller.call(address_of(directory, 0, 1), "add", "call", ((), {}))
    caller.call(address_of(directory, 0), "double", "call", ((), {}))
    wait_until(lambda: zero.arrived)
    titles = [call.link.title for _, call in zero.handles.served._calls.values()]
    assert titles == ["counter.double on left 0"]


def test_a_rank_that_does_not_answer_delays_no_calls_of_others(
    directory: Path, caller: Handles, silent: socket.socket
) -> None:
    zero = Rank(directory, 0, "counter")
    with ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(caller.call, address_of(directory, 1), "add", "call", ((), {}))
        with silent.accept()[0]:
            done = pool.submit(caller.call, address_of(directory, 0), "add", "call", ((), {}))
            done.result(peer_connections.GREET_S / 2)
            wait_until(lambda: zero.arrived)
        with pytest.raises(RankDied):
            stuck.result(WAIT_S)


def test_the_error_says_that_a_rank_lives_but_does_not_answer(
    directory: Path, caller: Handles, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connections, "GREET_S", 0.05)
    with pytest.raises(HostError, match=r"rank 1 of left has not answered .* stopped"):
        caller.call(address_of(directory, 1), "add", "call", ((), {}))


def test_any_passes_over_a_rank_that_has_no_such_actor(directory: Path, caller: Handles) -> None:
    other, has = Rank(directory, 0, "another"), Rank(directory, 2, "counter")
    actor = RankActor(caller, address_of(directory, 0, 1, 2))
    for count in (1, 2, 3):
        actor.add.any(1)
        wait_until(lambda count=count: len(has.arrived) == count)
    assert not other.arrived
    with pytest.raises(RankDied, match="rank 0 of left has no `counter` any more"):
        actor[0].add.any(1)


def test_a_caller_that_reads_nothing_does_not_stop_the_called_rank(directory: Path) -> None:
    zero, value = Rank(directory, 0, "counter"), bytearray(8 << 20)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(socket_of(str(directory), 0))
        connection.sendall(prove(KEY, connection.recv(CHALLENGE_BYTES)))
        channel = Channel(connection)
        peer = zero.handles.peer
        for run in (1, 2):
            call = PeerCall(Link(peer, run, "counter.add"), (), Pickled(b""), run, (0,))
            channel.send(encode([Parcel(call)]))
        wait_until(lambda: len(zero.arrived) == 2)
        for work, _ in zero.arrived:
            answer = Parcel(Done(work.run, Pickled(b"", 1)), (value,))
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(zero.answer, [answer]).result(WAIT_S) == []
        value[:] = b"x" * len(value)  # as the next call may do
        for _ in range(2):
            frames = channel.receive()
            assert bytes(frames[1]) == bytes(8 << 20)


def test_nothing_is_sent_to_a_socket_of_another_user(
    directory: Path, caller: Handles, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_connections, "is_own_peer", lambda connection: False)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(caller.call, address_of(directory, 1), "add", "call", ((), {}))
        with silent.accept()[0] as connection, contextlib.suppress(ConnectionError):
            connection.settimeout(WAIT_S)
            connection.sendall(bytes(CHALLENGE_BYTES))  # the caller may have left before
            assert connection.recv(1) == b""
        with pytest.raises(MeshUsageError, match=r"counter, .* is at a socket of another user"):
            called.result(WAIT_S)


def test_a_process_of_another_user_gets_no_challenge(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "is_own_peer", lambda connection: False)
    Rank(directory, 0, "counter")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(socket_of(str(directory), 0))
        assert connection.recv(CHALLENGE_BYTES) == b""


def test_calls_in_flight_are_bounded(
    directory: Path, caller: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "MAX_CALLS", 2)
    zero, actor = Rank(directory, 0, "counter"), RankActor(caller, address_of(directory, 0))
    runs = [actor.add.submit(1) for _ in range(2)]
    with pytest.raises(MeshUsageError, match=r"^2 calls of left 0 are in flight: wait for some"):
        actor.add.submit(1)
    wait_until(lambda: len(zero.arrived) == 2)
    answer(zero, zero.arrived[0], 5)
    assert runs[0].result(WAIT_S) == 5
    actor.add.submit(1)
    wait_until(lambda: len(zero.arrived) == 3)


def test_a_handle_of_an_actor_that_its_rank_has_no_more_says_so(directory: Path) -> None:
    found = Rank(directory, 0).handles.open(address_of(directory, 0))
    with pytest.raises(MeshUsageError, match=r"counter, .* is not on this rank any more: mesh\.sp"):
        found.add(1)
    with pytest.raises(MeshUsageError, match=r"this rank has no actor 'counter': mesh\.spawn it"):
        Actors({}, 0).find("call", ("counter", "add"))


def test_a_forked_process_is_not_the_rank(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, own = Rank(directory, 0), os.getpid()
    monkeypatch.setattr(handles.os, "getpid", lambda: own + 1)
    assert rank.handles.open(address_of(directory, 1)) is None


@pytest.fixture
def apart(tmp_path: Path) -> tuple[Rank, Rank]:
    """A caller, and a rank of a mesh on another host, between which messages are passed on."""
    made = []
    for name in ("near", "far"):
        (directory := tmp_path / name).mkdir(0o700)
        host = HostPart(0, 2, name, 0, 1, "")
        ticket = make_ticket(name=name, key=name * 16, directory=str(directory), host=host)
        write_ticket(ticket)
        made.append(Rank(directory, 0, *(("counter",) if name == "far" else ())))
    marks = [mark_of(name * 16) for name in ("near", "far")]

    def carry(to: Rank, mark: str, parcel: Parcel[Any]) -> None:
        message = msgspec.structs.replace(parcel.verb, mark=mark)
        hear(to, message, parcel.buffers)

    made[0].post = lambda parcel: carry(made[1], marks[0], parcel)
    made[1].post = lambda parcel: carry(made[0], marks[1], parcel)
    return made[0], made[1]


def answer(rank: Rank, call: Parcel[Any], value: Any) -> None:
    pickled, buffers = payload.dumps(value, "it")
    rank.answer([Parcel(Done(call.verb.run, pickled), tuple(buffers))])


def far_address(tmp_path: Path, actor: str = "counter") -> Address:
    return Address(mark_of("far" * 16), "far", str(tmp_path / "far"), actor, "Counter", (0,))


def test_a_call_between_hosts_is_answered_or_fails_with_its_rank(
    apart: tuple[Rank, Rank], tmp_path: Path
) -> None:
    near, far = apart
    actor = RankActor(near.handles, far_address(tmp_path))
    run, lost = actor.add.submit(1), actor.add.any(2)
    wait_until(lambda: len(far.arrived) == 2)
    answer(far, far.arrived[0], 5)
    assert run.result(WAIT_S) == 5
    hear(near, Routed(mark_of("far" * 16), 0, why_lost="of far killed by SIGKILL"), ())
    with pytest.raises(RankDied, match="rank 0 of far killed by SIGKILL"):
        lost.result(WAIT_S)
    later = actor.add.submit(3)
    assert not later.done()
    hear(near, Routed("", -1, why_lost="cannot be called, as no notebook is attached"), ())
    with pytest.raises(RankDied, match="no notebook is attached"):
        later.result(WAIT_S)


class Held:
    """The way from a rank to another one, on which messages wait until they are passed on.

    Attributes:
        num_bytes: size of those that wait.
        most_bytes: the largest that it was.
    """

    def __init__(self, sender: Rank) -> None:
        self.num_bytes = self.most_bytes = self.num = 0
        self._pass_on, self._waiting = sender.post, collections.deque[Parcel[Any]]()
        sender.post = self._hold

    def _hold(self, parcel: Parcel[Any]) -> None:
        kept = Parcel(parcel.verb, tuple(map(bytes, parcel.buffers)))
        self._waiting.append(kept)
        self.num_bytes += sum(map(len, kept.buffers))
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def pass_on(self) -> None:
        """Pass the oldest message on, once there is one."""
        wait_until(lambda: self._waiting)
        parcel = self._waiting.popleft()
        self.num_bytes -= sum(map(len, parcel.buffers))
        self._pass_on(parcel)

    def pass_on_until(self, is_true: Callable[[], object]) -> None:
        """Pass messages on until a condition holds."""
        for _ in range(int(1000 * WAIT_S)):
            if is_true():
                return
            if self._waiting:
                self.pass_on()
            else:
                threading.Event().wait(0.001)
        raise AssertionError("it does not come true")


LARGE = bytes(range(256)) * (96 << 10)  # 24 MiB


def arguments_of(call: Parcel[Any]) -> Any:
    return payload.loads(call.verb.payload, call.buffers)[1]


def num_segments() -> int:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(
        "memfd:cellmesh-rank-test" in os.readlink(link) for link in links if os.path.islink(link)
    )


def test_large_values_travel_between_hosts_with_a_bounded_part_under_way(
    apart: tuple[Rank, Rank], tmp_path: Path
) -> None:
    near, far = apart
    actor, there, back = RankActor(near.handles, far_address(tmp_path)), Held(near), Held(far)
    large, small = actor.add.submit(LARGE), actor.add.submit(1)
    moving = threading.Thread(target=back.pass_on_until, args=[large.done])
    moving.start()
    there.pass_on_until(lambda: len(far.arrived) == 2)
    assert [arguments_of(call) for call in far.arrived] == [(LARGE,), (1,)]  # in order
    for call, value in zip(far.arrived, (LARGE, 2), strict=True):
        answer(far, call, value)
    there.pass_on_until(large.done)
    assert large.result(0) == LARGE
    assert small.result(0) == 2
    moving.join(WAIT_S)
    for way in (there, back):
        assert way.most_bytes < MAX_UNDER_WAY_BYTES + (2 << 20)


def test_small_calls_and_answers_pass_a_large_answer(
    apart: tuple[Rank, Rank], tmp_path: Path
) -> None:
    near, far = apart
    actor, back = RankActor(near.handles, far_address(tmp_path)), Held(far)
    large = actor.add.submit(1)
    wait_until(lambda: far.arrived)
    answer(far, far.arrived[0], LARGE)
    small = actor.add.submit(2)
    wait_until(lambda: len(far.arrived) == 2)
    answer(far, far.arrived[1], 3)
    back.pass_on_until(small.done)
    assert small.result(0) == 3
    assert not large.done()


def test_the_called_rank_drops_a_call_that_is_cancelled_on_its_way(
    apart: tuple[Rank, Rank], tmp_path: Path
) -> None:
    near, far = apart
    actor, there = RankActor(near.handles, far_address(tmp_path)), Held(near)
    run = actor.add.submit(LARGE)
    for _ in range(3):
        there.pass_on()
    run.cancel()
    there.pass_on_until(lambda: far.arrived)
    with pytest.raises(KeyboardInterrupt):
        arguments_of(far.arrived[0])
    later = actor.add.submit(1)
    there.pass_on_until(lambda: len(far.arrived) == 2)
    assert not later.done()
    there.pass_on_until(lambda: not near.handles.relays.to(mark_of("far" * 16), 0)._sender)


def test_nothing_is_left_of_a_value_on_its_way_after_a_death(
    apart: tuple[Rank, Rank], tmp_path: Path
) -> None:
    (near, far), before = apart, num_segments()
    actor, there = RankActor(near.handles, far_address(tmp_path)), Held(near)
    lost = actor.add.submit(LARGE)
    for _ in range(3):
        there.pass_on()
    wait_until(lambda: far.handles.relays.to(mark_of("near" * 16), 0)._arrivals)
    hear(near, Routed(mark_of("far" * 16), 0, why_lost="of far killed by SIGKILL"), ())
    with pytest.raises(RankDied, match="SIGKILL"):
        lost.result(WAIT_S)
    hear(far, Routed(mark_of("near" * 16), 0, why_lost="of near killed by SIGKILL"), ())
    near.segments.pool.clear()
    wait_until(lambda: num_segments() == before)
    assert not far.arrived


def test_a_value_for_which_there_is_no_memory_is_an_error_of_its_call(
    apart: tuple[Rank, Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = apart
    actor = RankActor(near.handles, far_address(tmp_path))
    monkeypatch.setattr(limits, "free_bytes", lambda: 1 << 20)
    with pytest.raises(UnpicklableError, match=r"does not fit: 1\.0 MB of memory are free"):
        actor.add(LARGE)
    assert near.handles.in_flight(far_address(tmp_path), 0) == 0
    run = actor.add.submit(1)
    wait_until(lambda: far.arrived)
    answer(far, far.arrived[0], LARGE)
    with pytest.raises(RemoteError, match="does not fit"):
        run.result(WAIT_S)


def test_a_rank_without_actors_refuses_calls_of_other_hosts(
    apart: tuple[Rank, Rank], tmp_path: Path
) -> None:
    near, far = apart
    vars(far).pop("handles")  # as if it were new
    run = RankActor(near.handles, far_address(tmp_path)).add.submit(1)
    with pytest.raises(RankDied, match="rank 0 was replaced, and has no actors"):
        run.result(WAIT_S)
    assert not far.arrived


async def wait_in_task(awaited: Callable[[], Any]) -> None:
    task = asyncio.ensure_future(awaited())
    await asyncio.wait((task,), timeout=0.01)
    await task


async def wait_in_time(awaited: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        await awaited()


async def wait_before(awaited: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.sleep(0)
    await awaited()


@pytest.mark.parametrize(
    ("wait", "is_endless"),
    [
        (lambda awaited: awaited(), True),
        (lambda awaited: asyncio.gather(awaited(), asyncio.sleep(0)), True),
        (wait_before, True),
        (lambda awaited: asyncio.wait_for(awaited(), WAIT_S), False),
        (wait_in_time, False),
        (wait_in_task, False),
    ],
    ids=["await", "gather", "after a time-out", "wait_for", "timeout", "task"],
)
def test_only_an_await_without_a_time_out_can_close_a_cycle(
    caller: Handles, wait: Callable[[Any], Any], is_endless: bool
) -> None:
    link, seen = Link(caller.peer, 1, "counter.add on left 0"), list[Any]()
    run: Any = PeerRun(caller, "add", {}, 0.0)

    async def awaited() -> None:
        with caller.await_in_call(run) as may_close:
            await asyncio.sleep(0.02)
            caller.chase_awaited(run)
            seen.append((may_close, {**caller._awaited}))

    async def call() -> None:
        await wait(awaited)

    asyncio.run(_await_in((link,), call()))
    assert seen == [(True, {run: link} if is_endless else {})]
    assert not caller._awaited


def test_imports_of_calls_reach_the_notebook(directory: Path) -> None:
    imports = Parcel(Imports(PEER_RUNS.start, ("scipy",), (1.0,), ("scipy",)))
    assert Rank(directory, 0).handles._divert([imports]) == [imports]


def test_a_caller_that_has_gone_does_not_end_the_rank_that_accepts_it(
    directory: Path, caller: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handles, "_serve", lambda handles: threading.Event().wait())
    zero = Rank(directory, 0, "counter")
    path = socket_of(str(directory), 0)
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect(path)
    zero.handles.hear()
    assert not zero.handles._connections
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(caller.call, address_of(directory, 0), "add", "call", ((), {}))
        wait_until(lambda: zero.handles.hear() or zero.arrived)
        run.result(WAIT_S)


def test_an_answer_that_the_other_thread_has_read_ends_the_wait(
    directory: Path, caller: Handles, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = Rank(directory, 0, "counter")
    run = RankActor(caller, address_of(directory, 0)).add.submit()
    wait_until(lambda: zero.arrived)
    poll = caller.poll

    def sleep(*args: Any) -> Any:
        """Begin to sleep after the other thread has read the answer."""
        zero.answer([Parcel(Done(zero.arrived[0].verb.run))])
        wait_until(run.done)
        return poll(*args)

    monkeypatch.setattr(caller, "poll", sleep)
    (_, _, future) = run._calls[0]
    with caller.wait_for(run):
        began = time.monotonic()
        caller.await_answer(future, WAIT_S)
        assert time.monotonic() - began < WAIT_S / 2


def test_small_questions_pass_large_arguments(apart: tuple[Rank, Rank], tmp_path: Path) -> None:
    near, far = apart
    address, there = far_address(tmp_path), Held(near)
    RankActor(near.handles, address).add.submit(LARGE)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(near.handles.dims_of, address, 0)
        there.pass_on_until(found.done)
        assert found.result() == {}
    assert not far.arrived
