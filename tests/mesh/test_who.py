"""``%dist_who`` and the ranks' names, on real ranks."""

from __future__ import annotations

import threading

import pytest

import cellmesh as cm
from cellmesh.controller.inspect import look, look_at_one
from cellmesh.magics.render.inspections import names_table
from cellmesh.wire.inspect import Complete, Explain

from .conftest import Recorder

DISTRIBUTED = """
if "fully" not in globals():
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

    sharded = distribute_tensor(torch.ones(8, 2), mesh["tp"], [Shard(0)])
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    compiled = torch.compile(Net())
    fully = fully_shard(Net(), mesh=mesh["dp"])
"""


def rows(ranks: cm.Mesh, pattern: str = "*") -> dict[str, dict[str, str]]:
    table = names_table(ranks, pattern)
    return {row[0]: dict(zip(table.headers, row, strict=True)) for row in table.rows}


def test_names_of_the_user_and_where_they_differ(mesh: cm.Mesh) -> None:
    mesh.cell(
        "import numpy as np\n"
        "from torch.distributed.tensor import distribute_tensor, Shard, Replicate\n"
        "alike = {'a': [1, 2]}\n"
        "apart = rank % 2\n"
        "size = torch.ones(2 + rank, 3)\n"
        "whole = torch.arange(4.0)\n"
        "sharded = distribute_tensor(torch.ones(8, 2), mesh['tp'], [Shard(0)])\n"
        "if rank > 1:\n    only = 'x'\n"
    )
    found = rows(mesh)
    assert {"rank", "world_size", "mesh", "torch", "dist", "device", "get_ipython"}.isdisjoint(
        found
    )
    assert found["alike"]["between ranks"] == "alike"
    assert found["apart"]["value"] == "[0,2] 0, [1,3] 1"
    assert found["size"]["shape"] == "[0] (2, 3), [1] (3, 3), [2] (4, 3), and 1 more"
    assert found["whole"]["between ranks"] == "alike"
    assert found["sharded"]["shape"] == "(8, 2), here (4, 2)"
    assert found["sharded"]["size"] == "32 B"
    assert found["only"]["between ranks"] == "not on 0-1"
    assert list(rows(mesh, "s*")) == ["Shard", "sharded", "size"] or list(rows(mesh, "s*")) == [
        "sharded",
        "size",
    ]


def test_an_own_name_is_shown_once_it_is_rebound(mesh: cm.Mesh) -> None:
    mesh.cell("dist_before, dist = dist, 'mine'")
    try:
        assert rows(mesh, "dist")["dist"]["value"] == "'mine'"
    finally:
        mesh.cell("dist = dist_before")
    assert "dist" not in rows(mesh)


def test_busy_ranks_list_their_names(mesh: cm.Mesh) -> None:
    mesh.cell("import threading\ngate = threading.Event()\nbound_before = 1")
    run = mesh[:2].submit_cell("bound_during = rank\nprint('begun')\ngate.wait()")
    try:
        while any(state.run < 0 for state in mesh[:2].states().values()):
            pass
        found = rows(mesh, "bound*")
        assert found["bound_before"]["between ranks"] == "alike"
        assert look_at_one(mesh[:2].rank_set, Complete("bound_b", 7), 30).texts == ("bound_before",)
    finally:
        run.interrupt()
        run.wait(30)


def test_one_rank_is_asked_the_lowest_idle_one(mesh: cm.Mesh) -> None:
    mesh.cell("import threading\ngate = threading.Event()\nexec(f'only_on_{rank} = 1')")
    run = mesh[:2].submit_cell("gate.wait()")
    try:
        assert look_at_one(mesh.rank_set, Complete("only_on_", 8), 30).texts == ("only_on_2",)
        assert look_at_one(mesh[:2].rank_set, Complete("only_on_", 8), 30).texts == ("only_on_0",)
    finally:
        run.interrupt()
        run.wait(30)
    assert look_at_one(mesh.rank_set, Complete("only_on_", 8), 30).texts == ("only_on_0",)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("mesh.get_loc", "get_local_rank"),
        ("sharded.to_lo", "to_local"),
        ("sharded.placem", "placements"),
        ("sharded.shap", "shape"),
        ("wrapped.module.wei", "weight"),
        ("wrapped.no_sy", "no_sync"),
        ("fully.lin", "linear"),
        ("fully.linear.weight.to_lo", "to_local"),
        ("fully.unsha", "unshard"),
        ("compiled.lin", "linear"),
        ("dist.all_red", "all_reduce"),
    ],
)
def test_names_of_distributed_code_are_completed(mesh: cm.Mesh, code: str, text: str) -> None:
    mesh.cell(DISTRIBUTED)
    assert text in look_at_one(mesh.rank_set, Complete(code, len(code)), 30).texts


def test_a_late_answer_is_a_refusal(mesh: cm.Mesh) -> None:
    looked = look(mesh[[0]].rank_set, Explain("rank"), is_beside=True, timeout_s=0.0)
    assert looked.answers or looked.refusals[0].type_name == "TimeoutError"
    assert look(
        mesh[[0]].rank_set, Explain("no_such_name"), is_beside=True, timeout_s=30
    ).answers == {0: ""}


def test_dead_rank_is_listed(own_mesh: cm.Mesh, recorder: Recorder) -> None:
    own_mesh.cell("x = 1")
    gone = threading.Event()
    run = own_mesh[[0]].submit_cell("import os\nos._exit(3)")
    run.on_end(gone.set)
    assert gone.wait(30)
    table = names_table(own_mesh, "*")
    assert [row[0] for row in table.rows] == ["x"]
    assert table.notes[0].startswith("rank 0: RankDied: ")
    assert look_at_one(own_mesh.rank_set, Complete("x", 1), 30).texts == ("x",)
    assert look_at_one(own_mesh[[0]].rank_set, Complete("x", 1), 30) is None
