"""DeviceMesh dims and coordinates are read, checked and found."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.mesh_dims import check_mesh, parse_coordinate, parse_mesh, ranks_at
from cellmesh.errors import MeshUsageError

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


DIMS = st.dictionaries(NAMES, st.integers(1, 4), min_size=1, max_size=4)


@given(DIMS, st.sampled_from([",", " ", ", ", "  "]))
def test_dims_are_parsed(dims: dict[str, int], separator: str) -> None:
    text = separator.join(f"{name}={size}" for name, size in dims.items())
    read = parse_mesh(text)
    assert list(read.items()) == list(dims.items())


@pytest.mark.parametrize(
    "text",
    ["", "dp", "dp=", "=2", "dp=0", "dp=-2", "dp=2.0", "dp=x", "2=dp", "dp:2", "dp=2,", "d p=2"],
)
def test_invalid_dims_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeshUsageError, match="is no mesh dim: write them like dp=2,tp=4"):
        parse_mesh(text)


def test_a_dim_given_twice_is_refused() -> None:
    with pytest.raises(MeshUsageError, match="mesh dim 'dp' is given twice"):
        parse_mesh("dp=2,dp=4")


@given(DIMS)
def test_dims_must_multiply_to_the_number_of_ranks(dims: dict[str, int]) -> None:
    product = math.prod(dims.values())
    assert check_mesh(dims, product) == dims
    with pytest.raises(
        MeshUsageError, match=f"makes {product} ranks, and the mesh has {product + 1}"
    ):
        check_mesh(dims, product + 1)


@given(DIMS, st.data())
def test_ranks_at_a_coordinate_are_numbered_as_torch_numbers_them(
    dims: dict[str, int], data: st.DataObject
) -> None:
    import torch

    chosen = data.draw(st.sets(st.sampled_from(list(dims))))
    coordinate = {name: data.draw(st.integers(0, dims[name] - 1)) for name in chosen}
    grid = torch.arange(math.prod(dims.values())).reshape(*dims.values())
    index = tuple(coordinate.get(name, slice(None)) for name in dims)
    assert ranks_at(dims, coordinate) == tuple(grid[index].flatten().tolist())


def test_an_unknown_dim_is_refused_with_those_there_are() -> None:
    with pytest.raises(MeshUsageError, match="no dim 'pp': its dims are dp=2, tp=4"):
        ranks_at({"dp": 2, "tp": 4}, {"pp": 0})
    with pytest.raises(MeshUsageError, match=r"no dim 'shards': .*did you mean 'shard'\?"):
        ranks_at({"replicate": 2, "shard": 4}, {"shards": 0})


@pytest.mark.parametrize("index", [4, -1])
def test_an_index_outside_its_dim_is_refused(index: int) -> None:
    with pytest.raises(MeshUsageError, match=f"tp={index}: dim 'tp' has 4 indices, 0-3"):
        ranks_at({"dp": 2, "tp": 4}, {"tp": index})


@given(st.dictionaries(NAMES, st.integers(0, 100), min_size=1, max_size=4))
def test_coordinates_are_parsed(coordinate: dict[str, int]) -> None:
    assert parse_coordinate(", ".join(f"{n}={i}" for n, i in coordinate.items())) == coordinate


@pytest.mark.parametrize("text", ["", "tp", "tp=", "tp=-1", "tp=x", "=0", "tp=0,,dp=1", "tp 0"])
def test_invalid_coordinates_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        MeshUsageError, match="is no mesh coordinate: write it like tp=0 or dp=1,tp=0"
    ):
        parse_coordinate(text)


def test_a_coordinate_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(MeshUsageError, match="tp"):
        parse_coordinate("tp=0,tp=1")
