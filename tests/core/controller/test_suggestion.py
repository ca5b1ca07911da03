"""The nearest known word is suggested."""

from __future__ import annotations

from cellmesh.controller.suggestion import did_you_mean


def test_the_nearest_word_is_suggested() -> None:
    assert did_you_mean("backed", ["backend", "mesh"]) == "; did you mean 'backend'?"
    assert did_you_mean("zzz", ["backend", "mesh"]) == ""
