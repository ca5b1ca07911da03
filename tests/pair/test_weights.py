"""Copies between meshes without processes: the plan, and the ranks' acts on simulated parts."""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cellmesh.controller.weights import is_cast, plan
from cellmesh.errors import MeshUsageError
from cellmesh.wire.messages import Pickled
from cellmesh.wire.segment_pool import SegmentPool
from cellmesh.wire.weights import (
    DescribeTensors,
    GiveTensors,
    HoldTensors,
    Piece,
    TakeTensors,
    TensorPart,
    lengths,
    shared_volume,
)
from cellmesh.workers import weights
from cellmesh.workers.inspect.shards import runs_in_whole
from cellmesh.workers.weights import WeightsHandler, copy_piece, find_tensors

NAMES = ("trainer.model", "generator.model")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
OTHERS = (torch.bool, torch.int64, torch.uint8, torch.complex64)


def part_of(name: str, whole: torch.Tensor, ranges: Any, memory: int, is_replica: bool) -> Any:
    dtype = str(whole.dtype).removeprefix("torch.")
    return TensorPart(
        name, "", dtype, whole.element_size(), tuple(whole.shape), ranges, (memory, 1), is_replica
    )


def local_of(whole: torch.Tensor, ranges: Any) -> torch.Tensor:
    for dim, runs in enumerate(ranges):
        index = [at for start, length in runs for at in range(start, start + length)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.long))
    return whole.contiguous()


@st.composite
def placed(draw: Any, shape: Sequence[int]) -> tuple[list[Any], bool]:
    """The ranges of each rank of a mesh, and whether the tensor is a DTensor there."""
    mesh_shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    kinds = [Replicate(), *map(Shard, range(len(shape)))]
    placements = [draw(st.sampled_from(kinds)) for _ in mesh_shape]
    if len(placements) == 2 and type(placements[1]) is Shard and draw(st.booleans()):
        # as FSDP2 over tensor parallelism
        placements[0] = _StridedShard(placements[1].dim, split_factor=mesh_shape[1])
    order = [1, 0] if any(isinstance(p, _StridedShard) for p in placements) else range(2)
    order = list(order)[: len(mesh_shape)] if len(mesh_shape) == 2 else [0]
    held = [
        runs_in_whole(shape, mesh_shape, coordinate, placements, order)
        for coordinate in itertools.product(*map(range, mesh_shape))
    ]
    ranges = [
        tuple(tuple((a, b - a) for a, b in dim) or ((0, 0),) for dim in runs) for runs in held
    ]
    return ranges, draw(st.booleans()) or any(not isinstance(p, Replicate) for p in placements)


@given(st.data())
def test_each_target_rank_gets_its_part_whatever_the_placements(data: Any) -> None:
    sources: dict[int, list[TensorPart]] = {}
    targets: dict[int, list[TensorPart]] = {}
    wholes, theirs, ours = {}, {}, {}
    for number in range(data.draw(st.integers(1, 3))):
        name = f"layer.{number}"
        shape = data.draw(st.lists(st.integers(0, 7), max_size=3))
        dtype, into = data.draw(
            st.one_of(
                st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
                st.sampled_from(OTHERS).map(lambda kind: (kind, kind)),
            )
        )
        wholes[name] = torch.randint(0, 9, shape).to(dtype)
        for side, parts, kind, is_source in (
            (sources, theirs, dtype, True),
            (targets, ours, into, False),
        ):
            ranges, is_replica = data.draw(placed(shape))
            for rank, held in enumerate(ranges):
                local = (
                    local_of(wholes[name], held).to(kind)
                    if is_source
                    else torch.zeros(lengths(held), dtype=torch.float32).to(kind)
                )
                memory = 1 + len(parts)
                whole = wholes[name].to(kind)
                side.setdefault(rank, []).append(part_of(name, whole, held, memory, is_replica))
                parts[rank, name] = local
    # Ranks of smaller meshes lack tensors that others have, as stages of a pipeline do.
    decided = plan(sources, targets, NAMES, False)
    given_bytes: dict[int, memoryview] = {}
    for share in decided.shares:
        memory = memoryview(bytearray(share.num_bytes))
        for piece in share.pieces:
            flat = theirs[share.rank, piece.name].reshape(-1).view(torch.uint8)
            memory[piece.at : piece.at + flat.numel()] = flat.numpy().tobytes()
        given_bytes[share.rank] = memory
    for rank, parts in targets.items():
        for part in parts:
            for source, pieces in decided.holds.items():
                for piece in pieces:
                    if piece.name == part.name and rank in decided.readers[source]:
                        copy_piece(piece, given_bytes[source], part, ours[rank, part.name])
            expected = local_of(wholes[part.name], part.ranges).to(ours[rank, part.name].dtype)
            got = ours[rank, part.name].to(torch.complex128)
            assert torch.equal(got, expected.to(torch.complex128)), part
    written = [(p.name, p.ranges) for share in decided.shares for p in share.pieces]
    assert len(written) == len(set(written))  # one of the replicas writes


