"""Options of a start are checked, and read from the project's pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cellmesh.controller.options import (
    MAX_RANKS,
    Options,
    make_options,
    parse_duration,
    read_project_options,
)
from cellmesh.errors import MeshUsageError


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
        *(("fold_numbers", value) for value in ("yes", 1, None)),
    ],
)
def test_invalid_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(MeshUsageError, match=f"{option} must be|is no span"):
        make_options(2, **{option: value})


@pytest.mark.parametrize("option", ["sync", "fold_numbers"])
@pytest.mark.parametrize(("value", "switch"), [("on", True), ("off", False), (False, False)])
def test_switches_are_on_or_off_or_true_or_false(option: str, value: Any, switch: bool) -> None:
    assert getattr(make_options(2), option) is True
    assert getattr(make_options(2, **{option: value}), option) is switch


def test_by_default_all_ranks_are_in_one_dim() -> None:
    assert make_options(8) == Options(num_ranks=8, mesh={"dp": 8})


def test_every_option_is_taken() -> None:
    options = make_options(
        8, mesh="dp=2,tp=4", backend="gloo", preload="numpy, a.b", name="my-mesh_1"
    )
    assert options == Options(
        num_ranks=8,
        mesh={"dp": 2, "tp": 4},
        backend="gloo",
        preload=("numpy", "a.b"),
        name="my-mesh_1",
    )


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
    with pytest.raises(MeshUsageError, match=f"not '{backend}'; did you mean '{near}'"):
        make_options(2, backend=backend)


def test_an_unknown_backend_near_none_names_them_all() -> None:
    with pytest.raises(MeshUsageError, match=r"backend must be auto, gloo or nccl, not 'xyz'$"):
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


WRONG_TYPES = {"mesh": 3, "backend": 3, "preload": 3, "name": 3, "hosts": 3, "nodes": "two"}


@pytest.mark.parametrize(("option", "value"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused(option: str, value: Any) -> None:
    with pytest.raises(MeshUsageError):
        make_options(2, **{option: value})


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(
        MeshUsageError, match=r"'bakend', which is no option .*did you mean 'backend'"
    ):
        make_options(2, **{"bakend": "gloo"})  # type: ignore[arg-type]


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


def test_the_projects_table_gives_options(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.cellmesh]\nnum_ranks = 4\nmesh = "dp=2,tp=2"\npreload = ["json"]\nbackend = "gloo"\n'
    )
    options = make_options(**read_project_options(tmp_path))
    assert options == Options(
        num_ranks=4, mesh={"dp": 2, "tp": 2}, backend="gloo", preload=("json",)
    )


def test_options_of_a_start_that_are_no_field_of_a_mesh_are_known(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.cellmesh]\nnproc_per_host = 4\n")
    assert read_project_options(tmp_path) == {"nproc_per_host": 4}


@pytest.mark.parametrize("key", ["command", "job", "is_lease_chosen"])
def test_what_only_a_start_decides_is_no_option(tmp_path: Path, key: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.cellmesh]\n{key} = 'x'\n")
    with pytest.raises(MeshUsageError, match=f"{key!r}, which is no option"):
        read_project_options(tmp_path)


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
