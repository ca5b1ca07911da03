"""Lines of ranks that differ only in numbers, as training prints them, and the one line that stands
for them: ``step 3 loss 0.120 … 0.956 (rank 3)``; of unfinished lines, as bars are,
``step 3…5 of 10  [rank 0 slowest]``. Pure.

Only finished lines of one place in the program may be joined, so the first whole number of a line,
as that of a step, has to be the same on all ranks, unless it is the rank's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence

from ...wire.ranks import describe_ranks
from .rank_queues import Ranks

# Of fewer different lines, all are shown.
MIN_LINES = 3
# A longer line, or one with more numbers, is data.
_MAX_CHARACTERS, _MAX_NUMBERS = 400, 12
_WHOLE = r"\d+"
_NUMBER = (
    r"(?:(?<![\w.])[-+])?(?:"
    r"\d+(?::\d\d)+(?:\.\d+)?|\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?"
    r"|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\b(?:nan|inf)\b)"
)
_NUMBERS = re.compile(_NUMBER, re.IGNORECASE)
# Numbers are often written in columns.
_PADDED = re.compile(rf" *{_NUMBER}", re.IGNORECASE)
# A list of numbers, as of a tensor, is data, too.
_LIST = re.compile(r"[\[({][^\])}]*\d\.?\s*,\s*[-+]?\.?\d")

# In an unfinished line: no part of a time (0:05), and what is drawn for a number.
_UNFINISHED_NUMBER = re.compile(r"(?<![\d.])(?<!\d:)-?\d+(?:\.\d+)?(?!\d|:\d|\.\d)")
_DRAWN = re.compile(r"[█▏▎▍▌▋▊▉▐░▒▓#=>\-━╸╺\s]+")

UnfinishedLine = tuple[Ranks, str]


def alike_keys(rank: int, stream: str, text: str) -> tuple[Hashable, ...]:
    """Return what a rank's line shares with those that it may be joined with: a line that shares
    any of these keys.
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
    """Return the line that stands for those of ranks which differ only in numbers: how far each
    number reaches, and the rank where it is the largest.

    Args:
        lines: rank and text, ascending.
    """
    ranks = [rank for rank, _ in lines]
    columns = zip(*(_NUMBERS.findall(text) for _, text in lines), strict=True)
    spans = iter([_span(ranks, column) for column in columns])
    return _NUMBERS.sub(lambda match: next(spans), lines[0][1])


def _span(ranks: Sequence[int], column: Sequence[str]) -> str:
    if len(set(column)) == 1:
        return column[0]
    pairs = sorted(zip(column, ranks, strict=True), key=lambda pair: _value(pair[0]))
    (low, _), (high, rank) = pairs[0], pairs[-1]
    is_rank = all(number == str(rank) for number, rank in pairs)
    return f"{low} … {high}" if is_rank else f"{low} … {high} (rank {rank})"


def _value(number: str) -> tuple[bool, float]:
    """Return the value of a written number, by which NaN is the largest."""
    value = 0.0
    for part in number.lstrip("+-").replace(",", "").split(":"):
        value = 60 * value + float(part)
    return math.isnan(value), -value if number.startswith("-") else value


# ---------------------------------------------------------------- unfinished lines


def compact(lines: Sequence[UnfinishedLine]) -> list[UnfinishedLine]:
    """Join unfinished lines of ranks that differ only in numbers, if there are many.

    What stands for all is the line of the ranks that are behind, with how far its numbers reach. A
    rank may redraw several lines together.
    """
    rows = [(ranks, row) for ranks, text in lines for row in text.split("\n")]
    groups: dict[str, list[UnfinishedLine]] = {}
    for ranks, row in rows:
        groups.setdefault(_skeleton(row), []).append((ranks, row))
    joined: list[UnfinishedLine] = []
    for each in rows:
        group = groups[_skeleton(each[1])]
        if len(group) < MIN_LINES:
            joined.append(each)
        elif each == group[0]:
            joined.append(_join_unfinished(group))
    return joined


def _skeleton(text: str) -> str:
    return _DRAWN.sub("", re.sub(r"\d+(?:\.\d+)?", "0", text))


def _join_unfinished(group: Sequence[UnfinishedLine]) -> UnfinishedLine:
    found = [[match[0] for match in _UNFINISHED_NUMBER.finditer(text)] for _, text in group]
    ranks = tuple(sorted(rank for members, _ in group for rank in members))
    if not found[0] or any(len(numbers) != len(found[0]) for numbers in found):
        return ranks, min(group)[1]
    # Many begin with their rank, which does not tell how far they are.
    begins_with_rank = all(
        members == (float(numbers[0]),) for (members, _), numbers in zip(group, found, strict=True)
    )
    place = 1 if begins_with_rank and len(found[0]) > 1 else 0
    firsts = [float(numbers[place]) for numbers in found]
    last = firsts.index(min(firsts))
    columns = list(zip(*found, strict=True))
    spans = iter([_reach(column) for column in columns])
    text = _UNFINISHED_NUMBER.sub(lambda match: next(spans), group[last][1])
    if min(firsts) == max(firsts):
        return ranks, text
    slow = [
        members for (members, _), first in zip(group, firsts, strict=True) if first == min(firsts)
    ]
    behind = sorted(rank for members in slow for rank in members)
    return ranks, f"{text}  [{describe_ranks(behind)} slowest]"


def _reach(column: Sequence[str]) -> str:
    ordered = sorted(set(column), key=float)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]}…{ordered[-1]}"