def side(*ranks: Mapping[str, tuple[int, ...]], dtype: str = "float32", **facts: Any) -> Any:
    """Parts of plain tensors: for each rank, their shapes by name."""
    memory = itertools.count(1)
    return {
        rank: [
            TensorPart(
                name, "", dtype, 4, shape, tuple(((0, size),) for size in shape),
                (next(memory),), **facts,
            )
            for name, shape in each.items()
        ]
        for rank, each in enumerate(ranks)
    }  # fmt: skip


def why(sources: Any, targets: Any, is_same_mesh: bool = False) -> str:
    with pytest.raises(MeshUsageError) as caught:
        plan(sources, targets, NAMES, is_same_mesh)
    return str(caught.value)


def test_names_and_shapes_that_do_not_match_are_named() -> None:
    text = why(side({"a": (2,), "b": (2,), "d": (1,)}), side({"b": (2,), "c": (2,)}))
    assert text == (
        "nothing was copied: 'trainer.model.c' is missing; 'trainer.model.a' is unexpected: "
        "'generator.model' has none; 'trainer.model.d' is unexpected: 'generator.model' has none"
    )
    text = why(side({"a": (2, 3)}), side({"a": (3, 2)}))
    assert "'generator.model.a' is (3, 2), and (2, 3) at the source" in text
    text = why(side({str(n): (1,) for n in range(9)}), side({str(n): (2,) for n in range(9)}))
    assert text.endswith("; and 6 more")
    assert text.count("at the source") == 3
    assert "has no tensors" in why(side({}), side({"a": (2,)}))


def test_names_of_wrappers_on_one_side_are_stripped() -> None:
    plain = {"layer.weight": (2,), "out.bias": (3,)}
    for wrapped in (
        {f"module.{name}": shape for name, shape in plain.items()},
        {f"_orig_mod.{name}": shape for name, shape in plain.items()},
        {f"module._orig_mod.{name}": shape for name, shape in plain.items()},
        {"layer._orig_mod.weight": (2,), "out.bias": (3,)},
    ):
        assert plan(side(wrapped), side(plain), NAMES, False).shares[0].pieces[0].name in wrapped
        assert plan(side(plain), side(wrapped), NAMES, False).holds[0][0].name in wrapped
        assert plan(side(wrapped), side(wrapped), NAMES, False).holds[0][0].name in wrapped
    both = side({"module.a": (1,), "a": (1,)})  # not two names for one
    assert "'trainer.model.module.a' is unexpected" in why(both, side({"a": (1,)}))


def test_replicas_are_spread_and_other_tensors_taken_from_the_lowest_rank() -> None:
    names = {f"{number}": (4,) for number in range(6)}
    spread = plan(side(names, names, names, is_replica=True), side(names), NAMES, False)
    assert {share.rank: len(share.pieces) for share in spread.shares} == {0: 2, 1: 2, 2: 2}
    (share,) = plan(side(names, names), side(names), NAMES, False).shares
    assert share.rank == 0


def test_tied_tensors_are_written_once_and_must_be_tied_at_the_source() -> None:
    names = {"embed": (4,), "head": (4,)}

    def tied(parts: Any) -> Any:
        return {
            rank: [msgspec.structs.replace(part, memory=(7,)) for part in each]
            for rank, each in parts.items()
        }

    decided = plan(tied(side(names)), side(names), NAMES, False)
    assert len(decided.shares[0].pieces) == 1
    assert [(piece.name, piece.at) for piece in decided.holds[0]] == [("embed", 0), ("head", 0)]
    assert (
        plan(tied(side(names)), tied(side(names)), NAMES, False).shares[0].pieces[0].name == "embed"
    )
    assert "'generator.model.head' and 'generator.model.embed' are one tensor, but two" in why(
        side(names), tied(side(names))
    )


def test_the_same_tensor_is_refused_and_the_same_name_elsewhere_is_not() -> None:
    assert "is the same tensor at the source" in why(side({"a": (2,)}), side({"a": (2,)}), True)
    plan(side({"a": (2,)}), side({"a": (2,)}), NAMES, False)  # equal addresses, other processes
    ranks = side({"a": (2,)}, {"a": (2,)})
    plan({0: ranks[0]}, {1: ranks[1]}, NAMES, True)


