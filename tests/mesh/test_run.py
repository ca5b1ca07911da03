"""Calls and values: results, errors, what travels and what does not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError, UnpicklableError

from .conftest import Recorder


def test_run_returns_each_ranks_value(mesh: cm.Mesh) -> None:
    results = mesh.run(lambda a, b=0: (a, b), 1, b=2)
    assert dict(results) == dict.fromkeys(range(4), (1, 2))
    assert mesh[3].run(lambda: "one") == "one"


def test_names_a_function_does_not_bring_are_the_ranks_own(mesh: cm.Mesh) -> None:
    mesh.cell("weights = [10, 20, 30, 40]")
    assert mesh.run(lambda: weights[rank] + world_size).list == [14, 24, 34, 44]  # type: ignore[name-defined]  # noqa: F821


def test_calls_of_one_function_share_its_code_and_no_globals(mesh: cm.Mesh) -> None:
    def count(step: int) -> tuple[int, int]:
        global seen
        seen = globals().get("seen", 0) + step
        codes = vars(__import__("sys")).setdefault("codes_of_count", set())
        codes.add(__import__("sys")._getframe().f_code)
        return seen, len({id(code) for code in codes})

    count.__module__ = "__main__"
    for _ in range(3):
        assert mesh.run(count, 1).list == [(1, 1)] * 4


def test_a_future_statement_holds_for_later_cells(mesh: cm.Mesh) -> None:
    for later in ("", "from __future__ import annotations"):
        mesh.cell(later)
        mesh.cell("def f(x: int): ...")
        assert mesh[0].pull("f.__annotations__['x']") == ("int" if later else int)
    mesh.cell("get_ipython().compile.reset_compiler_flags()")
    mesh.cell("def f(x: int): ...")
    assert mesh[0].pull("f.__annotations__") == {"x": int}


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


def test_a_dtensor_or_a_wrapped_model_is_refused_with_what_to_pull_instead(mesh: cm.Mesh) -> None:
    mesh.cell(
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "d = distribute_tensor(torch.arange(8.), mesh['dp'], [Shard(0)])"
    )
    with pytest.raises(cm.RankFailure) as caught:
        mesh.pull("d")
    assert "full_tensor" in str(caught.value.exceptions_by_rank[0])
    assert mesh[0].pull("d.to_local()").tolist() == [0, 1, 2, 3]
    mesh.cell("m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    with pytest.raises(cm.RankFailure) as caught:
        mesh.pull("m")
    assert "`model.module`" in str(caught.value.exceptions_by_rank[0])


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


def test_runs_are_done_in_the_order_sent(mesh: cm.Mesh) -> None:
    mesh.cell("order = []")
    runs = [mesh.submit(lambda i=i: order.append(i)) for i in range(200)]  # type: ignore[name-defined]  # noqa: F821
    for run in runs:
        run.result(timeout_s=30)
    assert mesh[0].pull("order == list(range(200))")


def test_pull_takes_expressions_and_refuses_other_text(mesh: cm.Mesh) -> None:
    assert mesh.pull("  rank + 1 ").list == [1, 2, 3, 4]
    with pytest.raises(MeshUsageError, match="no expression"):
        mesh.pull("x = 1")
    with pytest.raises(cm.RankFailure, match="NameError"):
        mesh.pull("no_such_name")


def test_a_cell_that_binds_a_given_name_to_something_else_says_so_once(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    for _ in range(2):
        mesh.submit_cell("for rank in range(4): pass", sink=recorder).result(timeout_s=60)
    text = "`rank` now has another value than this rank was given: `rank = dist.get_rank()` "
    assert recorder.lines() == [((0, 1, 2), f"{text}restores it")]
    mesh.cell("rank = dist.get_rank()")


def test_ranks_find_the_package_and_not_its_inside(mesh: cm.Mesh) -> None:
    """Else a cell's ``import errors`` would find ours."""
    package = Path(cm.__file__).parent
    (paths,) = mesh[0:1].run(lambda: __import__("sys").path).list
    assert str(package.parent) in paths
    assert str(package) not in paths
