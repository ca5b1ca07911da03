"""Actors on real ranks: made, called in every way, redefined, dropped."""

from __future__ import annotations

import asyncio
import functools
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RankFailure
from tests.faults.watching import wait_until
from tests.mesh.conftest import Recorder

WAIT_S = 60.0


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args: function(*args))


class Counter:
    """What the tests call."""

    def __init__(self, start: int = 0) -> None:
        self.count, self.log = start, list[str]()

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    def fail(self) -> None:
        raise ValueError("no")

    def show(self) -> None:
        print("count", self.count)

    def rows(self, x: torch.Tensor, *, scale: int = 1) -> dict[str, Any]:
        return {"x": x * scale, "num": len(x)}

    def values(self, num: int) -> Any:
        try:
            for number in range(num):
                self.log.append(f"made {number}")
                yield number
        finally:
            self.log.append("closed")

    async def wait(self, name: str) -> str:
        import asyncio

        self.events = vars(self).get("events", {})
        await self.events.setdefault(name, asyncio.Event()).wait()
        return name

    def let_go(self, name: str) -> None:
        self.events[name].set()

    async def ticks(self, num: int) -> Any:
        try:
            for number in range(num):
                yield number
            await self.wait("never")
        finally:
            self.log.append("closed")

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    @wrapped
    async def echo(self, name: str) -> str:
        return await self.wait(name)

    @wrapped
    async def pings(self) -> Any:
        yield 1
        await self.wait("never")

    add_ten = functools.partialmethod(add, 10)

    @classmethod
    def title(cls) -> str:
        return cls.__name__

    _private = add
    kind = "a counter"


@pytest.fixture
def counter(mesh: cm.Mesh) -> Any:
    yield mesh.spawn(Counter)
    for actor in mesh.actors.values():
        mesh.drop(actor)


def test_methods_are_called_on_the_ranks_of_the_handle(mesh: cm.Mesh, counter: Any) -> None:
    assert counter.add() == dict.fromkeys(range(4), 1)
    assert counter[1].add(2) == 3
    assert counter[2:].add() == {2: 2, 3: 2}
    assert counter[[0, 3]].add.submit().result(WAIT_S) == {0: 2, 3: 3}
    counter.add.send(10)
    mesh.cell("counter.add(100)")
    assert counter.add(0).list == [112, 113, 112, 113]
    assert counter.twice(2).list == [4] * 4
    assert mesh.pull("counter.count", reduce="sum") == 450
    assert len(counter[1:]) == 3
    assert [len(each) for each in counter] == [1] * 4
    with pytest.raises(IndexError, match="counter is on 4 ranks"):
        counter[4]


def test_names_of_ranks_are_found_when_a_method_is_called(mesh: cm.Mesh) -> None:
    class Reader:
        def __init__(self) -> None:
            self.first = of_rank  # type: ignore[name-defined]  # noqa: F821

        def read(self) -> Any:
            return self.first, of_rank  # type: ignore[name-defined]  # noqa: F821

    mesh.cell("of_rank = 1")
    reader: Any = mesh.spawn(Reader)
    mesh.cell("of_rank = 7")
    assert reader.read().list == [(1, 7)] * 4
    mesh.drop(reader)


def test_any_takes_the_living_rank_with_the_fewest_calls(counter: Any) -> None:
    runs = [counter.wait.any("some") for _ in range(6)]
    assert [run.ranks for run in runs] == [(0,), (1,), (2,), (3,), (0,), (1,)]
    counter.let_go("some")
    assert [run.result(WAIT_S) for run in runs] == ["some"] * 6
    assert counter[2:].add.any().ranks == (2,)


def test_sharded_splits_rows_and_joins_results(counter: Any) -> None:
    x = torch.arange(10.0)
    found = counter.rows.sharded(x, scale=3).result(WAIT_S)
    assert torch.equal(found["x"], 3 * x)
    assert found["num"] == [3, 3, 2, 2]
    found = counter.rows.sharded(x, dim="tp").result(WAIT_S)
    assert torch.equal(found["x"], x)
    assert found["num"] == [5, 5]
    assert counter[0:2].rows.sharded(x, dim="dp").result(WAIT_S)["num"] == [10]
    with pytest.raises(MeshUsageError, match="the mesh has no dim 'pp'"):
        counter.rows.sharded(x, dim="pp")
    with pytest.raises(MeshUsageError, match=r"choose fewer ranks, as in counter\[:3\]"):
        counter.rows.sharded(x[:3])


