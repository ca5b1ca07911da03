"""Of a value that is pushed in parts, each rank needs the bytes that its part lies in."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.controller.values.needed import find_needed, span_of
from cellmesh.controller.values.sharding import _boxes, reduce_to_cpu
from cellmesh.wire import payload
from cellmesh.wire.segments import offsets
from cellmesh.wire.values import plain_box

RANKS = (0, 1, 2, 3)
SIZE = 4 << 20  # of a float32 matrix of 1024 x 1024


def needed(*leaves: Any, dim: int = 0, placed: Any = None, extra: int = 0) -> dict[int, Any]:
    _, buffers = payload.dumps(leaves, "x", reduce_to_cpu)
    sizes = [*(len(buffer) for buffer in buffers), *([extra] if extra else [])]
    boxes = functools.partial(_boxes, RANKS, dim, placed, (2, 2))
    return find_needed(leaves, buffers, sizes, boxes)


def matrix(kind: str) -> Any:
    return torch.ones(1024, 1024) if kind == "torch" else np.ones((1024, 1024), np.float32)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_rank_needs_its_rows(kind: str) -> None:
    quarter = SIZE // 4
    assert needed(matrix(kind)) == {r: ((r * quarter, (r + 1) * quarter),) for r in RANKS}


def test_part_of_columns_reaches_from_its_first_element_to_its_last() -> None:
    assert needed(matrix("torch"), dim=1)[1] == ((1024, SIZE - 2048),)


def test_placements_divide_rows_among_the_first_dim_of_the_mesh() -> None:
    half = SIZE // 2
    found = needed(matrix("torch"), placed=(0, None))
    assert found == {r: (((r // 2) * half, (r // 2 + 1) * half),) for r in RANKS}


def test_values_and_the_pickle_lie_one_behind_the_other() -> None:
    first, second = matrix("torch"), matrix("numpy")
    found = needed(first, second, extra=1000)
    _, at, pickled = offsets([SIZE, SIZE, 1000])
    row = SIZE // 4
    assert found[3] == ((3 * row, SIZE), (at + 3 * row, at + SIZE), (pickled, pickled + 1000))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1024, 1024).t(),
        lambda: torch.ones(1024, 2048)[:, :1024],
        lambda: np.asfortranarray(np.ones((1024, 1024), np.float32)),
    ],
)
def test_memory_that_is_not_in_c_order_is_needed_whole(make: Any) -> None:
    value = make()
    _, buffers = payload.dumps(value, "x", reduce_to_cpu)
    assert needed(value) == {r: ((0, len(buffers[0])),) for r in RANKS}


def test_memory_that_another_value_shares_is_needed_whole() -> None:
    whole = np.ones((1024, 1024), np.float32)
    found = needed(whole, whole[512:])
    (at, end) = found[0][0]
    assert (at, end) == (0, SIZE)


def test_read_only_array_is_divided() -> None:
    frozen = np.frombuffer(bytes(SIZE), np.float32).reshape(1024, 1024)
    assert needed(frozen)[0] == ((0, SIZE // 4),)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_span_has_every_element_of_the_part(dim: int) -> None:
    shape = (6, 5, 7)
    whole = np.arange(6 * 5 * 7, dtype=np.int16).reshape(shape)
    for index in range(3):
        box = plain_box(shape, dim, 3, index)
        start, stop = span_of(box, shape, whole.nbytes)
        part = whole[tuple(slice(at, at + n) for at, n in box)]
        assert (start, stop) == (int(part.min()) * 2, int(part.max()) * 2 + 2)


def test_pickle_is_unchanged_by_a_hole_beside_the_part() -> None:
    value = torch.arange(1 << 20, dtype=torch.float32)
    pickled, buffers = payload.dumps({"x": value}, "x")
    start, stop = needed(value)[2][0]
    sent = bytearray(len(buffers[0]))
    sent[start:stop] = bytes(buffers[0])[start:stop]
    there = pickle.loads(pickled.stream, buffers=[sent])["x"]
    assert torch.equal(there.tensor_split(4)[2], value.tensor_split(4)[2])
