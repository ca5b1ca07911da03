"""Parses and formats sets of ranks in users' notation (``0,2-5``); groups ranks by answer."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from ..errors import MeshUsageError

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")
# A longer set of ranks is written as its size and the first few ranks.
_MAX_CHARACTERS, _NUM_FIRST = 60, 3


class Results(dict[int, V], Generic[V]):
    """The values that ranks returned: rank -> value, in the order of ranks."""

    def __missing__(self, rank: int) -> V:
        raise KeyError(f"no result of rank {rank}: there are results of {[*self]}")

    def __repr__(self) -> str:
        return f"Results({super().__repr__()})"

    @property
    def list(self) -> list[V]:
        """The values of the results as a list, in the order of ranks, without the rank numbers."""
        return [*self.values()]


def choose_ranks(
    ranks: Sequence[int], index: int | slice | Sequence[int], actor: str
) -> tuple[int, ...]:
    """Return the ranks of an actor that an index, a slice or a list of positions chooses.

    Raises:
        IndexError: the actor is on fewer ranks.
        MeshUsageError: none is chosen.
    """
    try:
        if isinstance(index, (int, slice)):
            chosen = tuple(ranks[index]) if isinstance(index, slice) else (ranks[index],)
        else:
            chosen = tuple(dict.fromkeys(ranks[each] for each in index))
    except IndexError:
        raise IndexError(f"{index!r}: {actor} is on {len(ranks)} ranks") from None
    if not chosen:
        raise MeshUsageError(f"{index!r} chooses none of the {len(ranks)} ranks of {actor}")
    return chosen


def format_ranks(ranks: Iterable[int]) -> str:
    """Format a set of ranks in short, as ``0,2-5``.

    Args:
        ranks: ranks in any order.

    Returns:
        ``"0,2-5"`` for 0, 2, 3, 4, 5.
    """
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Parse a set of ranks that a user has written, as ``0,2-5``.

    Args:
        text: ``0``, ``0,2-5`` or ``all``; negative numbers do not count from the end.
        world_size: number of ranks of the mesh.

    Returns:
        The ranks, ascending, each once.

    Raises:
        MeshUsageError: the text is no set of ranks, or names a rank that the mesh does not have.
    """
    if text.strip() == "all":
        return tuple(range(world_size))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise MeshUsageError(
                f"{text!r} is no set of ranks: write it like 0,2-3 (ranks are 0-{world_size - 1})"
            )
        low, high = int(first), int(last if dash else first)
        if low > high:
            raise MeshUsageError(f"{part.strip()!r} runs backwards: write {high}-{low}")
        if high >= world_size:
            raise MeshUsageError(
                f"there is no rank {high}: the mesh has {describe_ranks(range(world_size))}"
            )
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def count_ranks(ranks: Collection[int]) -> str:
    """Format a set of ranks in short or, beyond 60 characters, as its size and the first few ranks.

    Args:
        ranks: ranks in any order.

    Returns:
        ``"0,2-5"``, or ``"512 ranks: 0,2,4,…"`` beyond 60 characters.
    """
    text = format_ranks(ranks)
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{len(set(ranks))} ranks: {','.join(text.split(',')[:_NUM_FIRST])},…"


def describe_ranks(ranks: Collection[int]) -> str:
    """Return ranks in words for a sentence: ``rank 3``, ``ranks 0-2,4``.

    Args:
        ranks: at least one rank.

    Returns:
        ``"rank 3"``, ``"ranks 0-2,4"`` or, for many ranks, ``"512 ranks (0,2,4,…)"``.
    """
    text = count_ranks(ranks)
    if ":" in text:
        return f"{text.replace(': ', ' (')})"
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def in_words(num_ranks: int) -> str:
    """Return a number of ranks in words: ``1 rank``, ``4 ranks``."""
    return f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"


def with_verb(ranks: Collection[int], singular: str, plural: str) -> str:
    """Return ranks and a verb in singular or plural, like ``rank 3 is`` or ``ranks 0-2,4 are``."""
    return f"{describe_ranks(ranks)} {singular if len(ranks) == 1 else plural}"


def group_ranks(answers: Mapping[int, T]) -> dict[T, tuple[int, ...]]:
    """Group the ranks that gave equal answers.

    Args:
        answers: rank -> its answer.

    Returns:
        Each answer, in the order of `answers`, and the ranks that gave it.
    """
    groups: dict[T, list[int]] = {}
    for rank, answer in answers.items():
        groups.setdefault(answer, []).append(rank)
    return {answer: tuple(ranks) for answer, ranks in groups.items()}


def describe_groups(texts: Mapping[int, str]) -> list[str]:
    """Return a line for each different text, with the ranks that gave it: ``rank 0: text``.

    Args:
        texts: rank -> its text; ranks without one ("") are left out.
    """
    groups = group_ranks({rank: text for rank, text in texts.items() if text})
    return [f"{describe_ranks(ranks)}: {text}" for text, ranks in groups.items()]
