"""Streams and shares of a rank's calls, between `Handles` in this process, over real sockets."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from cellmesh.errors import MeshUsageError, RankFailure
from cellmesh.wire import payload
from cellmesh.wire.codec import Parcel
from cellmesh.wire.handles import Address, mark_of
from cellmesh.wire.hosts import HostPart
from cellmesh.wire.messages import Done, Failed
from cellmesh.wire.peer_calls import Routed
from cellmesh.wire.ticket import write_ticket
from cellmesh.workers.rank.actors import Actors
from cellmesh.workers.rank.handles import Handles
from cellmesh.workers.rank.relayed import hear
from cellmesh.workers.rank.remote_actors import RankActor

from ....support.tickets import make_ticket
from .test_handles import WAIT_S, Rank, address_of, wait_until


class Counter:
    """What is called."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def values(self, num: int) -> Iterator[int]:
        try:
            for number in range(num):
                self.log.append(number)
                yield number
        finally:
            self.log.append("closed")

    def rows(self, x: torch.Tensor, *, scale: int = 1) -> dict[str, Any]:
        self.log.append(len(x))
        if len(x) == 2:
            raise KeyError("two rows")
        return {"x": scale * x, "num": len(x), "num_bytes": x.untyped_storage().nbytes()}


class Serving(Rank):
    """A rank with an actor, which executes the calls of others on a thread of its own."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(directory, rank)
        self.groups: Any = SimpleNamespace(
            rank=rank, mesh=SimpleNamespace(mesh_dim_names=("dp", "tp"), shape=(2, 2)),
            ledger=SimpleNamespace(touched=False),
        )  # fmt: skip
        vars(self)["actors"] = Actors({}, rank)
        self.actors.make("counter", "", Counter)
        self.work = threading.Semaphore(0)
        self.tasks.add = self._add
        self.handles.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def log(self) -> list[Any]:
        return self.actors.get("counter").log  # type: ignore[no-any-return]

    def _add(self, parcel: Parcel[Any]) -> None:
        self.arrived.append(parcel)
        self.work.release()

    def _serve(self) -> None:
        while True:
            self.work.acquire()
            verb, buffers = self.arrived.pop(0)
            target, args, kwargs = payload.loads(verb.payload, buffers)
            self.interrupts.running = verb.run
            try:
                value = self.handles.serve(*target, *args, **kwargs)
            except Exception as error:
                pickled, buffers = payload.dumps(error, "it")
                shown = "Traceback\n\x1b[31mits frames\x1b[0m"
                failed = Failed(verb.run, type(error).__name__, str(error), shown, 0, pickled)
                answer = Parcel[Any](failed, tuple(buffers))
            else:
                pickled, buffers = payload.dumps(value, "it")
                answer = Parcel(Done(verb.run, pickled), tuple(buffers))
            self.interrupts.running = -1
            self.answer([answer])


@pytest.fixture
def ranks(directory: Path) -> list[Serving]:
    """Two ranks with an actor."""
    return [Serving(directory, rank) for rank in range(2)]


@pytest.fixture
def caller(directory: Path) -> Handles:
    """A rank that calls them."""
    return Rank(directory, 3).handles


@pytest.fixture
def actor(directory: Path, caller: Handles, ranks: list[Serving]) -> Any:
    """Its handle of the actor."""
    return RankActor(caller, address_of(directory, 0, 1))


def test_a_rank_reads_a_stream_and_leaves_it(actor: Any, ranks: list[Serving]) -> None:
    assert [*actor[0].values.stream(3)] == [0, 1, 2]
    assert [each.list for each in actor.values.stream(2, ahead=5)] == [[0, 0], [1, 1]]
    wait_until(lambda: not any(rank.actors.streams for rank in ranks))
    ranks[0].log.clear()
    for value in actor[0].values.stream(100, ahead=2):
        if value == 1:
            break
    wait_until(lambda: "closed" in ranks[0].log)
    assert ranks[0].log == [0, 1, 2, 3, "closed"]
    with pytest.raises(MeshUsageError, match=r"counter\.rows returns a dict and yields no values"):
        next(actor[0].rows.stream(torch.ones(1)))
    with pytest.raises(MeshUsageError, match="at least 1 value ahead"):
        actor.values.stream(1, ahead=0)


def test_a_stream_is_closed_with_its_reader(
    actor: Any, caller: Handles, ranks: list[Serving]
) -> None:
    stream = actor.values.stream(100, ahead=1)
    assert next(stream).list == [0, 0]
    wait_until(lambda: [rank.log for rank in ranks] == [[0, 1]] * 2)
    for connection in caller._outgoing.values():
        connection.close()
    wait_until(lambda: [rank.log for rank in ranks] == [[0, 1, "closed"]] * 2)
    assert [rank.actors.streams for rank in ranks] == [{}, {}]


def test_a_stream_between_hosts_is_closed_with_its_reader(tmp_path: Path) -> None:
    made: dict[str, Any] = {}
    for name, kind in (("near", Rank), ("far", Serving)):
        (directory := tmp_path / name).mkdir(0o700)
        host = HostPart(0, 2, name, 0, 1, "")
        write_ticket(make_ticket(name=name, key=name, directory=str(directory), host=host))
        made[name] = kind(directory, 0)

    def carry(to: str, by: str, parcel: Parcel[Any]) -> None:
        hear(made[to], msgspec.structs.replace(parcel.verb, mark=mark_of(by)), parcel.buffers)

    near, far = made["near"], made["far"]
    near.post = functools.partial(carry, "far", "near")
    far.post = functools.partial(carry, "near", "far")
    there = Address(mark_of("far"), "far", str(tmp_path / "far"), "counter", "Counter", (0,))
    actor = RankActor(near.handles, there)
    assert [*actor.values.stream(2)] == [0, 1]
    wait_until(lambda: not far.actors.streams)
    far.log.clear()
    stream = actor.values.stream(9, ahead=1)
    assert next(stream) == 0
    wait_until(lambda: far.log == [0, 1])
    hear(far, Routed(mark_of("near"), 0, why_lost="of near was killed"), ())
    wait_until(lambda: far.log == [0, 1, "closed"])
    stream.close()


def test_rows_are_shared_among_ranks_and_results_joined(actor: Any, ranks: list[Serving]) -> None:
    x = torch.arange(7.0)
    found = actor.rows.sharded(x, scale=3).result(WAIT_S)
    assert torch.equal(found["x"], 3 * x)
    assert found["num"] == [4, 3]
    assert found["num_bytes"] == [16, 12]  # not those of all rows, as pickle would send
    assert actor.rows.sharded(x, scale=2, dim="tp").result(WAIT_S)["num"] == [4, 3]
    found = actor.rows.sharded(x, dim="dp").result(WAIT_S)  # these two ranks are alike in it
    assert torch.equal(found["x"], x)
    assert found["num"] == [7]
    assert [rank.log[-1] for rank in ranks] == [7, 7]


def test_rows_that_cannot_be_shared_are_refused_and_failing_ranks_named(actor: Any) -> None:
    for rows, dim, text in (
        (torch.ones(1), "", r"cannot split 1 rows into 2 parts.* as in counter\[:1\]"),
        (3, "", "has no tensors to split"),
        (torch.ones(4), "pp", "the mesh has no dim 'pp': its dims are dp=2, tp=2"),
    ):
        with pytest.raises(MeshUsageError, match=text):
            actor.rows.sharded(rows, dim=dim)
    with pytest.raises(RankFailure, match=r"counter\.rows failed on rank 1: 'two rows'"):
        actor.rows.sharded(torch.ones(5)).result(WAIT_S)


def test_an_exception_of_a_send_is_printed_once_with_its_actor(
    actor: Any, ranks: list[Serving], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return shown.count("its frames") == 2

    assert actor.rows.send(torch.ones(2)) is None
    wait_until(is_shown)
    assert actor.rows(torch.ones(1), scale=2)[0]["num"] == 1
    assert is_shown()
    parts = [
        f"counter.rows on left {rank}: KeyError: 'two rows'\n"
        f"raised by counter.rows on left {rank}:\nTraceback\nits frames\n"
        for rank in range(2)
    ]
    assert shown in ("".join(parts), "".join(reversed(parts)))
