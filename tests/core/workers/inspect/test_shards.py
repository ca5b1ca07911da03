"""Where a DTensor's parts lie: as torch itself says, and without its memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from cellmesh.workers.inspect.shards import runs_in_whole
from cellmesh.workers.inspect.summary import describe

SIZES = st.integers(0, 13)


def indices(runs: list[tuple[int, int]]) -> list[int]:
    return [index for begin, end in runs for index in range(begin, end)]


def cut(values: list[int], num_chunks: int, index: int) -> list[int]:
    chunks = torch.tensor(values).chunk(num_chunks) if values else ()
    return chunks[index].tolist() if index < len(chunks) else []


@given(st.lists(SIZES, min_size=1, max_size=3), st.data())
def test_shards_are_cut_as_torch_chunks_them(shape: list[int], data: Any) -> None:
    mesh_shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    kinds = st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])
    placements = [data.draw(kinds) for _ in mesh_shape]
    seen: dict[tuple[int, ...], int] = {}
    for coordinate in itertools.product(*map(range, mesh_shape)):
        runs = runs_in_whole(shape, mesh_shape, coordinate, placements, range(len(mesh_shape)))
        cuts = list(zip(placements, mesh_shape, coordinate, strict=True))
        for dim, size in enumerate(shape):
            wanted = list(range(size))
            for placement, num_chunks, index in cuts:
                if isinstance(placement, Shard) and placement.dim == dim:
                    wanted = cut(wanted, num_chunks, index)
            assert indices(runs[dim]) == wanted
            assert len(runs[dim]) <= 1
        for element in itertools.product(*map(indices, runs)):
            seen[element] = seen.get(element, 0) + 1
    # Every element is held, and by as many ranks.
    copies = [size for size, one in zip(mesh_shape, placements, strict=True) if not one.is_shard()]
    assert len(seen) == math.prod(shape)
    assert set(seen.values()) <= {math.prod(copies)}


@given(SIZES, st.integers(1, 4), st.integers(1, 4))
def test_fsdp_over_tensor_parallelism_cuts_inner_parts(size: int, dp: int, tp: int) -> None:
    """Tensor parallelism has cut first, though it is the later mesh dim: `_StridedShard` says
    so.
    """
    strided = _StridedShard(0, split_factor=tp)
    pieces = strided._split_tensor(torch.arange(size), dp, with_padding=False)[0]
    for row, col in itertools.product(range(dp), range(tp)):
        runs = runs_in_whole([size], [dp, tp], (row, col), [strided, Shard(0)], (0, 1))
        if size % tp == 0 and (size // tp) % dp == 0:
            assert indices(runs[0]) == cut(cut(list(range(size)), tp, col), dp, row)
        assert indices(runs[0]) == cut(pieces[row].tolist(), tp, col)


# ---- DTensors


@pytest.fixture
def world() -> Iterator[None]:
    """A process group that pretends to be rank 3 of 4."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make(
    local: torch.Tensor, placements: list[Any], shape: tuple[int, ...] | None = None
) -> DTensor:

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    size = None if shape is None else torch.Size(shape)
    stride = None if shape is None else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def test_the_part_of_a_dtensor_has_its_place(world: None) -> None:
    facts = describe(make(torch.ones(2, 2), [Shard(0), Shard(1)], (5, 5)))
    assert (facts.shape, facts.local_shape, facts.offset) == ((5, 5), (2, 2), (3, 3))
    assert (facts.mesh_dim_names, facts.coordinate) == (("dp", "tp"), (1, 1))
    assert facts.mesh_ranks == (0, 1, 2, 3)
    assert (facts.shard, facts.note) == ((1, 1), "")


def test_terms_of_a_sum_are_no_replicas(world: None) -> None:
    facts = describe(make(torch.ones(3), [Replicate(), Partial()]))
    assert (facts.shard, facts.max) == ((-1, 1), 1.0)
    assert "each rank holds a term" in facts.note


def test_a_part_in_several_blocks_says_so(world: None) -> None:
    facts = describe(make(torch.ones(2), [Replicate(), _StridedShard(0, split_factor=2)], (4,)))
    assert (facts.offset, facts.placements) == ((1,), "R, StridedShard(0, 2)")
    assert "no single block" in facts.note