def test_ranks_that_differ_and_parts_that_are_missing_are_named() -> None:
    text = why(side({"a": (2,)}, {"a": (3,)}), side({"a": (2,)}))
    assert "'trainer.model.a' is (2,) float32 on rank 0, and (3,) float32 on rank 1" in text
    half = {0: [TensorPart("a", "", "float32", 4, (4,), (((0, 2),),), (1,), True)]}
    assert "2 elements of 'trainer.model.a' are on ranks" in why(half, side({"a": (4,)}))
    only = {0: [TensorPart("a", "is a meta tensor")]}
    assert "'generator.model.a' is a meta tensor" in why(side({"a": (4,)}), only)


def test_dtypes_are_converted_only_where_values_keep_their_kind() -> None:
    for source, target, expected in (
        ("float32", "bfloat16", True), ("bfloat16", "float8_e4m3fn", True),
        ("float64", "float16", True), ("complex64", "complex128", True), ("bool", "bool", True),
        ("int32", "int64", True), ("uint8", "int16", True), ("uint8", "uint16", True),
        ("int64", "int32", False), ("int8", "uint16", False), ("uint8", "int8", False),
        ("int64", "float32", False), ("float32", "int64", False), ("bool", "int8", False),
        ("complex64", "float32", False), ("float32", "complex64", False),
        ("qint8", "qint8", True), ("qint8", "int16", False),
    ):  # fmt: skip
        assert is_cast(source, target) is expected, (source, target)


# ---------------------------------------------------------------- the handler of one rank


class Rank:
    """A rank's handler, with a namespace."""

    def __init__(self, **names: Any) -> None:
        self.names = names
        context: Any = types.SimpleNamespace(
            shell=types.SimpleNamespace(user_ns=names),
            groups=types.SimpleNamespace(rank=0),
            interrupts=contextlib.nullcontext(),
        )
        self.handler = WeightsHandler(context)

    def ask(self, request: Any, buffers: Any = ()) -> Any:
        return self.handler.handle(request, buffers)

    def describe(self, expression: str, is_target: bool = True, copies: Any = ()) -> Any:
        answer = self.ask(DescribeTensors(expression, is_target, copies))
        return {0: msgspec.msgpack.decode(answer, type=list[TensorPart])}


def copy(source: Rank, expression: str, target: Rank, into: str) -> int:
    names = expression, into
    decided = plan(
        source.describe(expression, False), target.describe(into), names, source is target
    )
    if decided.shares:
        give = GiveTensors(expression, decided.shares)
        pickled, buffers = source.ask(give)
        target.ask(HoldTensors(1, decided.holds[0], pickled), tuple(buffers))
    return target.ask(TakeTensors(1, into))


def problem(value: Any, is_target: bool = True) -> str:
    parts = Rank(x=value).describe("x", is_target)[0]
    return "; ".join(part.problem for part in parts if part.problem)


def test_views_dtypes_empty_tensors_and_nests_are_copied_in_place() -> None:
    made = torch.randn(6, 4)
    source = Rank(x={
        "view": made.t()[1:3], "list": [made[::2, ::3], None, made.clone()], "zero": made[:0],
        "number": torch.tensor(3.5), "bool": torch.tensor([True, False]),
        "complex": torch.view_as_complex(torch.randn(3, 2)).conj(), "int": torch.arange(3),
        "fp8": torch.randn(4).to(torch.float8_e5m2), "images": torch.randn(2, 3, 4, 4).to(
            memory_format=torch.channels_last
        ),
    })  # fmt: skip
    below = torch.zeros(8, 9)
    target = Rank(y={
        "view": torch.zeros(6, 2).t(),
        "list": [torch.zeros(3, 2).double(), below.t()[:6, :4]], "zero": torch.zeros(0, 4),
        "number": torch.tensor(0.0), "bool": torch.zeros(2, dtype=torch.bool),
        "complex": torch.zeros(3, dtype=torch.complex128), "int": torch.zeros(3, dtype=torch.long),
        "fp8": torch.zeros(4).to(torch.float8_e4m3fn), "images": torch.zeros(2, 3, 4, 4),
    })  # fmt: skip
    target.names["y"]["list"].insert(1, None)
    assert copy(source, "x", target, "y") == 10
    x, y = source.names["x"], target.names["y"]
    for name in x.keys() - {"list", "fp8"}:
        assert torch.equal(x[name].resolve_conj().to(y[name].dtype), y[name]), name
    assert torch.equal(y["fp8"].float(), x["fp8"].to(torch.float8_e4m3fn).float())
    assert torch.equal(y["list"][0], x["list"][0].double())
    assert torch.equal(below.t()[:6, :4], made)
    assert not below[4:].any()


