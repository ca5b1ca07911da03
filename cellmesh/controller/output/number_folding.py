"""Joins ranks' lines that differ only in numbers, such as those of a training loop, into one line:
``step 3 loss 0.120 … 0.956 (rank 3)``; for unfinished lines, such as progress bars,
``step 3 … 5 of 10  [rank 0 slowest]``. Pure.

Finished lines may be joined only if they belong to the same step of the program. So the first
integer of a line must be equal on all ranks, unless it is the rank's own number.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Sequence

from ...wire.ranks import describe_ranks
from .rank_queues import Ranks

# Fewer different lines than this are not joined.
MIN_LINES = 3
# Longer lines, and lines with more numbers, are data and are not joined.
_MAX_CHARACTERS, _MAX_NUMBERS = 400, 12
_WHOLE = r"\d+"
_NUMBER = (
    r"(?:(?<![\w.])[-+])?(?:"
    r"\d+(?::\d\d)+(?:\.\d+)?|\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?"
    r"|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\b(?:nan|inf)\b)"
)
_NUMBERS = re.compile(_NUMBER, re.IGNORECASE)
# A number with leading spaces, as numbers are often written in columns.
_PADDED = re.compile(rf" *{_NUMBER}", re.IGNORECASE)
# A list of numbers, such as a printed tensor, is data as well.
_LIST = re.compile(r"[\[({][^\])}]*\d\.?\s*,\s*[-+]?\.?\d")

# The drawn part of a progress bar.
_DRAWN = re.compile(r"[█▏▎▍▌▋▊▉▐░▒▓#=>\-━╸╺\s]+")

UnfinishedLine = tuple[Ranks, str]


def alike_keys(rank: int, stream: str, text: str) -> tuple[Hashable, ...]:
    """Return keys of a rank's line; it may be joined with lines of other ranks that have one of
    these keys.
    """
    if len(text) > _MAX_CHARACTERS or _LIST.search(text):
        return ()
    numbers = _NUMBERS.findall(text)
    if not 0 < len(numbers) <= _MAX_NUMBERS:
        return ()
    words = replace_numbers(text)
    wholes = [each for each in enumerate(numbers) if re.fullmatch(_WHOLE, each[1])]
    keys: list[Hashable] = [(stream, words, *wholes[:1])]
    if wholes and wholes[0][1] == str(rank):
        keys.append((stream, words, "rank", *wholes[1:2]))
    return tuple(keys)


def replace_numbers(text: str) -> str:
    """Return a text with a placeholder for each number."""
    return _PADDED.sub("\0", text)


def join_lines(lines: Sequence[tuple[int, str]]) -> str:
    """Join ranks' lines that differ only in numbers into one, with the range of each number and the
    rank of its maximum.

    Args:
        lines: pairs of rank and text, by ascending rank.
    """
    ranks = [rank for rank, _ in lines]
    columns = _columns([text for _, text in lines])
    return _fill(lines[0][1], [_span(column, ranks) for column in columns])


def _columns(texts: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(*(_NUMBERS.findall(text) for text in texts), strict=True))


def _fill(text: str, spans: Sequence[str]) -> str:
    left = iter(spans)
    return _NUMBERS.sub(lambda match: next(left), text)


def _span(column: Sequence[str], ranks: Sequence[int] = ()) -> str:
    if len(set(column)) == 1:
        return column[0]
    low, high = min(column, key=_value), max(column, key=_value)
    is_named = ranks and not _is_ranks_own(column, ranks)
    return f"{low} … {high} (rank {ranks[column.index(high)]})" if is_named else f"{low} … {high}"


def _is_ranks_own(column: Sequence[str], ranks: Sequence[int]) -> bool:
    return all(number == str(rank) for number, rank in zip(column, ranks, strict=True))


def _value(number: str) -> tuple[bool, float]:
    """Return the sort key of a number's text; NaN is the largest."""
    value = 0.0
    for part in number.lstrip("+-").replace(",", "").split(":"):
        value = 60 * value + float(part)
    return math.isnan(value), -value if number.startswith("-") else value


def compact(lines: Sequence[UnfinishedLine]) -> list[UnfinishedLine]:
    """Join ranks' unfinished lines that differ only in numbers, if there are many.

    The joined line is that of the slowest ranks, with the range of its numbers. A rank may redraw
    several lines together.
    """
    rows = [(ranks, row) for ranks, text in lines for row in text.split("\n")]
    words = [_DRAWN.sub("", replace_numbers(row)) for _, row in rows]
    groups: dict[str, list[UnfinishedLine]] = {}
    for row, key in zip(rows, words, strict=True):
        groups.setdefault(key, []).append(row)
    joined: list[UnfinishedLine] = []
    for row, key in zip(rows, words, strict=True):
        if len(groups[key]) < MIN_LINES:
            joined.append(row)
        elif row is groups[key][0]:
            joined.append(_join_unfinished(groups[key]))
    return joined


def _join_unfinished(group: Sequence[UnfinishedLine]) -> UnfinishedLine:
    ranks = tuple(sorted(rank for members, _ in group for rank in members))
    columns = _columns([text for _, text in group])
    spans = [_span(column) for column in columns]
    # Many lines begin with their rank, which does not measure progress.
    begins_with_rank = columns[1:] and _is_ranks_own(
        columns[0], [members[0] for members, _ in group]
    )
    progress = [_value(number) for number in columns[bool(begins_with_rank)]] if columns else []
    if len(set(progress)) < 2:
        return ranks, _fill(group[0][1], spans)
    least = min(progress)
    behind = [m for (m, _), value in zip(group, progress, strict=True) if value == least]
    text = _fill(group[progress.index(least)][1], spans)
    return ranks, f"{text}  [{describe_ranks(sorted(itertools.chain(*behind)))} slowest]"
