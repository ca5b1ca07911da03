"""Rows of tables that stand for many ranks: those that are alike share a row, with the range of
each number, and a grid shows which row each rank is in. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...wire.ranks import count_ranks, group_ranks

# Of more ranks, those that are alike share a row; of more than `MAX_GRID`, there is no grid.
MAX_ROWS, MAX_GRID = 16, 64
# Of more kinds of ranks, those with trouble and the most common ones are shown.
_MAX_KINDS = 8
_LETTERS = "ABCDEFGHI"  # one more, for the others
_PER_LINE, _PER_BLOCK = 16, 8


@dataclass(frozen=True)
class RankRow:
    """One rank's cells in a table.

    Attributes:
        rank: which.
        kind: what it does; ranks with equal kinds share a row.
        words: cells that are shown where all ranks of a row have the same, else counted.
        numbers: cells of which a row shows the range; None for none.
        has_trouble: its kind is shown before others.
    """

    rank: int
    kind: str
    words: tuple[str, ...] = ()
    numbers: tuple[float | None, ...] = ()
    has_trouble: bool = False


@dataclass(frozen=True)
class SharedRow:
    """The cells of all ranks of one kind.

    Attributes:
        num_ranks: how many there are.
        ranks: as text.
        kind: what they do.
        words: as of one rank, or how many different ones there are.
        numbers: their ranges, as text.
    """

    num_ranks: int
    ranks: str
    kind: str
    words: tuple[str, ...]
    numbers: tuple[str, ...]


def share_rows(
    rows: Sequence[RankRow], formats: Sequence[Callable[[float], str]] = ()
) -> tuple[list[SharedRow], list[str]]:
    """Join the rows of ranks that are alike, the most common kind first.

    Args:
        rows: a rank each, ascending.
        formats: how to write each of the numbers.

    Returns:
        The joined rows, and the lines of a grid that names the row of each rank by a letter; no
        lines if there are too many ranks.
    """
    by_rank = {row.rank: row for row in rows}
    groups = group_ranks({row.rank: row.kind for row in rows})
    kinds = sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[1]))
    by_need = sorted(kinds, key=lambda pair: not by_rank[pair[1][0]].has_trouble)
    kept = dict(by_need[:_MAX_KINDS])
    shown = [pair for pair in kinds if pair[0] in kept]
    others = [pair for pair in kinds if pair[0] not in kept]
    if others:
        rest = sorted(rank for _, ranks in others for rank in ranks)
        shown.append((f"{len(others)} other states", tuple(rest)))
    shared = [_share([by_rank[rank] for rank in ranks], kind, formats) for kind, ranks in shown]
    letters = {
        rank: letter for letter, (_, ranks) in zip(_LETTERS, shown, strict=False) for rank in ranks
    }
    return shared, _grid(letters) if len(rows) <= MAX_GRID and len(shown) > 1 else []


def _share(
    rows: Sequence[RankRow], kind: str, formats: Sequence[Callable[[float], str]]
) -> SharedRow:
    words = [
        list(dict.fromkeys(column)) for column in zip(*(row.words for row in rows), strict=True)
    ]
    numbers = zip(*(row.numbers for row in rows), strict=True)
    return SharedRow(
        len(rows),
        count_ranks([row.rank for row in rows]),
        kind,
        tuple(column[0] if len(column) == 1 else f"{len(column)} different" for column in words),
        tuple(
            _range([row.rank for row in rows], column, write)
            for column, write in zip(numbers, formats, strict=True)
        ),
    )


def _range(
    ranks: Sequence[int], column: Sequence[float | None], write: Callable[[float], str]
) -> str:
    known = [
        (number, rank) for rank, number in zip(ranks, column, strict=True) if number is not None
    ]
    if not known:
        return ""
    (low, _), (high, rank) = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
    first, last = write(low), write(high)
    return first if first == last else f"{first} … {last} (rank {rank})"


def _grid(letters: dict[int, str]) -> list[str]:
    """Return lines that have a letter for each rank; ranks that are not listed have a blank."""
    lines = []
    width = len(str(max(letters)))
    for first in range(0, max(letters) + 1, _PER_LINE):
        marks = [letters.get(rank, " ") for rank in range(first, first + _PER_LINE)]
        blocks = ["".join(marks[at : at + _PER_BLOCK]) for at in range(0, _PER_LINE, _PER_BLOCK)]
        if line := " ".join(blocks).rstrip():
            last = min(first + _PER_LINE - 1, max(letters))
            lines.append(f"{first:>{width}}-{last:<{width}}  {line}")
    return lines
