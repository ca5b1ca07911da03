"""What may be asked of a mesh, and how what cannot be is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.options import (
    MAX_RANKS,
    Options,
    check_mesh,
    did_you_mean,
    make_options,
    parse_coordinate,
    parse_duration,
    parse_mesh,
    ranks_at,
    read_project_options,
)
from cellmesh.errors import MeshUsageError

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
DIMS = st.dictionaries(NAMES, st.integers(1, 4), min_size=1, max_size=4)


# ---- dims


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


@pytest.mark.parametrize(
    "dims",
    [
        {"dp": -2, "tp": -4},
        {"dp": 8.0},
        {"dp": True, "tp": 8},
        {"dp": "8"},
        {"": 8},
        {"data parallel": 8},
        {3: 8},
    ],
    ids=repr,
)
def test_a_mapping_that_names_no_dims_is_refused(dims: Any) -> None:
    with pytest.raises(MeshUsageError):
        make_options(8, mesh=dims)


# ---- spans of time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("30m", 1800),
        ("30 min", 1800),
        ("1.5h", 5400),
        (" 2d ", 172800),
        (".5s", 0.5),
    ],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "30x", "-5", "5m3s", "nan", "1e3", "30 m m"])
def test_invalid_durations_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeshUsageError, match="is no span of time: write it like 30m"):
        parse_duration(text)


def test_host_lease_is_seconds_or_text_within_bounds() -> None:
    assert make_options(2).host_lease_s == 10.0
    assert make_options(2, host_lease_s="2m").host_lease_s == 120.0
    for value in (0, 0.5, "2h", -1, True):
        with pytest.raises(MeshUsageError, match=r"host.lease"):
            make_options(2, host_lease_s=value)  # type: ignore[arg-type]


def test_leases_and_patience_are_seconds_or_text() -> None:
    options = make_options(2, lease_s="30m", settle_s=2, on_error="wait", auto_heal=True)
    assert (options.lease_s, options.settle_s, options.on_error, options.auto_heal) == (
        1800,
        2,
        "wait",
        True,
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("lease_s", value) for value in (-1, True, None, [], "soon", float("inf"), float("nan"))),
        *(("settle_s", value) for value in (-0.5, "x")),
        *(("on_error", value) for value in ("stop", "", 1)),
        *(("auto_heal", value) for value in ("yes", 1, None)),
    ],
)
def test_invalid_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(MeshUsageError, match=f"{option} must be|is no span"):
        make_options(2, **{option: value})


# ---- options


def test_by_default_all_ranks_are_in_one_dim() -> None:
    assert make_options(8) == Options(8, {"dp": 8}, "auto", (), "")


def test_every_option_is_taken() -> None:
    options = make_options(
        8, mesh="dp=2,tp=4", backend="gloo", preload="numpy, a.b", name="my-mesh_1"
    )
    assert options == Options(8, {"dp": 2, "tp": 4}, "gloo", ("numpy", "a.b"), "my-mesh_1")


def test_the_dims_give_the_number_of_ranks() -> None:
    assert make_options(mesh={"dp": 2, "tp": 4}).num_ranks == 8
    assert make_options(mesh="dp=3").num_ranks == 3


@pytest.mark.parametrize("num_ranks", [0, -1, MAX_RANKS + 1, 10**30])
def test_a_number_of_ranks_that_cannot_be_is_refused(num_ranks: int) -> None:
    with pytest.raises(MeshUsageError, match=f"must be 1 to {MAX_RANKS}, not {num_ranks}"):
        make_options(num_ranks)


@pytest.mark.parametrize("num_ranks", [None, "eight", "8", 8.0, True, [8]], ids=repr)
def test_invalid_numbers_of_ranks_are_refused(num_ranks: Any) -> None:
    with pytest.raises(
        MeshUsageError, match=r"must be a whole number, not .*: say how many, like 8"
    ):
        make_options(num_ranks)


@pytest.mark.parametrize("num_ranks", [1, MAX_RANKS])
def test_the_limits_themselves_are_allowed(num_ranks: int) -> None:
    assert make_options(num_ranks).num_ranks == num_ranks


def test_dims_that_do_not_multiply_to_the_number_are_refused() -> None:
    with pytest.raises(MeshUsageError, match="dp=2 x tp=3 makes 6 ranks, and the mesh has 8"):
        make_options(8, mesh="dp=2,tp=3")


@pytest.mark.parametrize(("backend", "near"), [("glo", "gloo"), ("ncll", "nccl"), ("Auto", "auto")])
def test_an_unknown_backend_names_the_nearest(backend: str, near: str) -> None:
    with pytest.raises(MeshUsageError, match=f"no backend '{backend}'.*did you mean '{near}'"):
        make_options(2, backend=backend)


def test_an_unknown_backend_near_none_names_them_all() -> None:
    with pytest.raises(MeshUsageError, match=r"no backend 'xyz' \(auto, gloo or nccl\)$"):
        make_options(2, backend="xyz")


@pytest.mark.parametrize(
    "preload", ["my module", "a-b", "a..b", ".a", ["ok", "not ok"], "3d"], ids=repr
)
def test_invalid_module_names_are_refused(preload: Any) -> None:
    with pytest.raises(MeshUsageError, match=r"--preload .* is no module's name"):
        make_options(2, preload=preload)


@pytest.mark.parametrize("preload", ["a,b", "a, b,", ["a", "b"], ("a", "b")], ids=repr)
def test_modules_are_given_as_text_or_as_a_list(preload: Any) -> None:
    assert make_options(2, preload=preload).preload == ("a", "b")


@pytest.mark.parametrize(
    "name", ["a b", "a/b", "..", "x" * 41, "näme", "a\n", "-rf", "-"], ids=repr
)
def test_a_name_that_makes_no_directory_is_refused(name: str) -> None:
    with pytest.raises(MeshUsageError, match="is no name"):
        make_options(2, name=name)


WRONG_TYPES = {"mesh": 3, "backend": 3, "preload": 3, "name": 3}


@pytest.mark.parametrize(("option", "value"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused(option: str, value: Any) -> None:
    with pytest.raises(MeshUsageError):
        make_options(2, **{option: value})


# ---- the project's options


def test_the_projects_table_gives_options(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.cellmesh]\nnum_ranks = 4\nmesh = "dp=2,tp=2"\npreload = ["json"]\nbackend = "gloo"\n'
    )
    options = make_options(**read_project_options(tmp_path))
    assert options == Options(4, {"dp": 2, "tp": 2}, "gloo", ("json",), "")


def test_dims_may_be_a_table(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.cellmesh.mesh]\ndp = 2\ntp = 2\n")
    assert make_options(**read_project_options(tmp_path)).mesh == {"dp": 2, "tp": 2}


def test_the_nearest_project_counts(tmp_path: Path) -> None:
    inner = tmp_path / "inner" / "deep"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.cellmesh]\nnum_ranks = 2\n")
    assert read_project_options(inner) == {"num_ranks": 2}
    (tmp_path / "inner" / "pyproject.toml").write_text("[tool.cellmesh]\nnum_ranks = 3\n")
    assert read_project_options(inner) == {"num_ranks": 3}


@pytest.mark.parametrize("text", ["", "[project]\nname = 'x'\n", "[tool.other]\nx = 1\n"])
def test_a_project_without_a_table_gives_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert read_project_options(tmp_path) == {}


def test_an_unknown_key_names_its_file_and_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.cellmesh]\nnum_rank = 2\n")
    with pytest.raises(
        MeshUsageError, match=r"pyproject.toml: .*'num_rank'.*did you mean 'num_ranks'\?"
    ):
        read_project_options(tmp_path)


BAD_FILES = {
    "no TOML": b"[tool",
    "no UTF-8": b"\xff\xfe",
    "tool is no table": b"tool = 3",
    "cellmesh is no table": b"[tool]\ncellmesh = 3",
    "cellmesh is a list": b"[[tool.cellmesh]]\nnum_ranks = 2",
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_does_not_parse_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    with pytest.raises(MeshUsageError, match=r"pyproject\.toml"):
        read_project_options(tmp_path)


# ---- coordinates


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


def test_the_nearest_word_is_suggested() -> None:
    assert did_you_mean("backed", ["backend", "mesh"]) == "; did you mean 'backend'?"
    assert did_you_mean("zzz", ["backend", "mesh"]) == ""
