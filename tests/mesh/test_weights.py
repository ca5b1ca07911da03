"""Weights copied between two meshes of real ranks: placements, waits, and failures in between."""

from __future__ import annotations

import fcntl
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RanksInterrupted
from tests.support.run_cases import beside, press_stop_once_main_waits_in

SOURCE = """
import os, torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 14), nn.BatchNorm1d(14), nn.Linear(14, 5)
    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))

def make(seed):
    torch.manual_seed(seed)
    return Net()

def tp(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

def whole(value):
    value = value.state_dict() if isinstance(value, nn.Module) else {"": value}
    return {
        name.replace("_orig_mod.", "").removeprefix("module."):
        (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in value.items()
    }
"""
LEFT = """
from cellmesh.workers import weights

def left():
    for each in handlers():
        each._kept.clear()  # as after a while without copies
    return num_maps() + sum(len(each._held) for each in handlers())

def num_maps():
    return open("/proc/self/maps").read().count("cellmesh-result")

def handlers():
    import gc
    return [each for each in gc.get_objects() if type(each) is weights.WeightsHandler]
"""
OF_FOUR = """
plain = make(1)
flat = fully_shard(make(2))  # 14 and 5 rows, 6 columns on 4 ranks
both = tp(make(3), mesh["tp"])
fully_shard(both, mesh=mesh["dp"])  # several blocks a rank
hybrid = fully_shard(make(4), mesh=mesh)
ddp = DistributedDataParallel(make(5))
table = distribute_tensor(torch.arange(77.0).reshape(7, 11), mesh, [Shard(1), Shard(0)])
terms = DTensor.from_local(torch.ones(2, 2), mesh, [Partial(), Replicate()])
fsdp1 = FullyShardedDataParallel(make(6), device_id=torch.device("cpu"))
own = torch.full((3,), float(rank))
zeros = torch.zeros(3)
"""
OF_TWO = """
plain, half = make(10), make(11).bfloat16()
sharded = fully_shard(make(12))
columns = tp(make(13), mesh)
compiled = nn.ModuleDict({'_orig_mod': make(14)})  # as torch.compile names it
table = torch.zeros(7, 11, dtype=torch.float64)
rows = distribute_tensor(torch.zeros(7, 11), mesh, [Shard(0)])
own = torch.zeros(3)
"""


@pytest.fixture(scope="module")
def four(mesh: cm.Mesh) -> cm.Mesh:
    mesh.cell(SOURCE + OF_FOUR)
    return mesh


@pytest.fixture(scope="module")
def _filled(quick: cm.Mesh) -> None:
    quick.cell(SOURCE + OF_TWO + LEFT)


@pytest.fixture
def two(quick: cm.Mesh, _filled: None) -> Iterator[cm.Mesh]:
    yield quick
    assert set(quick.pull("left()").values()) == {0}


def fds() -> int:
    """Shared-memory segments that this process has open."""
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return sum("cellmesh-result" in os.readlink(each) for each in links if os.path.islink(each))


def is_equal(four: cm.Mesh, source: str, two: cm.Mesh, target: str) -> bool:
    expected = four.pull(f"whole({source})")[0]
    return all(
        got.keys() == expected.keys()
        and all(torch.equal(got[name], each.to(got[name].dtype)) for name, each in expected.items())
        for got in two.pull(f"whole({target})").values()
    )


def test_values_arrive_whatever_the_placements_on_either_side(four: cm.Mesh, two: cm.Mesh) -> None:
    for source, target in (
        ("flat", "plain"), ("both", "plain"), ("hybrid", "columns"), ("ddp", "sharded"),
        ("plain", "columns"), ("both", "sharded"), ("flat", "half"), ("ddp", "compiled"),
        ("table", "table"), ("table", "rows"),
    ):  # fmt: skip
        copied = four.copy(source, to=two, into=target).result()
        assert [*copied] == [0, 1]
        assert is_equal(four, source, two, target), (source, target)
    two.run(lambda: sharded(torch.ones(4, 6)).sum().backward())  # type: ignore[name-defined]  # noqa: F821
    assert four[2].copy("own", to=two[1]).result() == 1
    assert two.pull("own.tolist()") == {0: [0.0] * 3, 1: [2.0] * 3}
    four[3].copy("own", to=four[:2], into="zeros").result()  # within one mesh
    assert four.pull("zeros[0].item()") == {0: 3.0, 1: 3.0, 2: 0.0, 3: 0.0}
    assert fds() == 0


