"""How many ranks a mesh gets, and where."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.core.effects import HealReport
from cellmesh.controller.options import MAX_RANKS
from cellmesh.controller.resizing import Resizing, describe_resize, plan_resize
from cellmesh.errors import MeshUsageError
from cellmesh.wire.hosts import Host

HERE = {"layout": (4,), "names": (), "dims": {"dp": 4}}
HOSTS = {"layout": (2, 2), "names": ("a", "b"), "dims": {"dp": 2, "tp": 2}}
C = Host("c", num_ranks=2)


def plan(num_ranks: Any = None, hosts: Any = (), mesh: Any = None, **now: Any) -> Resizing:
    return plan_resize(num_ranks, hosts, mesh, **now)


def test_mesh_on_one_host_grows_and_shrinks_along_its_only_dim() -> None:
    assert plan(6, **HERE) == Resizing((6,), (), {"dp": 6})
    assert plan(1, **HERE) == Resizing((1,), (), {"dp": 1})
    assert plan(mesh="a=2,b=4", **HERE) == Resizing((8,), (), {"a": 2, "b": 4})


@pytest.mark.parametrize(
    ("size", "mesh", "layout"),
    [(3, "dp=3", (2, 1)), (2, "dp=1,tp=2", (2,)), (1, "dp=1", (1,)), (6, "dp=3,tp=2", (2, 4))],
)
def test_highest_ranks_end_and_the_last_host_gets_more(
    size: int, mesh: str, layout: tuple[int, ...]
) -> None:
    assert plan(size, mesh=mesh, **HOSTS).layout == layout


@pytest.mark.parametrize("options", [(6, "c:2"), (None, "c:2"), (6, ["c"]), (6, "c")])
def test_hosts_join_with_the_ranks_that_are_new(options: tuple[Any, Any]) -> None:
    assert plan(*options, "dp=3,tp=2", **HOSTS) == Resizing((2, 2, 2), (C,), {"dp": 3, "tp": 2})


@pytest.mark.parametrize(
    ("options", "now", "message"),
    [
        ((0,), HERE, "must be 1 to"),
        ((MAX_RANKS + 1,), HERE, "must be 1 to"),
        ((True,), HERE, "whole number"),
        ((2.0,), HERE, "whole number"),
        ((), HERE, r"say how many.*dist_resize 8`"),
        ((4,), HERE, "has 4 ranks: `%dist_mesh`"),
        ((6, "c:2"), HERE, "on this machine alone"),
        ((6, (), "dp=2,tp=2"), HERE, "makes 4 ranks"),
        ((6,), HOSTS, r"--mesh dp=3,tp=2`"),
        ((5,), HOSTS, r"--mesh dp=5`"),
        ((6, "b:2", "dp=6"), HOSTS, "b has ranks of the mesh"),
        ((8, "c:2", "dp=8"), HOSTS, "c.*2|4"),
        ((3, "c:2", "dp=3"), HOSTS, "."),
    ],
)
def test_size_that_cannot_be_is_refused(
    options: tuple[Any, ...], now: dict[str, Any], message: str
) -> None:
    with pytest.raises(MeshUsageError, match=message):
        plan(*options, **now)


def test_what_was_done_is_said() -> None:
    report = HealReport(healed=True, took_s=0.52, notes=("bound: model",))
    grown = describe_resize(report, 4, {"dp": 3, "tp": 2})
    assert grown == (
        "6 ranks (dp=3, tp=2), 4 before: ranks 4-5 new and empty, process groups made in 0.5 s; "
        "the others hold what they held\nbound: model"
    )
    assert "rank 3 ended" in describe_resize(report, 4, {"dp": 3})
