"""Cells whose ranks can never meet in an operation end by themselves, and say why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted

BEGIN = "import torch, torch.distributed as dist\nx = torch.ones(4)\n"
CELLS = {
    "kinds": (
        "for _ in range(3): dist.all_reduce(x)\n"
        "dist.all_reduce(x) if rank % 2 else dist.all_gather([torch.ones(4) for _ in range(4)], x)",
        "operation is all_gather on ranks 0,2 and all_reduce on ranks 1,3",
    ),
    "roots": (
        "dist.broadcast(x, rank % 2)\ndist.all_reduce(x)",
        "operation, broadcast, has as its root rank 0 on ranks 0,2 and rank 1 on ranks 1,3",
    ),
    "left out": (
        "if rank != 3: dist.all_reduce(x)\ndist.all_reduce(x, group=mesh.get_group('tp'))",
        "on the default group (all_reduce), which rank 3 has not begun; rank 3 waits in the 1st "
        "operation on tp (all_reduce), which rank 2 has not begun",
    ),
    "one more batch": (
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for _ in range(2 if rank == 3 else 3): model(x).sum().backward()",
        "operation on the default group (all_reduce), and rank 3 has ended after",
    ),
    "a size with which one has ended": (
        "dist.all_reduce(torch.ones(8 if rank else 4))",
        "operation, all_reduce, has 4 float32 on rank 0 and 8 float32 on ranks 1-3",
    ),
    "receives": (
        "dist.recv(x, (rank + 1) % 4)",
        "rank 0 waits to receive from rank 1, which has not sent",
    ),
    "a group of some": (
        "if rank == 2: dist.new_group([0, 1, 2, 3])\ndist.all_reduce(x)",
        "which rank 2 has not begun; rank 2 waits in new_group",
    ),
}


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.fixture(scope="module")
def mesh() -> Iterator[cm.Mesh]:
    with cm.start(4, mesh={"dp": 2, "tp": 2}, settle_s=0.5) as mesh:
        yield mesh


@pytest.mark.parametrize("name", CELLS)
def test_ranks_that_cannot_meet_are_released_with_the_reason(mesh: cm.Mesh, name: str) -> None:
    source, words = CELLS[name]
    with pytest.raises(cm.RankFailure) as caught:
        mesh.submit_cell(BEGIN + source).result()
    assert str(caught.value).startswith("these cannot meet: ")
    assert words in str(caught.value)
    mesh.heal()
    assert mesh.submit_cell(f"{BEGIN}dist.all_reduce(x); x[0].item()").result() is not None


def test_why_names_who_is_waited_for_and_what_that_rank_does(mesh: cm.Mesh, tmp_path: Path) -> None:
    assert mesh.why() == "no rank waits for another"
    go = tmp_path / "go"
    run = mesh.submit_cell(
        f"{BEGIN}import pathlib, time\n"
        f"while rank == 2 and not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
        "dist.all_reduce(x)"
    )
    until(lambda: "which rank 2 has not begun; rank 2 is running" in mesh.why())
    assert mesh.why().startswith("ranks 0-1,3 wait in the ")
    go.touch()
    run.result()


def test_ranks_that_cannot_meet_stay_where_nobody_is_to_be_released() -> None:
    with cm.start(2, on_error="wait", settle_s=0.5) as mesh:
        run = mesh.submit_cell(f"{BEGIN}dist.barrier() if rank else dist.all_reduce(x)")
        until(lambda: mesh.why().startswith("these cannot meet: "))
        reason = mesh.why()
        assert run.waiting_ranks() == [0, 1]
        mesh.interrupt()
        with pytest.raises(RanksInterrupted):
            run.result()
    assert reason.endswith("operation is all_reduce on rank 0 and barrier on rank 1")


def test_a_wait_that_the_program_has_limited_is_left_to_its_own_time_out(mesh: cm.Mesh) -> None:
    mesh.cell(
        "from datetime import timedelta\n"
        "impatient = dist.new_group([2, 3], timeout=timedelta(seconds=3))\n"
        "gave_up = False\n"
        "if rank == 2:\n"
        "    try:\n"
        "        dist.all_reduce(torch.ones(1), group=impatient)\n"
        "    except RuntimeError:\n"
        "        gave_up = True\n"
        "dist.barrier()"
    )
    assert mesh.pull("gave_up").list == [False, False, True, False]


def test_a_rank_that_gloo_ends_is_reported_with_the_cause(mesh: cm.Mesh) -> None:
    # The first operation after a heal or a stop is compared before it begins, and gloo not reached.
    mesh.cell("dist.all_reduce(torch.ones(1))")
    with pytest.raises(cm.RankFailure, match="gloo ended it, as another rank sent it") as caught:
        mesh.submit_cell(
            f"{BEGIN}x = torch.ones(4 if rank else 1 << 20)\n"
            "dist.all_gather([torch.ones_like(x) for _ in range(4)], x)"
        ).result()
    words = str(caught.value)
    assert "these ranks have begun operations of different sizes or kinds, in the " in words
    assert "operation on the default group (all_gather of " in words
    mesh.heal()
