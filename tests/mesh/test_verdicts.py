"""Cells whose ranks can never meet in an operation end by themselves, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted
from tests.faults.watching import wait_until

BEGIN = "import torch, torch.distributed as dist\nx = torch.ones(4)\n"
CELLS = {
    "kinds": (
        "dist.all_reduce(x) if rank % 2 else dist.all_gather([torch.ones(4) for _ in range(4)], x)",
        "is all_gather of 4 float32 on ranks 0,2 and all_reduce of 4 float32 on ranks 1,3",
    ),
    "left out": (
        "if rank != 3: dist.all_reduce(x)\ndist.all_reduce(x, group=mesh.get_group('tp'))",
        "on the default group (all_reduce), which rank 3 has not begun; rank 3 waits in the 1st "
        "operation on tp (all_reduce), which rank 2 has not begun",
    ),
    "one more batch": (
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for _ in range(2 if rank == 3 else 3): model(x).sum().backward()",
        "operation on the default group (all_reduce), which rank 3 has ended without",
    ),
    "a group of some": (
        "if rank == 2: dist.new_group([0, 1, 2, 3])\ndist.all_reduce(x)",
        "which rank 2 has not begun; rank 2 waits in new_group",
    ),
}


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


def test_ranks_that_cannot_meet_stay_as_long_as_they_have_time() -> None:
    with cm.start(2, settle_s=600) as mesh:
        run = mesh.submit_cell(f"{BEGIN}dist.barrier() if rank else dist.all_reduce(x)")
        wait_until(lambda: mesh.why().startswith("these cannot meet: "))
        reason = mesh.why()
        assert run.waiting_ranks() == [0, 1]
        mesh.interrupt()
        with pytest.raises(RanksInterrupted):
            run.result()
    assert reason.endswith("operation is all_reduce of 4 float32 on rank 0 and barrier on rank 1")


def test_a_rank_that_gloo_ends_is_reported_with_the_cause(mesh: cm.Mesh) -> None:
    # The first operation after a heal or a stop is compared before it begins, and gloo not reached.
    mesh.cell("dist.all_reduce(torch.ones(1))")
    with pytest.raises(cm.RankFailure, match="gloo ended it in operation") as caught:
        mesh.submit_cell(
            f"{BEGIN}x = torch.ones(4 if rank else 1 << 20)\n"
            "dist.all_gather([torch.ones_like(x) for _ in range(4)], x)"
        ).result()
    words = str(caught.value)
    assert "), as another rank sent it " in words
    assert "on the default group (all_gather of " in words
    assert "these ranks have begun operations of different sizes or kinds" in words
    mesh.heal()


# Rank 3 never comes. Ranks that give up close their connections, which others of them may meet
# first.
GIVE_UP = """
from datetime import timedelta

impatient = dist.new_group(timeout=timedelta(seconds=1))
outcome = ""
if rank != 3:
    try:
        dist.all_reduce(torch.ones(1), group=impatient)
    except RuntimeError as error:
        outcome = "gave up"
dist.barrier()
"""


def test_ranks_that_give_up_get_the_error_that_torch_raises(mesh: cm.Mesh) -> None:
    for _ in range(3):
        mesh.cell(GIVE_UP)
        assert mesh.pull("outcome") == {0: "gave up", 1: "gave up", 2: "gave up", 3: ""}
        mesh.cell("x = torch.ones(1)\ndist.all_reduce(x, group=impatient)\nassert x.item() == 4")
