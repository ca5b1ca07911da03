"""Options of a start are checked, and read from the project's pyproject.toml."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cellmesh.controller.options import (
    MAX_RANKS,
    Options,
    make_options,
    parse_duration,
    read_environment,
    read_gpus,
    read_project_options,
)
from cellmesh.errors import MeshUsageError
from cellmesh.magics.options import parse


def refuses(match: str, num_ranks: Any = 2, **options: Any) -> None:
    """Check that a start with these is refused by a message that has this text."""
    with pytest.raises(MeshUsageError, match=match):
        make_options(num_ranks, **options)


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("lease_s", (-1, True, None, [], "soon", math.inf, math.nan), "lease_s must|is no span"),
        ("host_lease_s", (-1, True), r"host.lease"),
        ("settle_s", (-0.5, "x"), "settle_s must be|is no span"),
        ("auto_heal", ("yes", 1, None), "auto_heal must be"),
        ("fold_numbers", ("yes", 1, None), "fold_numbers must be"),
        ("group", ("no", 1, None), "group must be"),
        ("preload", ("a-b", "a..b", ".a", ["ok", "not ok"], "3d"), "no module's name"),
        ("name", ("a b", "a/b", "..", "x" * 41, "näme", "a\n", "-rf", "-"), "is no name"),
        ("mesh", ({"dp": -2, "tp": -1}, {"dp": 2.0}, {"dp": True, "tp": 2}), "whole number"),
        ("mesh", ({"": 2}, {"data parallel": 2}, {3: 2}), "no mesh dim's name"),
        *((option, (3,), f"{option} must be") for option in ("mesh", "backend", "preload")),
        *((option, (3,), f"{option} must be") for option in ("name", "hosts")),
        ("nodes", ("two",), "nodes must be"),
        ("mesh", ("dp=2,tp=3",), "dp=2 x tp=3 makes 6 ranks, and the mesh has 2"),
        ("backend", ("glo",), "not 'glo'; did you mean 'gloo'"),
        ("backend", ("Auto",), "not 'Auto'; did you mean 'auto'"),
        ("backend", ("xyz",), r"backend must be auto, gloo or nccl, not 'xyz'$"),
        ("bakend", ("gloo",), "'bakend', which is no option .*did you mean 'backend'"),
    ],
)
def test_invalid_options_are_refused_by_name(option: str, values: Any, message: str) -> None:
    for value in values:
        refuses(message, **{option: value})


def test_every_option_is_taken() -> None:
    given = {"mesh": "dp=2,tp=4", "backend": "gloo", "preload": "numpy, a.b,", "name": "my-mesh_1"}
    read = given | {"mesh": {"dp": 2, "tp": 4}, "preload": ("numpy", "a.b")}
    assert make_options(8, **given) == Options(num_ranks=8, **read)  # type: ignore[arg-type]
    assert make_options(8) == Options(num_ranks=8, mesh={"dp": 8})
    assert make_options(mesh={"dp": 2, "tp": 4}).num_ranks == 8
    spans = make_options(2, lease_s="30m", host_lease_s="2m", settle_s=2)
    assert (spans.lease_s, spans.host_lease_s, spans.settle_s) == (1800, 120, 2)
    for value, is_on in {"on": True, "off": False, False: False}.items():
        assert make_options(2, sync=value).sync is is_on  # type: ignore[arg-type]


def test_numbers_of_ranks_have_limits() -> None:
    for num_ranks in (0, -1, MAX_RANKS + 1, 10**30):
        refuses(f"must be 1 to {MAX_RANKS}, not {num_ranks}", num_ranks)
    for no_number in (None, "8", 8.0, True, [8]):
        refuses("must be a whole number, not .*: say how many, like 8", no_number)
    assert [make_options(num_ranks).num_ranks for num_ranks in (1, MAX_RANKS)] == [1, MAX_RANKS]


def test_durations_are_parsed() -> None:
    spans = {
        "0": 0,
        "90": 90,
        "30m": 1800,
        "30 min": 1800,
        "1.5h": 5400,
        " 2d ": 172800,
        ".5s": 0.5,
    }
    assert {text: parse_duration(text) for text in spans} == spans


@pytest.mark.parametrize("text", ["", "m", "30x", "-5", "5m3s", "nan", "1e3", "30 m m"])
def test_invalid_durations_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(MeshUsageError, match="is no span of time: write it like 30m"):
        parse_duration(text)


def project_options(directory: Path, text: str) -> dict[str, Any]:
    """Return the options that a project's file with this text gives."""
    (directory / "pyproject.toml").write_text(text)
    return dict(read_project_options(directory))


