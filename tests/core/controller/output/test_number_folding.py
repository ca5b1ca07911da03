"""Lines that differ only in numbers are one line, and no line is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.output.console import as_text
from cellmesh.controller.output.fold import HOLD_S, AlikeLines, Folder, Line
from cellmesh.controller.output.number_folding import compact
from cellmesh.wire.verbs import Output


def folder_of(*texts: str) -> Folder:
    """A folder to which each rank has printed one of these texts."""
    folder = Folder(range(len(texts)), folds_numbers=True)
    for rank, text in enumerate(texts):
        folder.feed((rank,), Output(1, "stdout", text), 0.0)
    return folder


def lines_of(folder: Folder, now: float, everything: bool = False) -> list[str]:
    return [as_text(block)[1].rstrip("\n") for block in folder.take(now, everything)]


def shown(*texts: str) -> list[str]:
    return lines_of(folder_of(*texts), 1.0, everything=True)


@pytest.mark.parametrize(
    ("line", "joined"),
    [
        (
            lambda rank: f"step 3 loss {(0.956 if rank == 3 else 0.12 + rank / 1e3):.3f}",
            "step 3 loss 0.120 … 0.956 (rank 3)",
        ),
        (lambda rank: f"hello from rank {rank} of 8", "hello from rank 0 … 7 of 8"),
        (
            lambda rank: f"[rank {rank}] step 4: {rank / 8}",
            "[rank 0 … 7] step 4: 0.0 … 0.875 (rank 7)",
        ),
        (lambda rank: f"step 4  {9.5 + rank:5.1f} s", "step 4    9.5 … 16.5 (rank 7) s"),
        (lambda rank: f"loss {'nan' if rank == 6 else rank / 9:.3}", "loss 0.0 … nan (rank 6)"),
        (lambda rank: f"step 2 took 0:{10 + rank}", "step 2 took 0:10 … 0:17 (rank 7)"),
        (lambda rank: f"step 2 grad {10.0**-rank:.0e}", "step 2 grad 1e-07 … 1e+00 (rank 0)"),
        (lambda rank: f"epoch 1 saw {1000 * rank + 1000:,}", "epoch 1 saw 1,000 … 8,000 (rank 7)"),
    ],
)
def test_lines_that_differ_in_numbers_are_one(line: Callable[[int], str], joined: str) -> None:
    assert shown(*(f"{line(rank)}\n" for rank in range(8))) == [f"[0-7] {joined}"]


@pytest.mark.parametrize(
    "line",
    [
        lambda rank: f"step {7 * rank}",  # another place in the program
        lambda rank: f"rank {rank} is {'abc'[rank]}",
        lambda rank: f"tensor([0.{rank}, 0.5])",
        lambda rank: " ".join(str(n / 7 + rank) for n in range(20)),
    ],
)
def test_other_lines_are_shown_by_rank(line: Callable[[int], str]) -> None:
    assert shown(*(f"{line(rank)}\n" for rank in range(3))) == [
        f"[{rank}] {line(rank)}" for rank in range(3)
    ]


def test_a_rank_that_is_a_step_ahead_is_not_joined_with_others() -> None:
    texts = [f"step 1 loss 0.{rank}\nstep 2 loss 0.{rank}\n" for rank in range(4)]
    texts[2] = "step 2 loss 0.2\n"
    assert shown(*texts) == [
        "[0-1,3] step 1 loss 0.0 … 0.3 (rank 3)",
        "[0-3] step 2 loss 0.0 … 0.3 (rank 3)",
    ]


def test_joined_lines_wait_for_their_like_no_longer_than_others() -> None:
    folder = folder_of(*(f"loss 0.{rank}\n" for rank in range(3)), "")
    assert lines_of(folder, HOLD_S / 2) == []
    assert lines_of(folder, HOLD_S) == ["[0-2] loss 0.0 … 0.2 (rank 2)"]
    assert folder_of(*(f"loss 0.{rank}\n" for rank in range(3))).deadline() == 0.0


LINES = st.lists(st.sampled_from(["a 1", "a 2", "a 0.5", "a 0.7", "b 1 0.1", "b 1 0.2", "c"]))


@given(st.lists(LINES, min_size=1, max_size=5))
def test_every_line_of_every_rank_is_shown_once_in_its_order(scripts: list[list[str]]) -> None:
    folder = folder_of(*("".join(f"{line}\n" for line in lines) for lines in scripts))
    seen: dict[int, list[str]] = {rank: [] for rank in range(len(scripts))}
    for block in folder.take(1.0, everything=True):
        own = dict(block.item.lines) if isinstance(block.item, AlikeLines) else {}
        for rank in block.ranks:
            line = own.get(rank, block.item)
            assert isinstance(line, Line)
            seen[rank].append(line.text)
    assert list(seen.values()) == scripts


def bar(*ranks: int, done: int, rate: float) -> tuple[tuple[int, ...], str]:
    text = f"{done:3}%|{'█' * (done // 10):10}| {done}/100 [00:05<00:{100 - done:02}, {rate}it/s]"
    return ranks, text


@pytest.mark.parametrize(
    ("lines", "joined"),
    [
        (
            [((rank,), f"step {3 + rank % 2} of 10, loss 0.{rank + 1}") for rank in range(4)],
            "step 3 … 4 of 10, loss 0.1 … 0.4  [ranks 0,2 slowest]",
        ),
        (
            [bar(0, done=50, rate=10.0), bar(1, done=20, rate=4.0), bar(2, 3, done=90, rate=20.0)],
            " 20 … 90%|██        | 20 … 90/100 [00:05<00:10 … 00:80, 4.0 … 20.0it/s]  "
            "[rank 1 slowest]",
        ),
        (
            [((r,), f"rank {r}: {90 - 10 * r}%|{'#' * (9 - r):10}|") for r in range(3)],
            "rank 0 … 2: 70 … 90%|#######   |  [rank 2 slowest]",
        ),
        ([((r,), f"rank {r}: 100%|{'#' * 10}|") for r in range(3)], "rank 0 … 2: 100%|##########|"),
    ],
    ids=["words", "bars", "rank first", "done"],
)
def test_unfinished_lines_are_one_and_name_the_slowest(lines: Any, joined: str) -> None:
    assert compact(lines) == [(tuple(range(max(lines[-1][0]) + 1)), joined)]


@pytest.mark.parametrize(
    "lines",
    [
        [((0,), "step 1"), ((1, 2), "step 2")],
        [((0,), "loads"), ((1,), "trains 3"), ((2,), "waits 3"), ((3,), "trains 4")],
        [((0,), "a 1"), ((0,), "b"), ((1,), "a 2"), ((1,), "b")],
    ],
    ids=["two", "other words", "several lines a rank"],
)
def test_few_or_different_unfinished_lines_are_left_as_they_are(lines: Any) -> None:
    assert compact(lines) == lines
