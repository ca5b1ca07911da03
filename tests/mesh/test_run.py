"""Calls and values: results, errors, what travels and what does not."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RemoteError, UnpicklableError

from .conftest import Recorder


def test_run_returns_each_ranks_value(mesh: cm.Mesh) -> None:
    results = mesh.run(lambda a, b=0: (a, b), 1, b=2)
    assert dict(results) == dict.fromkeys(range(4), (1, 2))
    assert mesh[3].run(lambda: "one") == "one"


def test_a_question_that_the_core_cannot_put_raises_and_is_not_waited_for(mesh: cm.Mesh) -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        mesh.rank_set.session.ask(lambda core, now: core.no_such_thing(), None)
    assert mesh[0].run(lambda: 1) == 1


def test_names_a_function_does_not_bring_are_the_ranks_own(mesh: cm.Mesh) -> None:
    mesh.cell("weights = [10, 20, 30, 40]")
    assert mesh.run(lambda: weights[rank] + world_size).list == [14, 24, 34, 44]  # type: ignore[name-defined]  # noqa: F821


def test_closures_classes_and_functions_travel(mesh: cm.Mesh) -> None:
    base = 5

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    def move(point: Point) -> Point:
        return Point(point.x + base)

    assert [point.x for point in mesh.run(move, Point(1)).list] == [6] * 4
    mesh.push(Point=Point, move=move, scale=lambda p: p.x * base)
    mesh.cell("value = scale(move(Point(rank)))")
    assert mesh.pull("value").list == [25, 30, 35, 40]


def test_arrays_and_tensors_travel_both_ways_and_can_be_written(mesh: cm.Mesh) -> None:
    array = np.arange(1_000_000, dtype=np.float64)
    tensor = torch.arange(300_000, dtype=torch.bfloat16).reshape(3, -1)
    small = np.arange(9_000, dtype=np.int64)
    mesh.push(array=array, tensor=tensor, small=small)
    mesh.cell("array += rank; tensor[0] = rank; small[0] = rank")
    for rank, value in mesh.pull("array").items():
        assert np.array_equal(value, np.arange(1_000_000) + rank)
        value[0] = 7
    assert [float(value[0, 0]) for value in mesh.pull("tensor").list] == [0, 1, 2, 3]
    assert mesh[2].pull("small")[0] == 2
    assert array[0] == 0


def test_parameters_with_graphs_travel(mesh: cm.Mesh) -> None:
    mesh.cell("layer = torch.nn.Linear(2, 2); loss = layer(torch.ones(2)).sum(); loss.backward()")
    assert mesh[0].pull("layer.weight.grad").shape == (2, 2)
    assert mesh[0].pull("loss").requires_grad
    assert isinstance(mesh[0].pull("layer"), torch.nn.Linear)


def test_a_dtensor_is_refused_with_what_to_pull_instead(mesh: cm.Mesh) -> None:
    mesh.cell(
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "d = distribute_tensor(torch.arange(8.), mesh['dp'], [Shard(0)])"
    )
    with pytest.raises(cm.RankFailure) as caught:
        mesh.pull("d")
    assert "full_tensor" in str(caught.value.exceptions_by_rank[0])
    assert mesh[0].pull("d.to_local()").tolist() == [0, 1, 2, 3]


def test_a_wrapped_model_is_refused_with_what_to_pull_instead(mesh: cm.Mesh) -> None:
    mesh.cell("wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))")
    with pytest.raises(cm.RankFailure) as caught:
        mesh.pull("wrapped")
    assert "pull the model in it (`model.module`)" in str(caught.value.exceptions_by_rank[0])
    assert isinstance(mesh[0].pull("wrapped.module"), torch.nn.Linear)


def test_an_unpicklable_argument_is_named_with_its_part(mesh: cm.Mesh) -> None:
    with pytest.raises(UnpicklableError, match=r"'bad'.*bad\['k'\]\[1\].*_thread.lock"):
        mesh.push(fine=1, bad={"k": [0, threading.Lock()]})
    assert mesh.pull("'fine' in globals()").list == [False] * 4
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match="closure variable lock"):
        mesh.run(lambda: lock)
    with pytest.raises(MeshUsageError, match="DeviceMesh"):
        mesh.push(m=mesh)
    with pytest.raises(MeshUsageError, match="argument 1 of"):
        mesh.run(max, 1, lock)
    with pytest.raises(MeshUsageError, match="argument key of"):
        mesh.run(max, 1, key=lock)


def test_an_unpicklable_result_is_named_on_its_rank(mesh: cm.Mesh) -> None:
    mesh.cell("import threading; held = {'inside': threading.Lock()}")
    with pytest.raises(cm.RankFailure, match="UnpicklableError") as caught:
        mesh[1].pull("held")
    assert "held['inside']" in str(caught.value.exceptions_by_rank[1])
    assert mesh.pull("rank").list == [0, 1, 2, 3]


def test_a_failure_carries_the_original_exceptions(mesh: cm.Mesh) -> None:
    def fail() -> str:
        if rank % 2:  # type: ignore[name-defined]  # noqa: F821
            raise KeyError(f"on {rank}")  # type: ignore[name-defined]  # noqa: F821
        return "fine"

    with pytest.raises(cm.RankFailure) as caught:
        mesh.run(fail)
    failure = caught.value
    assert {rank: type(exc) for rank, exc in failure.exceptions_by_rank.items()} == {
        1: KeyError,
        3: KeyError,
    }
    assert failure.exceptions_by_rank[3].args == ("on 3",)
    assert "KeyError" in failure.tracebacks[1]
    assert "ranks 0,2 finished" in str(failure)
    seen = []
    try:
        raise failure
    except* KeyError as group:
        seen = [exc.args[0] for exc in group.exceptions]
    assert seen == ["on 1", "on 3"]


def test_exceptions_that_do_not_travel_are_described(mesh: cm.Mesh) -> None:
    mesh.cell(
        "class Held(Exception):\n"
        "    def __init__(self, text):\n"
        "        super().__init__(text); self.lock = threading.Lock()\n"
        "class Picky(Exception):\n"
        "    def __init__(self, a, b):\n"
        "        super().__init__(f'{a} {b}')\n"
    )
    for source, name in (("raise Held('stuck')", "Held"), ("raise Picky(1, 2)", "Picky")):
        with pytest.raises(cm.RankFailure) as caught:
            mesh.cell(source)
        error = caught.value.exceptions_by_rank[2]
        assert isinstance(error, RemoteError)
        assert error.type_name == name
        assert error.why


def test_runs_are_done_in_the_order_sent(mesh: cm.Mesh) -> None:
    mesh.cell("order = []")
    runs = [mesh.submit(lambda i=i: order.append(i)) for i in range(200)]  # type: ignore[name-defined]  # noqa: F821
    for run in runs:
        run.result(timeout_s=30)
    assert mesh[0].pull("order == list(range(200))")


def test_a_run_is_iterated_as_ranks_finish(mesh: cm.Mesh) -> None:
    # Rank 0 waits on the store for what rank 3 sets last: it cannot finish first.
    def take_turns() -> int:
        import torch.distributed as dist

        store = dist.distributed_c10d._get_default_store()
        if rank == 0:  # type: ignore[name-defined]  # noqa: F821
            store.get("turn")
        return rank * 10  # type: ignore[name-defined,no-any-return]  # noqa: F821

    run = mesh.submit(take_turns)
    arrivals = iter(run)
    first = [next(arrivals) for _ in range(3)]
    assert sorted(first) == [(1, 10), (2, 20), (3, 30)]
    assert not run.done()
    mesh_store = "dist.distributed_c10d._get_default_store().set('turn', '1')"
    mesh[3].submit_cell(mesh_store).result(timeout_s=20)
    assert next(arrivals) == (0, 0)
    assert run.result(timeout_s=20)[0] == 0


def test_pull_takes_expressions_and_refuses_other_text(mesh: cm.Mesh) -> None:
    assert mesh.pull("  rank + 1 ").list == [1, 2, 3, 4]
    with pytest.raises(MeshUsageError, match="no expression"):
        mesh.pull("x = 1")
    with pytest.raises(cm.RankFailure, match="NameError"):
        mesh.pull("no_such_name")


def test_busy_ranks_can_be_inspected(mesh: cm.Mesh) -> None:
    mesh.cell("gate = threading.Event(); held = torch.ones(3)")
    run = mesh.submit_cell("gate.wait()")
    try:
        assert mesh.inspect("held")[1].mean == 1.0
        assert mesh.inspect("held").torn == (0, 1, 2, 3)
        assert "while a cell runs" in mesh.inspect("held.sum()").refusals[2].text
        states = mesh.states()
        assert set(states) == {0, 1, 2, 3}
        assert all(state.line == 1 and state.run == run.number for state in states.values())
    finally:
        run.interrupt()
        run.wait(20)


def test_the_handle_knows_the_dims_and_chooses_by_coordinates_only(mesh: cm.Mesh) -> None:
    assert mesh.dims == {"dp": 2, "tp": 2}
    with pytest.raises(MeshUsageError, match=r"mesh.at\(tp=0\)"):
        mesh["tp"]  # type: ignore[index]


def test_ranks_find_the_package_and_not_its_inside(mesh: cm.Mesh) -> None:
    """Else a cell's ``import errors`` would find ours."""
    package = Path(cm.__file__).parent
    (paths,) = mesh[0:1].run(lambda: __import__("sys").path).list
    assert str(package.parent) in paths
    assert str(package) not in paths