def test_dtensors_of_any_placements_arrive_as_whole(four: cm.Mesh, two: cm.Mesh) -> None:
    chosen = random.Random(5)
    refused = 0
    for number in range(60):
        sides = [(four, ("mesh", "mesh['dp']", "mesh['tp']")), (two, ("mesh",))]
        (source, of), (target, to) = sides if number % 2 else reversed(sides)
        shape = [chosen.choice((0, 1, 2, 3, 5, 7, 8)) for _ in range(chosen.randint(1, 3))]
        dtypes = chosen.choice(
            ("float32 float32", "float64 bfloat16", "bfloat16 float32", "int64 int64")
        )
        is_partial, whole = False, f"(torch.arange({math.prod(shape)}) % 200).reshape({shape})"
        case = []
        for side, names, value, dtype in zip(
            (source, target),
            (of, to),
            (whole, f"torch.zeros({shape})"),
            dtypes.split(),
            strict=True,
        ):
            name = chosen.choice(names)
            kinds = ["Replicate()", "Partial()", *(f"Shard({dim})" for dim in range(len(shape)))]
            chances = [2, 0.3, *[3] * len(shape)]
            parts = ", ".join(
                chosen.choices(kinds, chances, k=2 if (side, name) == (four, "mesh") else 1)
            )
            is_partial |= "Partial" in parts
            made = "DTensor.from_local" if "Partial" in parts else "distribute_tensor"
            case.append((name, parts, dtype))
            side.cell(f"w = {made}({value}.to(torch.{dtype}), {name}, [{parts}])")
        copying = source.copy("w", to=target)
        if is_partial:
            refused += 1
            with pytest.raises(MeshUsageError, match=r"'w' has the placements .*Partial"):
                copying.result()
            continue
        copying.result()
        equal = f"torch.equal(w.full_tensor(), {whole}.to(w.dtype))"
        assert all(target.pull(equal).values()), (shape, case)
    assert 0 < refused < 30


def test_what_does_not_fit_is_refused_and_nothing_is_copied(four: cm.Mesh, two: cm.Mesh) -> None:
    before = two.pull("whole(plain)")
    for source, to, into, text in (
        ("terms", two, "own", r"'terms' has the placements \[Partial\(sum\), Replicate\(\)\]"),
        ("fsdp1", two, "plain", "FullyShardedDataParallel, whose parameters are flat"),
        ("own", four, "own", "'own' is the same tensor at the source"),
        ("table.to_local()", two, "table", "on rank 0, and"),
        ("plain.up", two, "plain", "'plain.up.up.weight' is missing"),
    ):
        with pytest.raises(MeshUsageError, match=f"nothing was copied: .*{text}"):
            four.copy(source, to=to, into=into).result()
    with pytest.raises(MeshUsageError, match=r"elements of 'flat\.up\.weight' are on ranks"):
        four[:2].copy("flat", to=two, into="plain").result()
    with pytest.raises(cm.RankFailure, match="NameError") as caught:
        four.copy("flat", to=two, into="plan").result()
    assert two.name in caught.value.__notes__[0]
    after = two.pull("whole(plain)")
    assert all(torch.equal(after[r][n], before[r][n]) for r in after for n in after[r])


