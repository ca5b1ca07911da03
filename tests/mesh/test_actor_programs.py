"""Random programs of actors on ranks do as plain asyncio does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cellmesh as cm
from tests.conftest import clean_runtime_dir

from .actor_programs import Program, two_meshes


@pytest.fixture(scope="module")
def meshes() -> Iterator[list[cm.Mesh]]:
    with clean_runtime_dir(), two_meshes() as started:
        yield started


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_of_actors_do_as_asyncio(meshes: list[cm.Mesh], seed: int) -> None:
    Program(meshes, seed).play(40)


@pytest.mark.parametrize("seed", range(2))
def test_a_death_and_a_heal_leave_other_calls(meshes: list[cm.Mesh], seed: int) -> None:
    Program(meshes, seed, may_kill=True).play(30)