def test_the_nearest_projects_table_gives_options(tmp_path: Path) -> None:
    text = '[tool.cellmesh]\nnum_ranks = 4\npreload = ["json"]\n[tool.cellmesh.mesh]\ndp = 4'
    assert make_options(**project_options(tmp_path, text)) == Options(
        num_ranks=4, mesh={"dp": 4}, preload=("json",)
    )
    inner = tmp_path / "inner" / "deep"
    inner.mkdir(parents=True)
    assert read_project_options(inner)["num_ranks"] == 4
    assert project_options(inner.parent, "[tool.cellmesh]\nnproc_per_host = 4\n") == {
        "nproc_per_host": 4
    }
    assert read_project_options(inner) == {"nproc_per_host": 4}


BAD_FILES = {
    "no TOML": (b"[tool", ""),
    "no UTF-8": (b"\xff\xfe", ""),
    "tool is no table": (b"tool = 3", ""),
    "cellmesh is a list": (b"[[tool.cellmesh]]\nnum_ranks = 2", ""),
    "no option": (b"[tool.cellmesh]\nnum_rank = 2\n", r".*'num_rank'.*did you mean 'num_ranks'\?"),
    "what a start decides": (b"[tool.cellmesh]\njob = '2'\n", ".*'job', which is no option"),
}


@pytest.mark.parametrize(("content", "why"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)
    with pytest.raises(MeshUsageError, match=rf"pyproject\.toml{why}"):
        read_project_options(tmp_path)


# ---- variables and GPUs

SET = {"HOME": "/root", "EMPTY": ""}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("HOME", {"HOME": "/root"}),
        (["HOME", "EMPTY"], {"HOME": "/root", "EMPTY": ""}),
        (["A=b=c", "E="], {"A": "b=c", "E": ""}),
        ({"A": "b", "HOME": "/x"}, {"A": "b", "HOME": "/x"}),
    ],
)
def test_variables_are_read(given: Any, read: dict[str, str]) -> None:
    assert read_environment(given, SET) == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("NOT_SET", r"NOT_SET is not set in the notebook.*--env NOT_SET=value"),
        ("RANK=3", "the mesh sets RANK on each rank"),
        ("CUDA_VISIBLE_DEVICES=0", "--gpus chooses GPUs"),
        ("2X=1", "'2X' is no name"),
        ("=1", "'' is no name"),
        (7, "of type int"),
        ([7], "of type int"),
        ({"A": 7}, "the value of A must be text"),
        ({"A": "secret\0"}, "the value of A must be text"),
    ],
)
def test_wrong_variables_are_refused(given: Any, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message) as caught:
        read_environment(given, SET)
    assert "secret" not in str(caught.value)


def test_gpus_are_read() -> None:
    pairs = ("0,2", ("0", "2")), (3, ("3",)), ([0, "2"], ("0", "2")), ("none", ()), ([], ())
    for given, read in (*pairs, ("GPU-8932f937-d72c", ("GPU-8932f937-d72c",))):
        assert read_gpus(given) == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0,x", "'x' is no GPU"),
        ("-1", "'-1' is no GPU"),
        ("", "'' is no GPU"),
        ({"a": [0]}, "must be like 0,2"),
        (True, "not True"),
        (1.5, "not 1.5"),
    ],
)
def test_wrong_gpus_are_refused(given: Any, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        read_gpus(given)


def test_values_are_not_in_the_options_repr() -> None:
    assert "hidden" not in repr(make_options(2, env={"TOKEN": "hidden"}))


def test_magic_passes_on_several_variables() -> None:
    options = parse("dist_start", "2 --env HOME --env 'TOKEN=a b' --gpus 0,2")
    assert (options["env"], options["gpus"]) == (("HOME", "TOKEN=a b"), "0,2")
    assert parse("dist_start", "2")["env"] == ()


def test_a_mesh_without_a_process_group_has_one_rank_and_no_dims() -> None:
    options = make_options(1, group="off")
    assert (options.group, options.mesh) == (False, {})
    for given in ({"num_ranks": 2}, {"num_ranks": 1, "mesh": "dp=1"}, {"hosts": "a:1"}):
        with pytest.raises(MeshUsageError, match="has one rank, on this host, and no dims"):
            make_options(**given, group=False)  # type: ignore[arg-type]
