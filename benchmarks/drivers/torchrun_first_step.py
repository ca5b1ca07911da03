"""torchrun: from its call until rank 0 of the program prints its loss."""

from __future__ import annotations

import os

from .first_step import ONE_THREAD, PROGRAM, TORCHRUN, printed_after_s
from .protocol import Counts, Sample, main


def measure(num_ranks: int, counts: Counts) -> Sample:
    """What the ranks and torchrun do after that is not counted."""
    os.environ.update(ONE_THREAD)
    ((taken_s, _),) = printed_after_s([*TORCHRUN, str(num_ranks), str(PROGRAM)])
    return {"script_s": taken_s}


if __name__ == "__main__":
    main(measure)