def test_a_dtensor_stays_on_its_ranks_and_is_refused_by_name(mesh: cm.Mesh) -> None:
    class Holder:
        whole: Any

        def parts(self) -> dict[str, Any]:
            return {"parts": [self.whole]}

        async def wait(self) -> Any:
            import asyncio

            await asyncio.sleep(0)
            return self.whole

        def values(self) -> Any:
            yield self.whole

    holder: Any = mesh.spawn(Holder)
    mesh.cell(
        "import torch.distributed.tensor as dt\n"
        "holder.whole = dt.DTensor.from_local(torch.ones(2), mesh, [dt.Replicate()] * 2)"
    )
    for act, place in (
        (holder.parts, r"\(the result\['parts'\]\[0\]\)"),
        (lambda: holder.wait.submit().result(WAIT_S), "of it$"),
        (lambda: next(holder.values.stream()), r"the result\[0\]"),
    ):
        with pytest.raises(RankFailure, match=f"a DTensor cannot leave .*{place}") as caught:
            act()
        assert len(caught.value.exceptions) == 4
    mesh.drop(holder)


def test_a_stream_gives_values_in_order_and_is_closed(mesh: cm.Mesh, counter: Any) -> None:
    assert [*counter[0].values.stream(3)] == [0, 1, 2]
    assert [each.list for each in counter.values.stream(2)] == [[0] * 4, [1] * 4]
    mesh.cell("counter.log.clear()")
    for value in counter[1].values.stream(100, ahead=2):
        if value == 2:
            break
    counter.add()
    made = [f"made {number}" for number in range(5)]
    assert mesh[1].pull("counter.log") in ([*made[:4], "closed"], [*made, "closed"])
    with pytest.raises(RankFailure, match="twice returns a int and yields no values"):
        next(counter.twice.stream(1))
    with pytest.raises(MeshUsageError, match="at least 1 value ahead"):
        counter.values.stream(1, ahead=0)


def test_a_stream_of_an_async_generator_is_closed_as_it_waits(mesh: cm.Mesh, counter: Any) -> None:
    async def read() -> list[int]:
        found, stream = [], counter[3].ticks.stream(2, ahead=3)
        async for value in stream:
            found.append(value)
            if value == 1:
                break
        stream.close()
        return found

    assert asyncio.run(read()) == [0, 1]
    mesh[3].cell("import asyncio\nwhile 'closed' not in counter.log: await asyncio.sleep(0)")


def test_methods_may_be_decorated_and_partial(mesh: cm.Mesh, counter: Any) -> None:
    run, stream = counter.echo.submit("soon"), counter.pings.stream()
    assert next(stream).list == [1] * 4
    assert counter.add_ten().list == [10] * 4
    assert counter.title().list == ["Counter"] * 4
    counter.let_go("soon")
    assert run.result(WAIT_S).list == ["soon"] * 4
    made: Any = mesh.spawn(dict, name="made", a=1)
    assert made.get("a").list == [1] * 4
    assert repr(made.update) == "<method made.update(...)>"


def test_a_stream_is_closed_though_its_actor_was_dropped(mesh: cm.Mesh, counter: Any) -> None:
    stream = counter.values.stream(100, ahead=1)
    assert next(stream).list == [0] * 4
    mesh.cell("log = counter.log")
    mesh.drop(counter)
    with pytest.raises(MeshUsageError, match="counter was dropped"):
        next(stream)
    mesh.pull("log")  # the stream's end is sent by another thread, before this ends
    while {each[-1] for each in mesh.pull("log").list} != {"closed"}:
        pass  # the link's thread sends the close, perhaps after the first pull


