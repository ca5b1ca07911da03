"""What all drivers do alike with large values: which, how often, and how it is seen that they are
there.

numpy is imported when values are made, as the drivers that make none need none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from .protocol import Counts, Sample, elapsed_s

ARRAY_BYTES = 128 << 20
WHOLE_BYTES = 1 << 30
# A rank's word that it has an array: its size, and the last element as it reads it.
Seen = tuple[int, float]

# Transfers between the first and those that count: of a runtime that uses memory again, all is warm
# then.
_NUM_WARMUPS = 2


def time_push(push: Callable[[Any], Sequence[Seen]], num_ranks: int, counts: Counts) -> Sample:
    """Times one float array of 128 MiB to all ranks: the first one, and later ones that take its
    place.

    Each time another value is in the last element, and what counts is over when every rank has read
    that element from its own array and has answered with it.

    Args:
        push: gives an array to all ranks, and returns what each saw.
        num_ranks: how many there are.
        counts: how often.

    Raises:
        RuntimeError: a rank saw something else.
    """
    import numpy as np

    array = np.random.default_rng(0).random(ARRAY_BYTES // 8)

    def push_and_check(number: int) -> float:
        array[-1] = number
        seen: list[Seen] = []
        taken_s = elapsed_s(lambda: seen.extend(push(array)))
        check_seen(seen, [(ARRAY_BYTES, float(number))] * num_ranks)
        return taken_s

    return first_and_warm("push", push_and_check, counts)


def first_and_warm(name: str, transfer_s: Callable[[int], float], counts: Counts) -> Sample:
    """The measures `<name>_first_s`, and `<name>_warm_s`: the median of later transfers.

    Args:
        name: of the measures.
        transfer_s: does the transfer of this number, and returns how long it took.
        counts: how often.
    """
    first_s, *later_s = (
        transfer_s(number) for number in range(1 + _NUM_WARMUPS + counts.num_transfers)
    )
    return {f"{name}_first_s": first_s, f"{name}_warm_s": statistics.median(later_s[_NUM_WARMUPS:])}


def check_seen(seen: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare what ranks saw with what they were given.

    Raises:
        RuntimeError: they saw something else.
    """
    if list(seen) != list(expected):
        raise RuntimeError(f"ranks saw {seen}, and not {expected}")
