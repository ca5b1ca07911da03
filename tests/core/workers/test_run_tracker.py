"""What runs are called."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.ranks import seed_ranks
from cellmesh.workers.run_tracker import RunTracker, name_of


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (name_of, "name_of"),
        (RunTracker.enter, "RunTracker.enter"),
        (RunTracker(), "RunTracker"),
        (lambda: 0, "lambda"),
        (seed_ranks, ""),  # magics call such functions, and no cell of a timeline is theirs
    ],
)
def test_calls_have_the_name_of_their_function(function: Any, name: str) -> None:
    assert name_of(function) == name
