"""Inspecting values of real ranks: where they are, whether replicas are equal, what they look
like.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import cellmesh as cm
from cellmesh.controller.inspect import (
    InspectionSource,
    inspect,
    look,
)
from cellmesh.wire.inspect import (
    AnyRequest,
    Histogram,
    Overview,
    Picture,
)
from tests.faults.watching import wait_until

MODEL = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(3, 6)).sum().backward()
optimizer.step()
"""


def test_replicas_that_differ_are_named(mesh: cm.Mesh) -> None:
    mesh.cell(
        "torch.manual_seed(0); w = torch.randn(700, 900)\n"
        "zero = torch.zeros(3)\n"
        "if rank == 1: w[345, 678] += 0.5\n"
        "if rank == 2: zero[1] = -0.0\n"
        "if rank == 3: w[1, 2] -= 0.25"
    )
    (replicas,) = mesh.inspect("w").comparisons[""].unequal
    assert replicas.alike == ((0, 2), (1,), (3,))
    (replicas,) = mesh.inspect("zero").comparisons[""].unequal
    assert replicas.alike == ((0, 1, 3), (2,))
    mesh.cell("if rank in (1, 2): here = torch.linspace(0, 1, 100) + rank")
    found = mesh.inspect("here")
    assert [found[rank].max for rank in found] == [2.0, 3.0]
    assert {why.type_name for why in found.refusals.values()} == {"NameError"}
    assert (found.spreads[""].low, found.spreads[""].high) == (1.0, 3.0)  # on one scale


def test_models_and_optimizers_are_nests_of_tensors(mesh: cm.Mesh) -> None:
    mesh.cell(MODEL)
    model = mesh.inspect("model")
    assert model.paths == ("module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias")
    assert {str(comparison) for comparison in model.comparisons.values()} == {
        "replicas are equal, bit for bit"
    }
    assert set(model.spreads) == set(model.paths)
    optimizer = mesh.inspect("optimizer")
    assert "state[model.module.1.bias].exp_avg" in optimizer.paths
    assert "'lr': 0.1" in optimizer.facts_of("param_groups[0]")[2].text
    mesh.cell("if rank == 0: model.module[0].bias.grad[0] = float('inf')")
    grads = mesh.inspect("model", grads=True)
    assert grads.paths[:2] == ("module.0.weight.grad", "module.0.bias.grad")
    assert [facts.num_inf for facts in grads.facts_of(grads.paths[1]).values()] == [1, 0, 0, 0]
    mesh.cell("if rank == 3: model.module[1].bias.data[0] += 1")
    again = mesh.inspect("model")
    comparison = again.comparisons["module.1.bias"]
    assert str(comparison) == "replicas differ: ranks 0-2 ≠ 3 (%dist_check measures them)"


SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
torch.manual_seed(0)
whole = torch.arange(70.).reshape(10, 7)
u = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
layer = torch.nn.Linear(7, 10)
layer = parallelize_module(layer, mesh['tp'], ColwiseParallel())
fully_shard(layer, mesh=mesh['dp'])
"""


SIDES = {"height": 512, "width": 512}


def test_other_ranks_are_not_asked(mesh: cm.Mesh) -> None:
    """While two ranks wait in a collective for the others, all can be inspected; none has begun one
    more.
    """
    mesh.cell(SHARDED + MODEL)
    run = mesh[0:2].submit_cell("dist.barrier()")
    try:
        wait_until(lambda: {each.run for each in mesh[0:2].states().values()} == {run.number})
        for name in ("u", "model", "optimizer", "layer"):
            inspection = mesh.inspect(name)
            assert sorted(inspection) == [0, 1, 2, 3]
            assert inspection.torn == (0, 1)
    finally:
        mesh[2:4].cell("dist.barrier()")
        run.result(20)


COMPUTED = """
import gc, weakref
from torch.distributed.tensor import distribute_tensor, Shard
dt = distribute_tensor(torch.arange(16.).reshape(8, 2), mesh['tp'], [Shard(0)])
alive, count = weakref.WeakSet(), 0

class Box:
    def __init__(self, tensor):
        self.tensor = tensor
        alive.add(self)

def compute():
    global count
    count += 1
    return Box(dt.full_tensor() + count)

def fail():
    if rank == 1: raise Odd
    dist.all_reduce(torch.ones(1))

class Odd(Exception):
    def __str__(self): raise SystemExit(1)
