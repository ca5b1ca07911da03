"""Modules that all ranks import: what is learned, and the line that advises `--preload`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellmesh.controller.preload import Preloading, describe_left_out, own_list
from cellmesh.wire.preload import change_preloads, leave_out, read_preloads
from cellmesh.wire.verbs import Imports


def imports(run: int, *asked: str, **took_s: float) -> Imports:
    return Imports(run, tuple(took_s), tuple(took_s.values()), asked)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lists" / "list.json"


def test_what_all_ranks_have_imported_is_learned(path: Path) -> None:
    preloading = Preloading(str(path), 1)
    preloading.take([0], imports(1, "a", inner=0.1, a=0.2, b=0.3), 2)
    assert not path.exists()
    preloading.take([1], imports(2, "a", inner=0.2, a=0.1), 2)
    assert read_preloads(path).modules == {"inner": 0.1, "a": 0.1}
    preloading.take([0], imports(3, "c", c=1.0), 1)  # resized
    assert [*read_preloads(path).modules] == ["inner", "a", "c"]


def test_advice_names_what_it_saves_once(path: Path) -> None:
    preloading = Preloading(str(path), 1)
    long = imports(1, "big", "small", inner=2.0, big=4.0, small=0.01)
    assert preloading.take([0], long, 2) == ""
    assert preloading.take([1], long, 2) == (
        "`--preload big` would save 4.0 s on each rank; the next run preloads by itself what it may"
    )
    assert [preloading.take([rank], long, 2) for rank in (0, 1)] == ["", ""]  # restarted
    assert Preloading("", 1).take([0, 1], long, 2).endswith("on each rank")
    of_torch = Imports(2, ("torch.fsdp",), (4.0,), ("torch.fsdp",))
    assert Preloading(str(path), 1).take([0, 1], of_torch, 2) == ""
    assert "torch.fsdp" in Preloading("", 1).take([0, 1], of_torch, 2)


@pytest.mark.parametrize("case", ["one rank", "a rank a host", "one by one", "left out", "short"])
def test_no_advice_where_it_saves_nothing(case: str, path: Path) -> None:
    preloading = Preloading(str(path), 2 if case == "a rank a host" else 1)
    took_s = 0.9 if case == "short" else 9.0
    if case == "left out":
        change_preloads(path, lambda found: leave_out(found, "big", "forks"))
        assert describe_left_out(str(path)) == ["not preloaded: big, which forks"]
    num_ranks = 1 if case == "one rank" else 2
    for rank in range(num_ranks):
        run = rank if case == "one by one" else 7
        assert (
            preloading.take([rank], imports(run, "big.part", **{"big.part": took_s}), num_ranks)
            == ""
        )


def test_a_change_of_the_directory_keeps_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = own_list()
    monkeypatch.chdir(tmp_path)
    assert own_list() == before
