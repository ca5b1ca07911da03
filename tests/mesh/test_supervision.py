"""Ranks with actors die: pending calls fail, and actors are made again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cellmesh as cm
from cellmesh.controller.run import Run
from cellmesh.errors import MeshUsageError, NoMeshError, RankDied, RankFailure
from tests.conftest import clean_runtime_dir
from tests.faults.watching import wait_until

WAIT_S = 60.0


@pytest.fixture(scope="module")
def trio() -> Iterator[cm.Mesh]:
    with clean_runtime_dir(), cm.start(3, settle_s=0.1, lease_s=600) as started:
        yield started


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test finds the shared mesh whole and without actors."""
    yield
    mesh = request.getfixturevalue("trio")
    if mesh.alive:
        for actor in mesh.actors.values():
            mesh.drop(actor)
        mesh.heal()


class Model:
    """What the tests call."""

    checkpoint_every = 2

    def __init__(self, start: int = 0) -> None:
        self.weight, self.count, self.log = torch.zeros(3), start, list[str]()

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    def values(self) -> Any:
        try:
            while True:
                yield self.count
        finally:
            self.log.append("closed")

    async def wait(self) -> int:
        import asyncio

        self.event = asyncio.Event()
        await self.event.wait()
        return self.count

    def let_go(self) -> None:
        self.event.set()

    def hang(self) -> None:
        while True:
            pass

    def learn(self, value: float) -> None:
        self.weight += value

    def total(self) -> float:
        import torch.distributed as dist

        total = self.weight.sum()
        dist.all_reduce(total)
        return total.item()

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "log": [], "weight": self.weight}


class Fragile:
    """Its constructor does what a variable of the rank says."""

    def __init__(self) -> None:
        import __main__

        if not hasattr(__main__, "mood"):
            raise ValueError("no mood")

    def name(self) -> str:
        return "fragile"


class Deadly:
    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            os.kill(os.getpid(), signal.SIGKILL)