def test_a_copy_waits_for_busy_ranks_and_can_be_interrupted(
    four: cm.Mesh, two: cm.Mesh, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    wait = f"with open({str(gate)!r}) as gate: fcntl.flock(gate, fcntl.LOCK_SH)"
    step = "[each.data.add_(1) for each in plain.parameters()]"
    with gate.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        busy = [
            two.submit_cell(f"import fcntl\n{wait}"),
            four.submit_cell(f"import fcntl\n{step}\n{wait}\n{step}"),
        ]
        copying, pressed, other = (four.copy("plain", to=two) for _ in range(3))
        with pytest.raises(TimeoutError, match="copy of 'plain' has not ended"):
            copying.result(timeout_s=0.05)
        assert copying.cancel()
        with (
            beside(lambda: press_stop_once_main_waits_in("_attend")),
            pytest.raises(RanksInterrupted, match="interrupted: nothing was copied"),
        ):
            pressed.result()
        with pytest.raises(RanksInterrupted, match="interrupted: nothing was copied"):
            copying.result()
        assert not copying.cancel()
        assert not other.done()
    for run in busy:
        run.result()
    assert other.result() == {0: 9, 1: 9}
    assert is_equal(four, "plain", two, "plain")  # after both halves of the step


def test_targets_that_work_meanwhile_see_old_or_new_values(four: cm.Mesh, two: cm.Mesh) -> None:
    def seen() -> set[float]:
        return {value for each in plain.parameters() for value in each.unique().tolist()}  # type: ignore[name-defined]  # noqa: F821

    two.cell("[each.data.fill_(0) for each in plain.parameters()]")
    samples = []
    for number in range(1, 9):
        four.cell(f"[each.data.fill_({number}) for each in plain.parameters()]")
        copying = four.copy("plain", to=two)
        samples += [two.submit(seen)]
        while not copying.done():
            samples += [two.submit(seen)]
            samples[-1].result()
        samples += [two.submit(seen)]
        for each in samples:
            assert all(values in ({number - 1}, {number}) for values in each.result().values())
        assert set(map(tuple, samples[-1].result().values())) == {(number,)}
        samples.clear()


def test_nothing_is_copied_if_a_rank_fails_before_all_hold_their_parts(
    four: cm.Mesh, two: cm.Mesh
) -> None:
    before = two.pull("whole(plain)")
    for ranks, part in ((two, "WeightsHandler._open"), (four, "bytes_of")):
        ranks[1].cell(
            f"from cellmesh.workers import weights\nkept = weights.{part}\n"
            f"def fail(*args): raise OSError('no memory')\nweights.{part} = fail"
        )
        with pytest.raises(cm.RankFailure, match="rank 1 raised OSError: no memory"):
            four.copy("flat", to=two, into="plain").result()
        ranks[1].cell(f"weights.{part} = kept")
        after = two.pull("whole(plain)")
        assert all(torch.equal(after[r][n], before[r][n]) for r in after for n in after[r])
        assert set(two.pull("left()").values()) == {0}
        assert fds() == 0


def test_segments_and_their_mappings_are_used_again(four: cm.Mesh, two: cm.Mesh) -> None:
    four.cell("large = torch.full((600_000,), float(rank))")
    two.cell("large = torch.zeros(600_000)")
    inodes = set[int]()
    for number in range(3):
        four.cell(f"large.fill_({number})")
        four[0].copy("large", to=two).result()
        assert two.pull("large.unique().tolist()") == {0: [number], 1: [number]}
        assert set(two.pull("num_maps()").values()) == {1}
        inodes.update(*two.pull("[inode for each in handlers() for inode in each._kept]").values())
    assert len(inodes) == 1
    four[1].copy("large", to=two).result()  # the mapping of rank 0's segment is dropped
    assert set(two.pull("num_maps()").values()) == {1}


def test_dead_ranks_on_either_side_are_named(four: cm.Mesh, two: cm.Mesh) -> None:
    before: Any = two.pull("whole(plain)")
    two[1].cell(
        "def die(*args): os.kill(os.getpid(), 9)\n"
        "from cellmesh.workers import weights\nweights.copy_piece = die"
    )
    copying = four.copy("plain", to=two)
    with pytest.raises(cm.RankFailure, match="rank 1 was killed by SIGKILL") as caught:
        copying.result()
    assert [*caught.value.exceptions_by_rank] == [1]
    assert copying.failed_ranks() == [1]
    got, sent = two[0].pull("whole(plain)"), four[0].pull("whole(plain)")
    assert all(torch.equal(got[name], sent[name]) for name in sent)  # the others are complete
    with pytest.raises(cm.RankDied, match="rank 1"):
        four.copy("ddp", to=two, into="plain")
    two.heal()
    two.cell(SOURCE + LEFT + "plain = make(10)")
    with pytest.raises(cm.RankFailure):
        four[3].cell("os.kill(os.getpid(), 9)")
    with pytest.raises(cm.RankDied, match="rank 3"):
        four.copy("ddp", to=two, into="plain")
    assert not torch.equal(two[0].pull("whole(plain)")["up.weight"], sent["up.weight"])
    four.heal()
    assert before[0].keys() == sent.keys()
