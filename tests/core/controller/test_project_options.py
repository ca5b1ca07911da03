"""A project's options are read from its pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellmesh.controller.options import Options, make_options
from cellmesh.controller.project_options import read_project_options
from cellmesh.errors import MeshUsageError


def test_the_projects_table_gives_options(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.cellmesh]\nnum_ranks = 4\nmesh = "dp=2,tp=2"\npreload = ["json"]\nbackend = "gloo"\n'
    )
    options = make_options(**read_project_options(tmp_path))
    assert options == Options(4, {"dp": 2, "tp": 2}, "gloo", ("json",), "")


def test_options_of_a_start_that_are_no_field_of_a_mesh_are_known(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.cellmesh]\nnproc_per_host = 4\n")
    assert read_project_options(tmp_path) == {"nproc_per_host": 4}


@pytest.mark.parametrize("key", ["leave_command", "slurm_job", "request"])
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
