"""Ten stops of each training loop: see `stops`; ``python -m tests.faults.stops`` makes more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cellmesh as cm
from tests.conftest import clean_runtime_dir

from .stops import LOOPS, Loop, stop_often, stopping_mesh
from .watching import deadline

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def mesh() -> Iterator[cm.Mesh]:
    with (
        clean_runtime_dir() as directory,
        deadline(directory, 600, "stops of training loops"),
        stopping_mesh() as mesh,
    ):
        yield mesh


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_ranks_of_a_stopped_loop_have_made_the_same_steps(mesh: cm.Mesh, loop: Loop) -> None:
    stops = stop_often(mesh, loop, times=10, seed=23)
    print(loop.name, stops.took_s, stops.notes)
