"""Values pushed in parts and as DTensors, and gathered or reduced to one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import cellmesh as cm
from cellmesh.controller.values.transfer import reduce_to_cpu
from cellmesh.errors import MeshUsageError

BIG = torch.arange(1024 * 1031, dtype=torch.float32).reshape(1024, 1031)  # travels in a segment
SMALL = torch.arange(7 * 5).reshape(7, 5)

# what DTensor itself makes of the same tensor
SAME = """
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
made = distribute_tensor(whole.clone(), mesh, {placements})
same = (
    made.placements == x.placements, made.shape == x.shape, made.stride() == x.stride(),
    bool((made.to_local() == x.to_local()).all()), made.to_local().shape == x.to_local().shape,
    made.to_local().is_contiguous() == x.to_local().is_contiguous(),
    bool((x.full_tensor() == whole).all()),
)
"""


@pytest.mark.parametrize("whole", [BIG, SMALL[:1], BIG.T], ids=["big", "short", "strided"])
@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(-1)]],
    ids=str,
)
def test_a_pushed_dtensor_is_what_torch_makes(
    mesh: cm.Mesh, whole: torch.Tensor, placements: Any
) -> None:
    mesh.push(whole=whole)
    mesh.push(x=whole, placements=placements)
    mesh.cell(SAME.format(placements=placements))
    assert mesh.pull("same").list == [(True,) * 7] * 4
    gathered = mesh.pull("x", gather=True)
    assert torch.equal(gathered, whole)
    gathered[0, 0] = -1  # it is the notebook's own
    assert mesh.pull("bool((x.to_local() >= 0).all())").list == [True] * 4


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(
    "whole", [BIG, SMALL, np.asfortranarray(BIG.numpy())], ids=["big", "small", "array"]
)
def test_plain_parts_are_pushed_and_pulled(mesh: cm.Mesh, whole: Any, dim: int) -> None:
    mesh.push(x=whole, shard=dim)
    expected = torch.tensor_split(torch.as_tensor(whole), 4, dim)
    for part, own in zip(mesh.pull("x").list, expected, strict=True):
        assert type(part) is type(whole)
        assert torch.equal(torch.as_tensor(part), own)
    gathered = mesh.pull("x", gather=True, dim=dim)
    assert type(gathered) is type(whole)
    assert torch.equal(torch.as_tensor(gathered), torch.as_tensor(whole))
    assert torch.equal(
        torch.as_tensor(mesh[1:3].pull("x", gather=True, dim=dim)), torch.cat(expected[1:3], dim)
    )


def test_a_part_holds_no_more_than_itself(mesh: cm.Mesh) -> None:
    whole = torch.ones(4096, 1024, requires_grad=True)
    mesh.push({"shard": whole, "nest": {"a": [whole, BIG.numpy()]}}, shard=0)
    sizes = mesh.pull(
        "shard.untyped_storage().nbytes(), nest['a'][0].shape[0], len(nest['a'][1])"
    ).list
    assert sizes == [(whole.nbytes // 4, 1024, 256)] * 4
    assert mesh.pull("shard.requires_grad and shard.is_leaf").list == [True] * 4
    mesh.cell("shard.sum().backward()")


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        ({"x": BIG}, {"shard": 2}, "x has 2 dims, .* no dim 2"),
        ({"x": SMALL[:3]}, {"shard": 0}, r"x has 3 along dim 0, and there are 4 ranks.*mesh\[:3\]"),
        ({"x": {"lr": 0.1}}, {"shard": 0}, r"x\['lr'\] is a float"),
        ({"x": torch.eye(9).to_sparse()}, {"shard": 0}, "x is a Tensor .*sparse"),
        ({"x": np.ma.masked_array(SMALL.numpy())}, {"shard": 0}, "x is a MaskedArray"),
        ({"x": np.array(["a"] * 9)}, {"placements": "Shard(0), Replicate()"}, "an array of <U1"),
        ({"x": SMALL}, {"shard": 0, "placements": [Shard(0)]}, "exclude each other"),
        ({"x": SMALL}, {"placements": [Shard(0)]}, r"1 placements for a mesh of 2 dims"),
        ({"x": SMALL}, {"placements": "Shard(0), Shrad(1)"}, r"'Shrad\(1\)' cannot be made"),
        ({"x": SMALL}, {"placements": BIG}, "is no list of placements"),
        ({"not a name": SMALL}, {}, "is no name"),
    ],
)
def test_unsplittable_values_are_refused(
    mesh: cm.Mesh, names: Any, options: Any, text: str
) -> None:
    with pytest.raises(MeshUsageError, match=text):
        mesh.push(names, **options)


@pytest.mark.parametrize(
    ("expression", "options", "text"),
    [
        ("rank", {"gather": True}, "'rank' is a int"),
        ("torch.ones(2, 2 + rank)", {"gather": True}, "do not fit together along dim 0"),
        ("torch.ones(rank)", {"reduce": "sum"}, r"differs between ranks: Tensor \(0,\) on rank 0"),
        ("'text'", {"reduce": "mean"}, "is a str, which has no mean"),
        ("rank", {"reduce": "maen"}, "did you mean 'mean'"),
    ],
)
def test_parts_that_make_no_whole_are_refused(
    mesh: cm.Mesh, expression: str, options: Any, text: str
) -> None:
    with pytest.raises(MeshUsageError, match=text):
        mesh.pull(expression, **options)


def test_part_of_the_mesh(mesh: cm.Mesh) -> None:
    with pytest.raises(MeshUsageError, match="a DTensor is on the whole mesh"):
        mesh[:2].push(x=SMALL, placements=[Shard(0), Replicate()])
    mesh.push(x=SMALL, placements=[Replicate(), Shard(0)])
    with pytest.raises(
        MeshUsageError, match="15 of its 35 elements are on ranks that were not asked"
    ):
        mesh[[0, 2]].pull("x", gather=True)
    mesh.cell(
        "from torch.distributed.tensor import DTensor, Partial, Replicate\n"
        "p = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])"
    )
    with pytest.raises(cm.RankFailure, match="full_tensor"):
        mesh.pull("p", gather=True)


# What is made on ranks, and its gathered whole.
GATHERED = {
    "distribute_tensor(torch.arange(8.), mesh['tp'], [Shard(0)])": torch.arange(8.0),
    "distribute_tensor(torch.tensor(3.), mesh, [Replicate()] * 2)": torch.tensor(3.0),
    "torch.full((1, 1 << 16), 1 + 2j).conj()": torch.full((4, 1 << 16), 1 - 2j),
    "torch.ones(1, requires_grad=True) * 2": torch.full((4,), 2.0),
}


def test_gathered_is_the_whole(mesh: cm.Mesh) -> None:
    mesh.cell("from torch.distributed.tensor import distribute_tensor, Shard, Replicate")
    for text, whole in GATHERED.items():
        gathered = mesh.pull(text, gather=True)
        assert torch.equal(gathered, whole), text
        assert gathered.is_leaf
        assert not gathered.requires_grad


MODEL = """
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
net = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(net, mesh=mesh["dp"])
kinds = {type(placement).__name__ for weight in net.parameters() for placement in weight.placements}
full = {name: weight.full_tensor().detach() for name, weight in net.named_parameters()}
"""


def test_weights_of_fsdp2_over_tp_are_gathered(mesh: cm.Mesh) -> None:
    mesh.cell(MODEL)
    assert "_StridedShard" in mesh[0].pull("kinds")
    for name, whole in mesh[0].pull("full").items():
        assert torch.equal(mesh.pull(f"net.get_parameter({name!r})", gather=True), whole)


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("torch.tensor([True, rank == 0])", "sum", torch.tensor([4, 1])),
        ("torch.tensor([200], dtype=torch.uint8)", "mean", torch.tensor([200.0])),
        ("np.array([200], 'u1')", "sum", np.array([800], "u8")),
        ("np.array([4e4 if rank < 2 else -4e4], 'f2')", "sum", np.array([0.0], "f2")),
        ("np.uint8(200)", "sum", np.uint64(800)),
    ],
)
def test_sums_are_as_wide_as_torch_and_numpy_make_them(
    mesh: cm.Mesh, text: str, how: Any, expected: Any
) -> None:
    mesh.cell("import numpy as np")
    found = mesh.pull(text, reduce=how)
    assert (type(found), found.dtype) == (type(expected), expected.dtype)
    assert found.tolist() == expected.tolist()


def test_split_tensor_leaves_its_device_before_the_send() -> None:
    there = SimpleNamespace(type="cuda")
    on_gpu = mock.create_autospec(torch.Tensor, instance=True, device=there, requires_grad=True)
    on_gpu.detach.return_value.cpu.return_value = torch.ones(2)
    function, args = reduce_to_cpu(on_gpu)[:2]
    assert torch.equal(made := function(*args), torch.ones(2))
    assert (made.device.type, made.requires_grad) == ("cpu", True)
