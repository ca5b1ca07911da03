"""The options `env` and `gpus`, and how what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.options import make_options, read_environment, read_gpus
from cellmesh.errors import MeshUsageError
from cellmesh.magics.options import parse

SET = {"HOME": "/root", "EMPTY": ""}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ((), {}),
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
        ({"MASTER_ADDR": "a"}, "the mesh sets MASTER_ADDR"),
        ("CUDA_VISIBLE_DEVICES=0", "--gpus chooses GPUs"),
        ("2X=1", "'2X' is no name"),
        ("=1", "'' is no name"),
        (7, "of type int"),
        ([7], "of type int"),
        ({"A": 7}, "the value of A must be text"),
        ({"A": "secret\0"}, "the value of A must be text"),
        ({"A": "x" * 300_000}, "1 variables have 292 kB"),
    ],
)
def test_wrong_variables_are_refused(given: Any, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message) as caught:
        read_environment(given, SET)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("0,2", ("0", "2")),
        (3, ("3",)),
        ([0, "2"], ("0", "2")),
        ("none", ()),
        ([], ()),
        ("GPU-8932f937-d72c", ("GPU-8932f937-d72c",)),
    ],
)
def test_gpus_are_read(given: Any, read: tuple[str, ...]) -> None:
    assert read_gpus(given) == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0,x", "'x' is no GPU"),
        ("-1", "'-1' is no GPU"),
        ("", "'' is no GPU"),
        ("0,0", "names a GPU twice"),
        ("a=0;b=1", "'a=0;b=1' is no GPU"),
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
    assert options["env"] == ("HOME", "TOKEN=a b")
    assert options["gpus"] == "0,2"
    assert parse("dist_start", "2")["env"] == ()
