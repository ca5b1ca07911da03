"""Each kind of `endurance`, repeated a few times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm

from .endurance import KINDS, Kind, enduring_mesh, repeat_kind, repeat_starts

SHARE = 0.002


@pytest.fixture(scope="module")
def enduring() -> Iterator[tuple[cm.Mesh, Path]]:
    with enduring_mesh() as mesh_and_directory:
        yield mesh_and_directory


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_repeated_and_reported(kind: Kind, enduring: tuple[cm.Mesh, Path]) -> None:
    assert_reported(repeat_kind(kind, SHARE, *enduring))


def test_starts_are_repeated_and_reported() -> None:
    assert_reported(repeat_starts(SHARE))


def assert_reported(text: str) -> None:
    assert text.startswith(tuple("123456789"))
    assert "| controller |" in text
