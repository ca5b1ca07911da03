"""Shortens the unfinished lines of many ranks: lines that differ only in numbers become one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...wire.ranks import describe_ranks
from .fold import Ranks

# Fewer are shown as they are.
MIN_LINES = 3
# No part of a time (0:05).
_NUMBER = re.compile(r"(?<![\d.])(?<!\d:)-?\d+(?:\.\d+)?(?!\d|:\d|\.\d)")
_DRAWN = re.compile(r"[█▏▎▍▌▋▊▉▐░▒▓#=>\-━╸╺\s]+")

Line = tuple[Ranks, str]


def compact(lines: Sequence[Line]) -> list[Line]:
    """Join lines that differ only in numbers, if there are many lines.

    Args:
        lines: ranks and their line; or lines, that they redraw all together.

    Returns:
        The line of the ranks that are behind, for all, with how far its numbers reach.
    """
    rows = [(ranks, row) for ranks, text in lines for row in text.split("\n")]
    groups: dict[str, list[Line]] = {}
    for ranks, row in rows:
        groups.setdefault(_skeleton(row), []).append((ranks, row))
    joined: list[Line] = []
    for each in rows:
        group = groups[_skeleton(each[1])]
        if len(group) < MIN_LINES:
            joined.append(each)
        elif each == group[0]:
            joined.append(_join(group))
    return joined


def _skeleton(text: str) -> str:
    return _DRAWN.sub("", re.sub(r"\d+(?:\.\d+)?", "0", text))


def _join(group: Sequence[Line]) -> Line:
    found = [[match[0] for match in _NUMBER.finditer(text)] for _, text in group]
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
    spans = iter([_span(column) for column in columns])
    text = _NUMBER.sub(lambda match: next(spans), group[last][1])
    if min(firsts) == max(firsts):
        return ranks, text
    slow = [
        members for (members, _), first in zip(group, firsts, strict=True) if first == min(firsts)
    ]
    behind = sorted(rank for members in slow for rank in members)
    return ranks, f"{text}  [{describe_ranks(behind)} slowest]"


def _span(column: Sequence[str]) -> str:
    ordered = sorted(set(column), key=float)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]}…{ordered[-1]}"