"""


def test_an_expression_that_runs_code_is_run_once_by_all_ranks(mesh: cm.Mesh) -> None:
    """Also one that is a collective, or leads to something that is."""
    mesh.cell(COMPUTED)
    seen = mesh.inspect("compute()")
    assert [seen.facts_of("tensor")[rank].max for rank in range(4)] == [16.0] * 4
    answers = InspectionSource(mesh.rank_set, "compute()", seen.token)
    whole = Picture("compute()", "tensor", dims=(0, 1), rows=(0, 8), cols=(0, 2), **SIDES)
    assert answers.look(whole, [0]).answers[0].values.tolist()[-1] == [15.0, 16.0]
    assert answers.spread("tensor", seen.facts_of("tensor")) is not None
    row = mesh.inspect("dt[7]")
    assert {facts.kind for facts in row.values()} == {"torch.distributed.tensor.DTensor"}
    assert set(mesh.pull("count").values()) == {1}

    again = answers.inspect()
    assert [again.facts_of("tensor")[rank].max for rank in range(4)] == [17.0] * 4
    former = msgspec.structs.replace(whole, token=seen.token)
    why = look(mesh.rank_set, former).refusals[3].text
    assert "no longer kept: inspect it again" in why
    assert set(mesh.pull("gc.collect() * 0 + len(alive)").values()) == {1}

    raised = mesh.inspect("fail()")
    assert str(raised.refusals[1]) == "Odd: <its str() raised SystemExit>"
    assert sorted(raised.refusals) == [0, 1, 2, 3]
    mesh.cell("total = torch.ones(1); dist.all_reduce(total)")
    assert set(mesh.pull("total.item()").values()) == {4.0}


def test_beside_a_cell_no_rank_runs_an_expressions_code(mesh: cm.Mesh) -> None:
    """Neither those that run the cell nor those that do not; values that are kept can still be
    asked for.
    """
    mesh.cell(COMPUTED + "import threading; gate = threading.Event()")
    seen = mesh.inspect("compute()")
    run = mesh[0:2].submit_cell("gate.wait(60)")
    try:
        for expression, why in (
            ("compute()", "have to run code"),
            ("dt[0]", "a collective: look at the whole"),
        ):
            refusals = mesh.inspect(expression).refusals
            assert sorted(refusals) == [0, 1, 2, 3]
            assert why in refusals[0].text
            assert "ranks 0-1 are busy" in refusals[3].text
        source = InspectionSource(mesh.rank_set, "compute()", seen.token)
        assert not source.inspect().found
        answers = source.look(Overview("compute()", "tensor")).answers
        assert {rank: found.items[0].min for rank, found in answers.items()} == dict.fromkeys(
            range(4), 1.0
        )
        assert mesh.inspect("dt").facts_of("")[0].placements == "S(0)"
    finally:
        run.interrupt()
        run.wait(30)
    assert set(mesh.pull("count").values()) == {1}


def test_evaluation_without_a_waiting_caller_is_interrupted(mesh: cm.Mesh, tmp_path: Path) -> None:
    """Where it takes too long, and by the stop button of a cell that waits behind it."""
    mesh.cell(f"import time; from pathlib import Path; begun = Path({str(tmp_path)!r}); ended = []")
    slow = "((begun / str(rank)).touch(), time.sleep(100), ended.append(True))"
    assert inspect(mesh.rank_set, slow, timeout_s=1).refusals[3].text.startswith("no answer within")
    mesh.cell("assert not ended; (begun / str(rank)).unlink(missing_ok=True)")

    with ThreadPoolExecutor() as pool:
        seen = pool.submit(inspect, mesh.rank_set, slow)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
        cell = mesh.submit_cell("y = 1")
        cell.interrupt()
        assert cell.wait(20)
        refusals = seen.result(20).refusals
    assert [refusals[rank].type_name for rank in range(4)] == ["KeyboardInterrupt"] * 4
    mesh.cell("assert not ended")


# What FSDP2 frees and gathers again while it trains.
TRAINED = """
import os
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
def sharded(reshard):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])
    for module in model: fully_shard(module, reshard_after_forward=reshard)
    return fully_shard(model)
freeing, keeping = sharded(True), sharded(False)
batch = torch.randn(16, 512)
own = torch.zeros(9 << 20)  # too much for the heap: what is freed is unmapped at once
"""
TRAIN = """
done = torch.zeros(1)
while not done:
    own.untyped_storage().resize_(36 << 20)
    freeing(batch).sum().backward()
    own.untyped_storage().resize_(0)
    keeping(batch).sum().backward()
    done.fill_(os.path.exists({path!r}))
    dist.all_reduce(done)
"""
PART: Any = {"dims": (0, 1), "rows": (0, 128), "cols": (0, 512), "height": 60, "width": 60}
SUBJECTS: tuple[AnyRequest, ...] = (
    Overview("freeing"),
    Overview("own"),
    Overview("keeping", grads=True),
    Picture("freeing", "2.weight", **PART),
    Picture("keeping", "1.weight", **PART, reduction="absmax"),
    Histogram("own", low=0.0, high=1.0, num_bins=4),
)
NUM_LOOKS = 50


def test_looks_at_a_model_that_fsdp_trains_harm_nothing(mesh: cm.Mesh, tmp_path: Path) -> None:
    mesh.cell(TRAINED)
    idle = mesh.inspect("freeing")
    assert len(idle.paths) == 6
    done = tmp_path / "done"
    run = mesh.submit_cell(TRAIN.format(path=str(done)))
    told, refused = 0, set()
    for subject in itertools.islice(itertools.cycle(SUBJECTS), NUM_LOOKS):
        looked = look(mesh.rank_set, subject, is_beside=True)
        told += len(looked.answers)
        refused |= {refusal.text for refusal in looked.refusals.values()}
    done.touch()
    assert run.wait(60)
    run.result()  # raises what a rank has raised, or that it died
    assert told > NUM_LOOKS, refused  # the others are refused: memory is freed half of the time
    mesh.cell("keeping(batch).sum().backward()")
    assert mesh.inspect("freeing").paths == idle.paths
