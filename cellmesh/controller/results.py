"""The results of a run, by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Results(Mapping[int, T], Generic[T]):
    """The values that ranks returned: rank -> value, in the order of ranks.

    Args:
        by_rank: the values.
    """

    def __init__(self, by_rank: Mapping[int, T]) -> None:
        self._by_rank = dict(sorted(by_rank.items()))

    def __getitem__(self, rank: int) -> T:
        try:
            return self._by_rank[rank]
        except KeyError:
            raise KeyError(
                f"no result of rank {rank}: there are results of {list(self._by_rank)}"
            ) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._by_rank)

    def __repr__(self) -> str:
        lines = (f"{rank}: {value!r}" for rank, value in self._by_rank.items())
        return "Results({" + ", ".join(lines) + "})"

    @property
    def list(self) -> list[T]:
        """The values alone, in the order of ranks."""
        return list(self._by_rank.values())
