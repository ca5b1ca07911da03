"""Inspecting values of real ranks: where they are, whether replicas are equal, what they look
like.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cellmesh as cm
from cellmesh.controller import inspect as look_module
from cellmesh.controller.inspect import (
    Inspection,
    InspectionSource,
    LargestDifference,
    about,
    inspect,
    look,
)
from cellmesh.controller.trace import profile as profile_module
from cellmesh.wire.inspect import Element, Picture
from tests.conftest import stop_process

MODEL = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(3, 6)).sum().backward()
optimizer.step()
"""


def differences(inspection: Inspection) -> list[LargestDifference | None]:
    return [each.difference for each in inspection.comparisons[""].unequal]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline


@contextlib.contextmanager
def presses_of_the_stop_button() -> Iterator[None]:
    """Soon, and again 10 s later, as somebody does who will not wait any longer."""
    former = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_differences_of_replicas_are_measured(mesh: cm.Mesh) -> None:
    mesh.cell(
        "torch.manual_seed(0); w = torch.randn(700, 900)\n"
        "n, zero = torch.zeros(3), torch.zeros(3)\n"
        "if rank == 1: w[345, 678] += 0.5\n"
        "if rank == 2: n[1], zero[1] = float('nan'), -0.0\n"
        "if rank == 3: w[1, 2] -= 0.25"
    )
    (replicas,) = mesh.inspect("w").comparisons[""].unequal
    assert replicas.alike == ((0, 2), (1,), (3,))
    assert replicas.difference is not None
    assert replicas.difference.largest == pytest.approx(0.5, abs=1e-6)
    assert not replicas.difference.is_lower_bound
    assert differences(mesh.inspect("n")) == [LargestDifference(float("inf"), False)]
    assert differences(mesh.inspect("zero")) == [LargestDifference(0.0, False)]
    mesh.cell("w = w + rank * torch.rand_like(w)")
    (difference,) = differences(mesh.inspect("w"))
    assert difference is not None
    assert difference.is_lower_bound
    assert 2.9 < difference.largest <= 4.5


def test_values_are_shown_where_they_are_and_errors_where_not(mesh: cm.Mesh) -> None:
    mesh.cell("if rank in (1, 2): here = torch.linspace(0, 1, 100) + rank")
    found = mesh.inspect("here")
    assert [found[rank].max for rank in found] == [2.0, 3.0]
    assert {rank: why.type_name for rank, why in found.refusals.items()} == dict.fromkeys(
        (0, 3), "NameError"
    )
    spread = found.spreads[""]  # on one scale
    assert (spread.low, spread.high) == (1.0, 3.0)
    held = {rank: np.nonzero(counts)[0].tolist() for rank, counts in spread.counts.items()}
    assert held == {1: list(range(25)), 2: list(range(24, 48))}
    raised = mesh.inspect("here.nothing / 0")
    assert not raised.found
    assert raised.refusals[1].type_name == "AttributeError"
    assert inspect(mesh[1:3].rank_set, "here", is_beside=True).torn == ()  # nothing runs
    assert mesh[1].inspect("here")[1].max == 2.0


def test_models_and_optimizers_are_nests_of_tensors(mesh: cm.Mesh) -> None:
    mesh.cell(MODEL)
    model = mesh.inspect("model")
    assert model.paths == ("module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias")
    assert {str(comparison) for comparison in model.comparisons.values()} == {
        "replicas are equal, bit for bit"
    }
    assert set(model.spreads) == set(model.paths)
    mesh.cell("many = [torch.full((), 1.0 * i) for i in range(1500)]")
    many = mesh[0].inspect("many")
    assert (len(many.paths), many.facts_of("[1499]")[0].max) == (1500, 1499.0)
    optimizer = mesh.inspect("optimizer")
    assert "state[model.module.1.bias].exp_avg" in optimizer.paths
    assert "'lr': 0.1" in optimizer.facts_of("param_groups[0]")[2].text
    mesh.cell("if rank == 3: model.module[1].bias.data[0] += 1")
    again = mesh.inspect("model")
    comparison = again.comparisons["module.1.bias"]
    assert str(comparison) == "replicas differ: ranks 0-2 ≠ 3 by up to 1"


