"""Floors of bulk data: this machine's memory, written and copied by one process with nothing else
running.
"""

from __future__ import annotations

import os
import statistics

import numpy as np

from .bulk import ARRAY_BYTES, WHOLE_BYTES
from .protocol import Counts, Sample, elapsed_s, main


def measure(num_ranks: int, counts: Counts) -> Sample:
    """1 GiB written into a fresh memfd; copies of 1 GiB and of 128 MiB into pages that are
    there.
    """
    source = np.random.default_rng(0).random(WHOLE_BYTES // 8)
    target = np.zeros_like(source)
    np.copyto(target, source)
    part = slice(ARRAY_BYTES // 8)
    times = range(counts.num_transfers)
    return {
        "memfd_write_1gb_s": statistics.median(_write_s(source) for _ in times),
        "memcpy_1gb_s": statistics.median(
            elapsed_s(lambda: np.copyto(target, source)) for _ in times
        ),
        "memcpy_128mb_s": statistics.median(
            elapsed_s(lambda: np.copyto(target[part], source[part])) for _ in times
        ),
    }


def _write_s(source: np.ndarray) -> float:
    """One `write` into a memfd whose pages do not exist yet. Closing it frees them, which is not
    counted.
    """
    view = source.data.cast("B")
    descriptor = os.memfd_create("benchmark")
    try:

        def write() -> None:
            at = 0
            while at < len(view):
                at += os.write(descriptor, view[at:])

        return elapsed_s(write)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(measure)