class Sharing:
    """Its constructor needs all ranks."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def kill(mesh: cm.Mesh, *ranks: int) -> None:
    pids = mesh.run(os.getpid)
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: mesh.rank_set.session.dead_ranks >= {*ranks})


def is_whole(mesh: cm.Mesh, actor: Any) -> bool:
    return not (actor._spawned.lost or mesh.rank_set.session.dead_ranks)


def shown(capsys: pytest.CaptureFixture[str], part: str) -> str:
    """Wait until a remark with this text is shown, and return all of them."""
    text = ""

    def is_there() -> bool:
        nonlocal text
        text += capsys.readouterr().err
        return part in text

    wait_until(is_there)
    return text


def death_of(run: Run[Any]) -> None:
    with pytest.raises(RankFailure) as caught:
        run.result(WAIT_S)
    assert isinstance(caught.value.exceptions_by_rank[1], RankDied)


def test_calls_on_a_dead_rank_fail_and_those_on_others_go_on(trio: cm.Mesh) -> None:
    model: Any = trio.spawn(Model)
    stream, whole = model[1].values.stream(ahead=1), model.values.stream(ahead=1)
    assert (next(stream), next(whole)) == (0, {0: 0, 1: 0, 2: 0})
    waits = [model.wait.any() for _ in range(3)]
    queued = [model[1].hang.submit(), model[1].add.submit()]
    beside = model[[0, 2]].add.submit(5)
    model[1].add.send()
    assert beside.result(WAIT_S) == {0: 5, 2: 5}
    os.kill(trio.report()[1].pid, signal.SIGKILL)
    for run in (*queued, waits[1]):
        death_of(run)
    assert [run.done() for run in waits] == [False, True, False]
    for each in (stream, whole):
        with pytest.raises((RankDied, RankFailure), match="rank 1 was killed by SIGKILL"):
            list(each)
    with pytest.raises(RankDied, match="so nothing can run on rank 1"):
        model.add()
    assert model._spawned.lost == {1}
    assert {model.add.any().ranks[0] for _ in range(3)} == {0, 2}
    model[[0, 2]].let_go()
    assert [waits[rank].result(WAIT_S) >= 5 for rank in (0, 2)] == [True, True]
    assert trio[[0, 2]].pull("model.log").list == [["closed"]] * 2
    trio[[0, 2]].cell("beside = 1")
    assert trio.heal(source=0).copied_to == (1,)
    assert trio[1].pull("(beside, 'model' in globals())") == (1, False)
    with pytest.raises(MeshUsageError, match="rank 1 was replaced and has no `model`"):
        model.add()
    assert {model.add.any().ranks[0] for _ in range(3)} == {0, 2}
    assert trio.spawn(Model).add().list == [1] * 3


def test_an_actor_is_made_again_and_given_weights(
    trio: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def copy(actor: Any, ranks: tuple[int, ...]) -> None:
        (called,) = trio.rank_set.session.supervisor._called.values()
        calls.append((repr(actor), ranks, actor[1].add(0), called.rpartition(".")[2]))
        trio[0].copy("model.weight", to=trio[[*ranks]], into="model.weight").result(WAIT_S)

    first: Any = trio.spawn(Model, 10, name="first", on_death="restart")
    model: Any = trio.spawn(Model, 20, on_death=copy)
    model.learn(2.0)
    waits = model.wait.submit()
    for _ in range(3):
        first[1].add()
    kill(trio, 1)
    with pytest.raises(RankDied, match="`model` is being made again there"):
        model.add()
    assert model.add.any(0).ranks == (0,)
    wait_until(lambda: is_whole(trio, model))
    text = f"<actor model: Model on ranks 0-2 of {trio.name}>"
    assert calls == [(text, (1,), 20, "copy, the on_death of model")]
    assert trio.pull("model.weight.tolist()").list == [[2.0] * 3] * 3
    assert model.total().list == [18.0] * 3
    assert first.add(0) == {0: 10, 1: 12, 2: 10}
    text = shown(capsys, "and model made again there")
    assert text.index("replaced, and first made again there") < text.index("and model made again")
    assert "with its saved state" in text
    assert waits.waiting_ranks() == [0, 2]
    model[[0, 2]].let_go()


def test_ranks_that_die_together_are_one_restart_which_a_heal_by_hand_awaits(
    trio: cm.Mesh,
) -> None:
    model: Any = trio.spawn(Model, on_death="restart")
    other: Any = trio.spawn(Model, name="other")
    busy = model[0].hang.submit()  # so that no heal begins before both have died
    pids = [info.pid for info in trio.report()]
    for rank in (1, 2):
        os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: trio.rank_set.session.dead_ranks == {1, 2})
    busy.interrupt()
    assert busy.wait(WAIT_S)
    trio.heal()
    assert model.add() == {0: 1, 1: 1, 2: 1}
    assert len(model._spawned.restarted_at) == 1
    with pytest.raises(MeshUsageError, match="ranks 1-2 were replaced and have no `other`"):
        other.add()


def test_a_restart_that_fails_is_shown_and_ends_it(
    trio: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(actor: Any, ranks: tuple[int, ...]) -> None:
        raise RuntimeError("no weights")

    trio.cell("mood = 'good'")
    fragile: Any = trio.spawn(Fragile, on_death="restart")
    sharing: Any = trio.spawn(Sharing, on_death="restart")
    model: Any = trio.spawn(Model, on_death=fail)
    kill(trio, 1)
    text = shown(capsys, "RuntimeError: no weights")
    assert "fragile on rank 1 is lost" in text
    assert "rank 1 raised ValueError: no mood" in text
    assert "sharing on rank 1 is lost" in text
    assert "A constructor with collectives needs all ranks" in text
    assert "model on rank 1 is lost" in text
    for actor, method in ((fragile, "name"), (model, "add")):
        with pytest.raises(MeshUsageError, match="rank 1 was replaced and has no"):
            getattr(actor, method)()
    assert sharing._spawned.on_death == "fail"
    assert trio.pull("'model' in globals()").list == [True, False, True]
    assert fragile.name.any().result(WAIT_S) == "fragile"


def test_a_function_that_follows_a_death_may_end_its_mesh(trio: cm.Mesh) -> None:
    ended = threading.Event()

    def end(actor: Any, ranks: tuple[int, ...]) -> None:
        mesh.stop()
        ended.set()

    with cm.start(1, group=False, name="brief") as mesh:
        model = mesh.spawn(Model, on_death=end)
        kill(mesh, 0)
        assert ended.wait(WAIT_S)
        with pytest.raises(NoMeshError, match="the mesh brief is ended"):
            model.add()


def test_an_actor_is_made_again_three_times_within_a_minute(
    trio: cm.Mesh, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "deadly"
    deadly: Any = trio[1].spawn(Deadly, str(path), on_death="restart")
    path.touch()
    kill(trio, 1)
    shown(capsys, "deadly was made again 3 times within a minute, and is not now")
    assert len(deadly._spawned.restarted_at) == 3
    assert trio.rank_set.session.dead_ranks == {1}


def test_a_notebook_that_attaches_has_the_actors(trio: cm.Mesh) -> None:
    def give(actor: Any, ranks: tuple[int, ...]) -> None:
        trio[0].copy("model.weight", to=trio[[*ranks]]).result(WAIT_S)

    for name in ("first", "model", "dropped"):
        trio[0:2].spawn(Model, 3, name=name, on_death=give if name == "model" else "restart")
    trio.drop(trio.actors["dropped"])
    former: Any = trio.actors["model"]
    former.add()
    trio.detach()
    with pytest.raises(NoMeshError, match="lives on without this notebook"):
        former.add()
    with cm.attach(trio.name) as mesh:
        assert [*mesh.actors] == ["first", "model"]
        model: Any = mesh.actors["model"]
        assert model.add().list == [5, 5]
        assert repr(model) == f"<actor model: Model on ranks 0-1 of {mesh.name}>"
        mesh[0].cell("model.weight += 2")
        kill(mesh, 1)
        mesh.heal()
        assert model.add().list == [6, 6]
        assert mesh[1].pull("model.weight.tolist()") == [2.0] * 3
        mesh.resize(1)
        with pytest.raises(MeshUsageError, match="no rank 1 any more"):
            model.add()
        assert model.add.any().ranks == (0,)
        mesh.drop(model)
        first: Any = mesh.actors["first"]
        mesh.restart()
        with pytest.raises(MeshUsageError, match="first ended with the restart of its mesh"):
            first.add()
        assert not [*Path(mesh.rank_set.session.ticket.directory).glob("actor-*")]