def test_a_method_that_a_class_lacks_is_refused(counter: Any) -> None:
    for name, match in (
        ("ad", r"Counter has no method: 'ad' .*; did you mean 'add'\?"),
        ("_private", "is private"),
        ("kind", r"no method of that name, but a str.*mesh.pull\('counter.kind'\)"),
        ("count", r"mesh.pull\('counter.count'\)"),
    ):
        with pytest.raises(AttributeError, match=match):
            getattr(counter, name)
    assert not hasattr(counter, "__len_hint__")
    assert "add" in dir(counter)
    assert "ranks" not in dir(counter)
    public = {name for name in dir(counter.add) if not name.startswith("_")}
    assert public == {"any", "send", "sharded", "stream", "submit"}
    assert repr(counter.add) == "<method counter.add(number: 'int' = 1) -> 'int'>"


def test_a_failure_is_raised_once_and_of_a_send_shown(
    mesh: cm.Mesh, counter: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailure, match="ranks 0-3 raised ValueError: no"):
        counter.fail()
    capsys.readouterr()  # it is shown, too
    counter.fail.send()
    assert counter.add().list == [1] * 4
    shown: list[str] = []
    wait_until(
        lambda: shown.append(capsys.readouterr().err) or "ValueError: no\n" in "".join(shown)
    )
    assert "".join(shown).count("ValueError: no\n") == 1
    assert "[0-3] " in "".join(shown)


def test_a_constructor_that_raises_somewhere_leaves_nothing(mesh: cm.Mesh) -> None:
    class Picky:
        def __init__(self) -> None:
            import os

            if os.environ["RANK"] == "2":
                raise RuntimeError("not here")

    with pytest.raises(RankFailure, match="rank 2 raised RuntimeError: not here"):
        mesh.spawn(Picky)
    assert mesh.pull("'picky' in globals()").list == [False] * 4
    assert mesh.actors == {}


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("taken", r"'taken' is a variable of rank 0 already \(int\), and is kept"),
        ("rank", "'rank' is a variable of rank 0"),
        ("mesh", "the DeviceMesh"),
        ("list", "a name of Python"),
        ("lambda", "is a variable of the ranks"),
        (3, "name=3: an actor's name"),
        ("_x", "is a variable of the ranks"),
        ("counter", "'counter' is an actor already, a .*Counter on ranks 0-3"),
    ],
)
def test_a_name_that_is_taken_is_refused(
    mesh: cm.Mesh, counter: Any, name: str, match: str
) -> None:
    class Other:
        pass

    mesh.cell("taken = 1")
    with pytest.raises(MeshUsageError, match=match):
        mesh.spawn(Other, name=name)
    assert mesh.pull("taken").list == [1] * 4


def test_a_spawn_again_replaces_the_actor(mesh: cm.Mesh, counter: Any) -> None:
    counter.add()
    again = mesh[:2].spawn(Counter, 5)
    assert again.add() == {0: 6, 1: 6}
    assert mesh.pull("'counter' in globals()").list == [True, True, False, False]
    with pytest.raises(MeshUsageError, match=r"counter was dropped: mesh.spawn makes it again"):
        counter.add()


def test_a_spawn_that_is_refused_leaves_the_former_actor(mesh: cm.Mesh, counter: Any) -> None:
    with pytest.raises(MeshUsageError, match=r"argument 0 of counter.__init__"):
        mesh.spawn(Counter, (i for i in range(3)))
    mesh[1].cell("counter = counter.__class__()")
    with pytest.raises(MeshUsageError, match=r"'counter' is a variable of rank 1 already"):
        mesh.spawn(Counter, 5)
    assert counter.add().list == [1] * 4
    mesh[1].cell("del counter")


def test_redefine_keeps_the_state(mesh: cm.Mesh, counter: Any) -> None:
    class Better(Counter):
        def add(self, number: int = 1) -> int:
            self.count += 10 * number
            return self.count

        def much(self) -> int:
            return 1000

        def is_locked(self) -> Any:
            return lock.locked()  # type: ignore[name-defined]  # noqa: F821

    class Number(int):
        pass

    counter.add()
    mesh.cell("import threading; lock = threading.Lock()")  # which cannot be pickled
    mesh.redefine(counter, Better)
    mesh.cell("assert not counter.is_locked()")
    mesh.redefine(counter, Better)
    assert counter.add(1).list == [11] * 4
    assert counter[0].much() == 1000
    with pytest.raises(RankFailure, match="object layout differs"):
        mesh.redefine(counter, Number)
    assert counter[0].add(1) == 21


