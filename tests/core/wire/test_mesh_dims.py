"""DeviceMesh dims and coordinates are read, checked and found."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import MeshUsageError
from cellmesh.wire.mesh_dims import check_mesh, parse_coordinate, parse_mesh, ranks_at

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)

DIMS = st.dictionaries(NAMES, st.integers(1, 4), min_size=1, max_size=4)


@given(DIMS, st.sampled_from([",", " ", ", ", "  "]))
def test_dims_are_parsed(dims: dict[str, int], separator: str) -> None:
    read = parse_mesh(separator.join(f"{name}={size}" for name, size in dims.items()))
    assert list(read.items()) == list(dims.items())


@given(DIMS)
def test_dims_must_multiply_to_the_number_of_ranks(dims: dict[str, int]) -> None:
    product = math.prod(dims.values())
    assert check_mesh(dims, product) == dims
    with pytest.raises(MeshUsageError, match=f"makes {product} ranks, and .* has {product + 1}"):
        check_mesh(dims, product + 1)


@given(DIMS, st.data())
def test_ranks_are_numbered_as_by_torch(dims: dict[str, int], data: st.DataObject) -> None:
    import torch

    chosen = data.draw(st.sets(st.sampled_from(list(dims))))
    coordinate = {name: data.draw(st.integers(0, dims[name] - 1)) for name in chosen}
    grid = torch.arange(math.prod(dims.values())).reshape(*dims.values())
    index = tuple(coordinate.get(name, slice(None)) for name in dims)
    assert ranks_at(dims, coordinate) == tuple(grid[index].flatten().tolist())


NO_DIM = "is no mesh dim: write them like dp=2,tp=4"
NO_COORDINATE = "is no mesh coordinate: write it like tp=0 or dp=1,tp=0"
DIMS_OF_8 = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("read", "texts", "error"),
    [
        (parse_mesh, ["", "dp", "=2", "dp=0", "dp=2.0", "2=dp", "dp:2", "dp=2,", "d p=2"], NO_DIM),
        (parse_mesh, ["dp=2,dp=4"], "'dp=2,dp=4' gives 'dp' twice"),
        (parse_coordinate, ["", "tp", "tp=-1", "tp=x", "=0"], NO_COORDINATE),
        (parse_coordinate, ["tp=0,tp=1"], "'tp=0,tp=1' gives 'tp' twice"),
    ],
)
def test_text_of_another_form_is_refused(read: Any, texts: list[str], error: str) -> None:
    for text in texts:
        with pytest.raises(MeshUsageError, match=error):
            read(text)


@pytest.mark.parametrize(
    ("dims", "coordinate", "error"),
    [
        (DIMS_OF_8, {"pp": 0}, "no dim 'pp': its dims are dp=2, tp=4"),
        ({"replicate": 2, "shard": 4}, {"shards": 0}, r"no dim 'shards': .*mean 'shard'\?"),
        (DIMS_OF_8, {"tp": 4}, "tp=4: dim 'tp' has 4 indices, 0-3"),
    ],
)
def test_coordinate_outside_the_mesh_is_refused(dims: Any, coordinate: Any, error: str) -> None:
    with pytest.raises(MeshUsageError, match=error):
        ranks_at(dims, coordinate)