def test_gradients_are_shown_by_parameter(mesh: cm.Mesh) -> None:
    mesh.cell(MODEL + "\nif rank == 0: model.module[0].bias.grad[0] = float('inf')")
    found = mesh.inspect("model", grads=True)
    assert found.paths[:2] == ("module.0.weight.grad", "module.0.bias.grad")
    weight, bias = (found.facts_of(path) for path in found.paths[:2])
    assert len({facts.digest for facts in weight.values()}) == 1
    assert [facts.num_inf for facts in bias.values()] == [1, 0, 0, 0]
    assert bias[0].norm == pytest.approx(
        mesh[0].pull("model.module[0].bias.grad[1:].norm().item()"), rel=1e-6
    )
    assert str(found.comparisons["module.0.bias.grad"]).endswith("by a NaN or an infinity")


SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
torch.manual_seed(0)
whole = torch.arange(70.).reshape(10, 7)
u = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
same = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
few = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0), Replicate()])
layer = torch.nn.Linear(7, 10)
full = layer.weight.detach().clone()
layer = parallelize_module(layer, mesh['tp'], ColwiseParallel())
fully_shard(layer, mesh=mesh['dp'])
"""


@pytest.mark.parametrize(
    ("name", "whole"),
    [("u", "whole"), ("same", "whole"), ("layer.weight", "full"), ("few", "torch.ones(1, 3)")],
)
def test_parts_of_a_dtensor_lie_at_their_elements(mesh: cm.Mesh, name: str, whole: str) -> None:
    mesh.cell(SHARDED)
    inspection = mesh.inspect(name)
    locals_ = mesh.pull(f"{name}.to_local().detach().numpy()")
    wanted = mesh[0].pull(f"({whole}).numpy()")
    held = np.zeros(wanted.shape, int)
    for rank, facts in inspection.items():
        assert facts.shape == wanted.shape
        assert facts.local_shape == locals_[rank].shape
        at = tuple(
            slice(begin, begin + size)
            for begin, size in zip(facts.offset, facts.local_shape or (), strict=True)
        )
        np.testing.assert_array_equal(wanted[at], locals_[rank])
        assert facts.mesh_dim_names == ("dp", "tp")
        held[at] += 1
    assert held.min() == held.max()
    replicas = inspection.comparisons[""]
    assert not replicas.unequal
    if name == "same":
        assert [each.ranks for each in replicas.replicas] == [(0, 2), (1, 3)]


SIDES = {"height": 512, "width": 512}


def test_pictures_are_of_the_ranks_own_part(mesh: cm.Mesh) -> None:
    mesh.cell(SHARDED)
    looked = look(mesh.rank_set, Picture("u", dims=(1, 0), rows=(0, 3), cols=(1, 5), **SIDES))
    for rank, (row, col) in enumerate(itertools.product((0, 5), (0, 4))):
        np.testing.assert_array_equal(
            looked.answers[rank].values,
            np.arange(70.0).reshape(10, 7)[row + 1 : row + 5, col : col + 3].T,
        )
    assert look(mesh.rank_set, Element("u", index=(4, 2))).answers[3] == "69.0"
    refused = look(
        mesh.rank_set, Picture("u", dims=(0, 1), rows=(0, 5), cols=(0, 4), **SIDES)
    ).refusals
    assert sorted(refused) == [1, 3]
    assert "there are 3 columns" in refused[1].text


def test_other_ranks_are_not_asked(mesh: cm.Mesh) -> None:
    """While two ranks wait in a collective for the others, all can be inspected; none has begun one
    more.
    """
    mesh.cell(SHARDED + MODEL)
    run = mesh[0:2].submit_cell("dist.barrier()")
    try:
        wait_until(lambda: {each.run for each in mesh[0:2].states().values()} == {run.number})
        for name in ("u", "same", "model", "optimizer", "layer"):
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
    answers = InspectionSource(mesh.rank_set, "compute()", seen.pinned)
    whole = Picture("compute()", "tensor", dims=(0, 1), rows=(0, 8), cols=(0, 2), **SIDES)
    assert answers.look(whole, [0]).answers[0].values.tolist()[-1] == [15.0, 16.0]
    assert answers.look(Element("compute()", "tensor", index=(0, 1)), [2]).answers == {2: "2.0"}
    assert answers.spread("tensor", seen.facts_of("tensor")) is not None
    row = mesh.inspect("dt[7]")
    assert {facts.kind for facts in row.values()} == {"torch.distributed.tensor.DTensor"}
    assert set(mesh.pull("count").values()) == {1}

    def num_alive() -> set[int]:
        return set(mesh.pull("gc.collect() * 0 + len(alive)").values())

    again = answers.inspect(False)
    assert [again.facts_of("tensor")[rank].max for rank in range(4)] == [17.0] * 4
    former = about(whole, seen.pinned)
    wait_until(lambda: len(look(mesh.rank_set, former).refusals) == 4)  # it is let go of
    why = look(mesh.rank_set, former).refusals[0].text
    assert "no longer kept: inspect it again" in why
    wait_until(lambda: num_alive() == {1})
    answers.close()
    wait_until(lambda: num_alive() == {0})
    gone = InspectionSource(mesh.rank_set, "compute()")
    assert len(gone.inspect(False)) == 4
    wait_until(lambda: num_alive() == {1})
    del gone
    gc.collect()
    mesh.inspect("rank")
    wait_until(lambda: num_alive() == {0})

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
            for is_beside in (False, True):
                refusals = inspect(mesh.rank_set, expression, is_beside=is_beside).refusals
                assert sorted(refusals) == [0, 1, 2, 3]
                assert why in refusals[0].text
                assert ("ranks 0-1 are busy" if not is_beside else why) in refusals[3].text
        assert look(
            mesh.rank_set, about(Element("compute()", "tensor", index=(0, 0)), seen.pinned)
        ).answers == dict.fromkeys(range(4), "1.0")
        assert mesh.inspect("dt").facts_of("")[0].placements == "S(0)"
    finally:
        run.interrupt()
        run.wait(30)
    assert set(mesh.pull("count").values()) == {1}


def test_rank_without_an_answer_delays_no_other(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "ANSWER_S", 0.3)
    mesh.cell("import os, threading; gate = threading.Event(); w = torch.ones(2)")
    pid = mesh[1].pull("os.getpid()")
    run = mesh[1:2].submit_cell("gate.wait(60)")
    stop_process(pid)
    try:
        with presses_of_the_stop_button(), pytest.raises(KeyboardInterrupt):
            mesh.inspect("w")
        monkeypatch.setattr(look_module, "ANSWER_S", 0.3)
        source = InspectionSource(mesh.rank_set, "w", timeout_s=0.3)
        for told in (source.inspect(True), mesh.inspect("w")):
            assert sorted(told) == [0, 2, 3]
            assert told.refusals[1].text == "no answer within 0.3 s"
        assert any("no answer within 0.3 s" in note for note in mesh.timeline(1).notes)
    finally:
        os.kill(pid, signal.SIGCONT)
        monkeypatch.undo()
    assert sorted(mesh.inspect("w")) == [0, 1, 2, 3]
    assert not run.done()
    run.interrupt()
    assert run.wait(30)


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


def test_a_tensor_on_a_dead_rank(own_mesh: cm.Mesh) -> None:
    own_mesh.cell("w = torch.ones(2)")
    assert own_mesh[1:2].submit_cell("import os; os._exit(3)").wait(20)
    inspection = own_mesh.inspect("w")
    assert sorted(inspection) == [0]
    assert inspection[0].max == 1.0
    assert inspection.refusals[1].type_name == "RankDied"


def test_looking_at_much_costs_little_memory(mesh: cm.Mesh) -> None:
    one = mesh[0:1]

    def look_closely(name: str, height: int, width: int) -> None:
        seen = one.inspect(name)
        assert (seen[0].mean, seen[0].num_elements) == (1.0, height * width)
        assert sum(seen.spreads[""].counts[0]) == height * width
        whole = Picture(name, dims=(0, 1), rows=(0, height), cols=(0, width), **SIDES)
        assert look(one.rank_set, whole).answers[0].values.shape == (512, 512)

    one.cell(
        "import resource; small = torch.ones(700, 900); big = torch.ones(8_000, 8_000).t()[:, ::2]"
    )
    look_closely("small", 700, 900)  # what is needed once is there
    before = mesh[0].pull("resource.getrusage(resource.RUSAGE_SELF).ru_maxrss")
    look_closely("big", 8_000, 4_000)
    after = mesh[0].pull("resource.getrusage(resource.RUSAGE_SELF).ru_maxrss")
    assert after - before < 60_000  # kB; a copy of its elements would take 128,000
    one.cell("del big")
