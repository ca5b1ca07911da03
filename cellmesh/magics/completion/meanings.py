"""What the words of a magic's line mean: types for click's declarations, from which completion
follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import click
from click.types import IntParamType

Meaning = Literal[
    "ranks",  # a set: 0,2-3
    "rank",
    "coordinate",  # tp=0
    "dims",  # dp=2
    "expression",  # of names on the ranks
    "names",  # on the ranks
    "names and file",  # as many names, then a file
    "notebook's names",
    "meshes",
    "numbers",  # that ranks have reported
    "file",
    "words",
]


class Text(click.ParamType):  # type: ignore[type-arg]
    """Text as it is, and what it means.

    Args:
        means: where its completions come from.
        words: they themselves, if it means ``words``; others are for whoever reads the value to
            refuse.
    """

    name = "text"

    def __init__(self, means: Meaning, words: Sequence[str] = ()) -> None:
        self.means = means
        self.words = tuple(words)


class Rank(IntParamType):
    """The number of a rank."""

    means: Meaning = "rank"
