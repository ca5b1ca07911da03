"""Values pushed in parts and as DTensors, and gathered or reduced to one."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.parametrize(
    "whole", [BIG, SMALL, SMALL[:1], BIG.T], ids=["big", "small", "short", "strided"]
)
@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Replicate()],
        [Replicate(), Shard(1)],
        [Shard(0), Shard(0)],
        [Shard(1), Shard(0)],
        [Shard(-1), Shard(0)],
        "Replicate(), Replicate()",
    ],
    ids=str,
)
def test_a_pushed_dtensor_is_what_torch_makes(
    mesh: cm.Mesh, whole: torch.Tensor, placements: Any
) -> None:
    mesh.push(whole=whole)
    mesh.push(x=whole, placements=placements)
    mesh.cell(
        SAME.format(placements=f"[{placements}]" if isinstance(placements, str) else placements)
    )
    assert mesh.pull("same").list == [(True,) * 7] * 4
    gathered = mesh.pull("x", gather=True)
    assert torch.equal(gathered, whole)
    gathered[0, 0] = -1  # it is the notebook's own
    assert mesh.pull("bool((x.to_local() >= 0).all())").list == [True] * 4


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    "whole",
    [BIG, SMALL, BIG.numpy(), SMALL.numpy(), torch.ones(4096, 1024)],
    ids=["big", "small", "array", "small array", "pages"],
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


RECORDS = np.zeros((9, 3), "i4,f8")
RECORDS["f0"] = np.arange(27).reshape(9, 3)


ARRAYS = {
    "reversed": BIG.numpy()[::-1],
    "strided": BIG.numpy()[:, ::-2],
    "Fortran": np.asfortranarray(BIG.numpy()),
    "read-only": np.broadcast_to(np.arange(5.0), (9, 5)),
    "records": RECORDS,
    "objects": np.array([[None, "a"], [1, []]] * 4, dtype=object),
    "text": np.array(["text", "é"] * 5),
    "dates": np.arange(9).astype("M8[s]"),
    "big-endian": np.arange(9, dtype=">i4"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_all_kinds_are_pushed_and_pulled(mesh: cm.Mesh, kind: str) -> None:
    whole = ARRAYS[kind]
    mesh.push(x=whole, shard=0)
    for part, own in zip(mesh.pull("x").list, np.array_split(whole, 4), strict=True):
        assert (part.dtype, part.shape) == (own.dtype, own.shape)
        assert (part == own).all()
    gathered = mesh.pull("x", gather=True)
    assert (gathered.dtype, gathered.shape) == (whole.dtype, whole.shape)
    assert (gathered == whole).all()


def test_a_part_holds_no_more_than_itself(mesh: cm.Mesh) -> None:
    whole = torch.ones(4096, 1024, requires_grad=True)
    mesh.push({"shard": whole, "nest": {"a": [whole, BIG.numpy()]}}, shard=0)
    sizes = mesh.pull(
        "shard.untyped_storage().nbytes(), nest['a'][0].shape[0], len(nest['a'][1])"
    ).list
    assert sizes == [(whole.nbytes // 4, 1024, 256)] * 4
    assert mesh.pull("shard.requires_grad and shard.is_leaf").list == [True] * 4
    mesh.cell("shard.sum().backward()")


def test_values_of_ranks_are_reduced(mesh: cm.Mesh) -> None:
    mesh.cell(
        "x = {'loss': rank * 1.0, 'n': [rank], 't': torch.full((2,), rank), "
        "'b': torch.full((3,), rank).bfloat16()}"
    )
    mean = mesh.pull("x", reduce="mean")
    assert (mean["loss"], mean["n"], mean["t"].tolist()) == (1.5, [1.5], [1.5, 1.5])
    assert mean["b"].dtype == torch.bfloat16
    total = mesh.pull("x", reduce="sum")
    assert (total["loss"], total["n"], total["t"].tolist()) == (6.0, [6], [6, 6])
    assert mesh.pull("x['t']", reduce="stack").shape == (4, 2)
    assert mesh.pull("x['n']", reduce="stack") == [[0, 1, 2, 3]]


class Tagged(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize(
    ("names", "options", "text"),
    [
        ({"x": BIG}, {"shard": 2}, "x has 2 dims, .* no dim 2"),
        ({"x": SMALL[:3]}, {"shard": 0}, r"x has 3 along dim 0, and there are 4 ranks.*mesh\[:3\]"),
        ({"x": {"lr": 0.1}}, {"shard": 0}, r"x\['lr'\] is a float"),
        ({"x": torch.ones(9, device="meta")}, {"shard": 0}, "x is a meta tensor"),
        ({"x": torch.eye(9).to_sparse()}, {"shard": 0}, "x is a Tensor .*sparse"),
        ({"x": SMALL.as_subclass(Tagged)}, {"shard": 0}, "x is a Tagged"),
        (
            {"x": SMALL.as_subclass(Tagged)},
            {"placements": "Shard(0), Replicate()"},
            "x is a Tagged",
        ),
        ({"x": np.ma.masked_array(SMALL.numpy())}, {"shard": 0}, "x is a MaskedArray"),
        ({"x": np.zeros(9, "i4,f4")}, {"placements": "Shard(0), Replicate()"}, "x is an array of"),
        (
            {"x": np.array(["a"] * 9)},
            {"placements": "Shard(0), Replicate()"},
            "x is an array of <U1",
        ),
        (
            {"x": np.array([None] * 9)},
            {"placements": "Shard(0), Replicate()"},
            "x is an array of object",
        ),
        ({"x": SMALL}, {"shard": BIG}, "shard is the dim"),
        ({"x": SMALL}, {"shard": 0, "placements": [Shard(0)]}, "exclude each other"),
        (
            {"x": SMALL},
            {"placements": [Shard(0)]},
            r"1 placements for a mesh of 2 dims \(dp=2, tp=2\)",
        ),
        ({"x": SMALL}, {"placements": "Shard(0), Shrad(1)"}, r"'Shrad\(1\)' cannot be made"),
        ({"x": SMALL}, {"placements": [Shard(0), Shard(2)]}, "no dim 2"),
        ({"x": SMALL}, {"placements": BIG}, "is no list of placements"),
        ({"x": SMALL}, {"placements": 3}, "is no list of placements"),
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
        ("{'a': torch.ones(2)}", {"gather": True}, "is a dict"),
        ("torch.ones(2, 2 + rank)", {"gather": True}, "do not fit together along dim 0"),
        ("torch.ones(2)", {"gather": True, "dim": 1}, "no dim 1"),
        ("torch.ones(rank)", {"reduce": "sum"}, r"differs between ranks: Tensor \(0,\) on rank 0"),
        ("[0] * rank", {"reduce": "sum"}, "list of 0 on rank 0"),
        ("'text'", {"reduce": "mean"}, "is a str, which has no mean"),
        ("rank", {"reduce": "maen"}, "did you mean 'mean'"),
        ("rank", {"reduce": "mean", "gather": True}, "exclude each other"),
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


def test_names_that_users_overwrite_do_not_matter(mesh: cm.Mesh) -> None:
    kept = "kept = (rank, device, mesh)\n"
    mesh.cell(kept + "for rank in range(world_size): pass\ndevice, mesh = 'meta', None")
    try:
        mesh.push(x=SMALL, shard=0)
        mesh.push(y=SMALL, placements=[Shard(0), Replicate()])
        assert torch.equal(mesh.pull("x", gather=True), SMALL)
        assert torch.equal(mesh.pull("y", gather=True), SMALL)
    finally:
        mesh.cell("rank, device, mesh = kept")


EIGHT = torch.arange(8.0)
# names -> how a value is made on ranks, what its gathered whole is
GATHERED: dict[str, tuple[str, torch.Tensor]] = {
    "on dp": ("distribute_tensor(torch.arange(8.), mesh['dp'], [Shard(0)])", EIGHT),
    "on tp": ("distribute_tensor(torch.arange(8.), mesh['tp'], [Shard(0)])", EIGHT),
    "replicated on tp": ("distribute_tensor(torch.arange(8.), mesh['tp'], [Replicate()])", EIGHT),
    "no dims": ("distribute_tensor(torch.tensor(3.), mesh, [Replicate()] * 2)", torch.tensor(3.0)),
    "conjugated": ("torch.full((1, 1 << 16), 1 + 2j).conj()", torch.full((4, 1 << 16), 1 - 2j)),
    "negated": ("torch.full((1, 1 << 17), 1 + 2j).conj().imag", torch.full((4, 1 << 17), -2.0)),
    "with a graph": ("torch.ones(1, requires_grad=True) * 2", torch.full((4,), 2.0)),
}


@pytest.mark.parametrize("kind", GATHERED)
def test_gathered_is_the_whole(mesh: cm.Mesh, kind: str) -> None:
    text, whole = GATHERED[kind]
    mesh.cell(
        "from torch.distributed.tensor import DTensor, distribute_tensor, Shard, Replicate\nx = "
        + text
    )
    gathered = mesh.pull("x", gather=True)
    assert torch.equal(gathered, whole)
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


def test_parts_go_to_a_rank_that_replaces_a_dead_one(own_mesh: cm.Mesh) -> None:
    os.kill(own_mesh.report()[1].pid, signal.SIGKILL)
    with pytest.raises((cm.RankDied, cm.RankFailure), match="SIGKILL"):
        own_mesh[1].run(int)
    own_mesh.heal()
    own_mesh.push(x=SMALL, shard=0)
    own_mesh.push(y=SMALL, placements="Shard(0)")
    assert torch.equal(own_mesh.pull("x", gather=True), SMALL)
    assert torch.equal(own_mesh.pull("y", gather=True), SMALL)


@pytest.mark.parametrize(
    "options", [{"shard": 0}, {"placements": [Shard(0), Replicate()]}], ids=str
)
def test_lazily_conjugated_and_negated_tensors_are_split_as_they_read(
    mesh: cm.Mesh, options: Any
) -> None:
    whole = torch.complex(BIG, BIG)[:8].conj()
    mesh.push({"x": whole, "y": whole.imag}, **options)
    assert torch.equal(mesh.pull("x", gather=True), whole)
    assert torch.equal(mesh.pull("y", gather=True), whole.imag)


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("torch.tensor([True, rank == 0])", "sum", torch.tensor([4, 1])),
        ("torch.tensor([200], dtype=torch.uint8)", "sum", torch.tensor([800])),
        ("torch.tensor([200], dtype=torch.uint8)", "mean", torch.tensor([200.0])),
        ("torch.tensor([True, rank == 0])", "mean", torch.tensor([1.0, 0.25])),
        ("np.array([True, rank == 0])", "sum", np.array([4, 1])),
        ("np.array([200], 'u1')", "sum", np.array([800], "u8")),
        ("np.array([200], 'u1')", "mean", np.array([200.0])),
        ("np.array([6e4], 'f2')", "mean", np.array([6e4], "f2")),
        ("np.array([4e4 if rank < 2 else -4e4], 'f2')", "sum", np.array([0.0], "f2")),
        ("np.full(3, rank)", "mean", np.array([1.5] * 3)),
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


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "DTensor.from_local(torch.ones(rank % 2 + 1), mesh['tp'], [Shard(0)], run_check=False, "
            "shape=(3,), stride=(1,))",
            "local part",
        ),
        ("np.ma.masked_array([1, 2], mask=[0, 1])", "MaskedArray"),
        ("torch.ones(3) if rank else np.ones(3)", r"ndarray \(3,\) float64 on rank 0"),
    ],
)
def test_parts_that_are_no_parts_are_refused(mesh: cm.Mesh, text: str, error: str) -> None:
    mesh.cell(
        "import numpy as np\nfrom torch.distributed.tensor import DTensor, Shard\nx = " + text
    )
    with pytest.raises((MeshUsageError, cm.RankFailure), match=error):
        mesh.pull("x", gather=True)


def test_split_tensor_leaves_its_device_before_the_send() -> None:
    there = SimpleNamespace(type="cuda")
    on_gpu = mock.create_autospec(torch.Tensor, instance=True, device=there, requires_grad=True)
    on_gpu.detach.return_value.cpu.return_value = torch.ones(2)
    function, args = reduce_to_cpu(on_gpu)[:2]
    assert torch.equal(made := function(*args), torch.ones(2))
    assert (made.device.type, made.requires_grad) == ("cpu", True)
    assert reduce_to_cpu(torch.ones(2)) is NotImplemented