def test_a_cell_that_binds_a_given_name_to_something_else_says_so_once(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    def said(source: str) -> list[tuple[tuple[int, ...], str]]:
        recorder.blocks.clear()
        mesh.submit_cell(source, sink=recorder).result(timeout_s=60)
        return recorder.lines()

    text = "`rank` now has another value than this rank was given: `rank = dist.get_rank()` "
    assert said("for rank in range(4): pass") == [((0, 1, 2), f"{text}restores it")]
    assert said("for rank in range(4): pass") == []
    mesh.cell("rank = dist.get_rank()")
    assert said("device, world_size = 'cpu', 4") == []
    (said_of_mesh,) = said("kept, mesh = mesh, mesh['dp']")
    assert "`%dist_mesh dp=2 tp=2` restores it" in said_of_mesh[1]
    mesh.cell("mesh = kept")
    mesh.push(rank=9)
    assert said("pass") == []
    mesh.cell("rank = dist.get_rank()")


def test_a_given_name_is_watched_again_after_the_mesh_is_set(
    own_mesh: cm.Mesh, recorder: Recorder
) -> None:
    own_mesh.cell("mesh = 1")
    own_mesh.reshape("dp=2")
    assert own_mesh.pull("mesh.size()").list == [2, 2]
    own_mesh[0].submit_cell("import os; os._exit(1)").wait(30)
    own_mesh.heal()
    own_mesh.submit_cell("mesh = 2", sink=recorder).result(timeout_s=60)
    assert [ranks for ranks, text in recorder.lines() if "`mesh` now has" in text] == [(0, 1)]