def test_a_handle_ends_with_its_actor(mesh: cm.Mesh, counter: Any) -> None:
    mesh.cell("counter = 'of a cell'")
    mesh.drop(counter)
    assert mesh.pull("counter").list == ["of a cell"] * 4
    for act in (counter.add, lambda: mesh.drop(counter), lambda: mesh.redefine(counter, Counter)):
        with pytest.raises(MeshUsageError, match="counter was dropped"):
            act()
    with pytest.raises(MeshUsageError, match="3 is no actor"):
        mesh.drop(3)  # type: ignore[arg-type]
    mesh.cell("del counter")


def test_what_cannot_be_an_actor_is_refused(mesh: cm.Mesh) -> None:
    with pytest.raises(MeshUsageError, match=r"is no class: mesh.spawn"):
        mesh.spawn(Counter())  # type: ignore[arg-type]

    class Locked:
        lock = threading.Lock()

    with pytest.raises(MeshUsageError, match=r"Locked' cannot be pickled: .*Locked\.lock is"):
        mesh.spawn(Locked)


def test_output_of_a_method_is_that_of_its_call(mesh: cm.Mesh, counter: Any) -> None:
    sink = Recorder()
    counter._spawned.start("call", ("show",), counter._rank_set, sink=sink).result()
    assert [getattr(block.item, "text", "") for block in sink.blocks] == ["count 0"]


OF_A_NOTEBOOK = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Sharding:
    def __init__(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        self.model = fully_shard(model, mesh=mesh["dp"])
        self.opt = torch.optim.SGD(self.model.parameters(), 0.1)

    def step(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.opt.step()
        return loss.item()

    def names(self):
        return mesh.mesh_dim_names, whole is mesh

def names(given):
    return mesh.mesh_dim_names, whole is mesh, given is mesh

def is_whole(given):
    return whole is given
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch, mesh: cm.Mesh) -> dict[str, Any]:
    """The namespace of a notebook with two variables that are the mesh."""
    module = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    vars(module).update(mesh=mesh, whole=mesh)
    exec(OF_A_NOTEBOOK, vars(module))
    return vars(module)


def test_the_mesh_is_the_device_mesh_in_code_that_is_sent(
    mesh: cm.Mesh, notebook: dict[str, Any]
) -> None:
    sharding: Any = mesh.spawn(notebook["Sharding"])
    losses = [sharding.step(torch.ones(4, 8)).list for _ in range(2)]
    assert len({*losses[0]}) == 1
    assert losses[1][0] < losses[0][0]
    assert mesh.run(notebook["names"], mesh).list == [(("dp", "tp"), True, True)] * 4
    mesh.reshape("x=4")
    assert sharding.names().list == [(("x",), True)] * 4
    assert mesh.run(notebook["names"], mesh).list == [(("x",), True, True)] * 4
    mesh.reshape("dp=2,tp=2")
    mesh.drop(sharding)


def test_the_name_mesh_in_code_for_another_mesh_is_the_ranks_own(
    mesh: cm.Mesh, notebook: dict[str, Any]
) -> None:
    other = cm.start(1, name="other", group=False)
    with other:
        notebook["mesh"] = other  # the mesh in use
        sharding: Any = mesh.spawn(notebook["Sharding"])
        assert sharding.names().list == [(("dp", "tp"), True)] * 4
        mesh.drop(sharding)
        assert mesh.run(notebook["names"], mesh).list == [(("dp", "tp"), True, True)] * 4
        for in_use, why in ((other, "no process group"), (mesh, "another mesh than other")):
            notebook["mesh"] = in_use
            with pytest.raises(RankFailure, match=f"mesh {in_use.name} .*{why}"):
                other.run(notebook["names"], 1)
            assert other.run(notebook["is_whole"], 1).list == [False]
        assert pickle.loads(pickle.dumps(mesh)) is mesh
    notebook["mesh"] = mesh[:2]
    with pytest.raises(MeshUsageError, match=r"`mesh` is the DeviceMesh \(names -> global mesh\)"):
        mesh.run(notebook["names"], 1)
