"""Lines of ranks that differ only in numbers, as training prints them, and the one line that stands
for them: ``step 3 loss 0.120 … 0.956 (rank 3)``. Pure.

Only lines of one place in the program may be joined, so the first whole number of a line, as that
of a step, has to be the same on all ranks, unless it is the rank's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence

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