def test_parameters_are_written_under_no_grad_and_their_version_grows() -> None:
    source, target = Rank(m=nn.Linear(3, 2)), Rank(m=nn.Linear(3, 2))
    weight = target.names["m"].weight
    before, pointer = weight._version, weight.data_ptr()
    loss = target.names["m"](torch.ones(1, 3, requires_grad=True)).square().sum()
    copy(source, "m", target, "m")
    assert weight._version > before
    assert weight.data_ptr() == pointer
    assert weight.requires_grad
    assert torch.equal(weight, source.names["m"].weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        target.names["frozen"] = nn.Linear(3, 2)
    copy(source, "m", target, "frozen")
    assert torch.equal(target.names["frozen"].weight, weight)


def test_a_module_has_what_its_state_dict_has() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("cache", torch.ones(3), persistent=False)
    assert [*find_tensors(module)] == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    ]  # fmt: skip


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    assert "is a meta tensor" in problem(torch.empty(2, device="meta"))
    assert "no plain, dense tensor" in problem(torch.eye(2).to_sparse())
    assert "run the model once" in problem(nn.LazyLinear(2))
    assert problem({"lr": 0.1}) == "is a float: only tensors are copied"
    assert "expanded view" in problem(torch.zeros(1).expand(3))
    assert problem(torch.zeros(1).expand(3), is_target=False) == ""
    assert problem({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}).startswith("is the name of")
    rank = Rank(x=torch.zeros(2), m=nn.Linear(2, 2))
    for made in ("x * 2", "{'y': x.clone()}"):
        (part,) = rank.describe(made)[0]
        assert "is a new tensor at each evaluation" in part.problem
    assert not any(part.problem for part in rank.describe("m.state_dict()")[0])


def test_held_pieces_are_dropped_and_a_changed_target_is_not_written() -> None:
    rank = Rank(x=torch.zeros(4))
    piece = Piece("", "float32", (((0, 4),),), 0)
    data = bytes(torch.ones(4).numpy())

    def hold(copy: int) -> None:
        rank.ask(HoldTensors(copy, (piece,), Pickled(b"N.", 1)), (data,))

    hold(1)
    assert rank.describe("()") == {0: []}  # after a failure
    hold(2)
    rank.describe("x", copies=(3,))  # of another notebook, which does not know copy 2
    for copy in (1, 2):
        with pytest.raises(MeshUsageError, match="has changed since"):
            rank.ask(TakeTensors(copy, "x"))
    hold(3)
    rank.names["x"] = torch.zeros(5)
    with pytest.raises(MeshUsageError, match="has changed since"):
        rank.ask(TakeTensors(3, "x"))
    assert not rank.names["x"].any()
    assert not rank.handler._held


def test_mappings_are_kept_for_the_next_copy_and_dropped_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "KEEP_S", 0.05)
    pool, rank = SegmentPool("cellmesh-test"), Rank(x=torch.zeros(4))
    piece = Piece("", "float32", (((0, 4),),), 0)
    ended, kept = list[int](), set[int]()
    for number in (1, 2):
        segment = pool.take(4096, ended)
        segment.fill([bytes(torch.full((4,), float(number)).numpy())])
        ended.append(number)
        frame = pool.lend(segment, number, [4096])
        rank.ask(HoldTensors(number, (piece,), Pickled(b"N.", 1, True)), (bytes(frame),))
        kept |= {id(each) for each in rank.handler._kept.values()}
        rank.ask(TakeTensors(number, "x"))
        assert rank.names["x"].tolist() == [number] * 4
    assert len(kept) == 1
    rank.handler._timer.join(60)
    assert not rank.handler._kept
    rank.handler._kept[1] = memoryview(b"")
    rank.ask(HoldTensors(3, (piece,), Pickled(b"N.", 1)), (bytes(16),))
    rank.describe("()")  # after a failure
    assert not rank.handler._kept


def test_overlaps_of_ranges_count_each_shared_element_once() -> None:
    first, second = (((0, 2), (4, 2)), ((0, 3),)), (((1, 4),), ((1, 5),))
    assert shared_volume(first, second) == 2 * 2
    assert math.prod(lengths(first)) == 12
