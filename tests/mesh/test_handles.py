"""Handles of actors on the ranks of two meshes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError
from tests.conftest import check_nothing_left, own_runtime_dir

WAIT_S = 60.0


class Counter:
    """What the tests call."""

    def __init__(self, other: Any = None) -> None:
        self.count, self.other = 0, other

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    def give_self(self) -> Any:
        return {"self": self, "other": self.other}


@pytest.fixture(scope="module")
def meshes() -> Iterator[tuple[cm.Mesh, cm.Mesh]]:
    """A mesh of two ranks, and one of a single rank."""
    with own_runtime_dir() as directory:
        with cm.start(2, name="left") as left, cm.start(1, name="right", group=False) as right:
            yield left, right
        check_nothing_left(directory)


@pytest.fixture(scope="module")
def left(meshes: tuple[cm.Mesh, cm.Mesh]) -> Any:
    """An actor on two ranks."""
    return meshes[0].spawn(Counter, name="left")


@pytest.fixture(scope="module")
def right(meshes: tuple[cm.Mesh, cm.Mesh], left: Any) -> Any:
    """An actor on one rank, which has got a handle of the other."""
    return meshes[1].spawn(Counter, left, name="right")


def test_a_handle_is_the_object_on_a_rank_that_has_it(
    meshes: tuple[cm.Mesh, cm.Mesh], left: Any
) -> None:
    def raise_by(number: int, of: Any) -> tuple[int, bool]:
        of.count = 0
        return left.add(number), of is left

    assert meshes[0].run(raise_by, 3, of=left).list == [(3, True)] * 2
    assert meshes[0][1].run(raise_by, 4, of=left[1]) == (4, True)
    meshes[0].push(kept=[left])
    meshes[0].cell("kept[0].add(); assert kept[0] is left")


def test_an_object_and_a_handle_return_as_handles(left: Any, right: Any) -> None:
    found = left.give_self()
    assert [repr(each["self"]) for each in found.list] == [repr(left[0]), repr(left[1])]
    assert found[1]["self"].add(0) == left[1].add(0)
    found = right.give_self()
    assert (repr(found["self"]), repr(found["other"])) == (repr(right[0]), repr(left))


def test_a_handle_in_another_process_says_why_it_cannot_be_used(left: Any, tmp_path: Path) -> None:
    (tmp_path / "handle").write_bytes(pickle.dumps(left))
    script = (
        "import pickle, sys; h = pickle.load(open(sys.argv[1], 'rb')); print(len(h), repr(h))\n"
        "try: h.add(1)\n"
        "except ValueError as e: print(e)"
    )
    command = [sys.executable, "-c", script, tmp_path / "handle"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert shown.stdout.startswith("2 <actor left: Counter on ranks 0-1 of left, not usable here>")
    assert "neither the notebook that made it nor a rank of a mesh" in shown.stdout


def test_a_handle_whose_actor_was_dropped_says_so(meshes: tuple[cm.Mesh, cm.Mesh]) -> None:
    brief = meshes[0].spawn(Counter, name="brief")
    pickled = pickle.dumps(brief)
    meshes[0].drop(brief)
    with pytest.raises(MeshUsageError, match="brief, an actor of left, was dropped"):
        pickle.loads(pickled).add()
