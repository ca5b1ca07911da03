"""The work of folding grows with the number of lines, whatever number of ranks printed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cellmesh.controller.output.fold import Folder
from cellmesh.wire.messages import Failed
from cellmesh.wire.user_code import Output

from ....support.step_counter import growth

LINES: dict[str, Callable[[int, int], str]] = {
    "equal": lambda rank, n: f"step {n}\n",
    "numbers": lambda rank, n: f"step {n} loss {rank / 7}\n",
    "own rank": lambda rank, n: f"{rank}\n",
    "own words": lambda rank, n: f"{'x' * rank} {n}\n",
    "two kinds": lambda rank, n: f"{'ab'[rank % 2]}\n",
    "unfinished": lambda rank, n: f"\r{rank} {n}",
}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("folds_numbers", [False, True])
def test_lines_of_many_ranks(kind: str, folds_numbers: bool) -> None:
    def work(num_ranks: int) -> Callable[[], Any]:
        folder = Folder(range(num_ranks), folds_numbers=folds_numbers)

        def fold() -> None:
            for n in range(3):
                for rank in range(num_ranks):
                    folder.feed((rank,), Output(1, "stdout", LINES[kind](rank, n)), float(n))
                    folder.deadline()
                    folder.take(float(n))
            folder.leave(range(num_ranks), 3.0)
            folder.take(4.0, everything=True)

        return fold

    assert growth(work, 16) < 6


def test_failures_of_many_ranks() -> None:
    def work(num_ranks: int) -> Callable[[], Any]:
        folder = Folder(range(num_ranks))

        def fold() -> None:
            for rank in range(num_ranks):
                folder.feed((rank,), Failed(1, "ValueError", str(rank), f"at {rank}", 4), 0.0)
            folder.leave(range(num_ranks), 0.1)
            folder.take(4.0, everything=True)

        return fold

    assert growth(work, 32) < 6
