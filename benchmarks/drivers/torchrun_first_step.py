"""torchrun: from its call until rank 0 of the program prints its loss."""

from __future__ import annotations

import os
import sys

from .first_step import ONE_THREAD, PROGRAM, printed_after_s
from .protocol import Counts, Sample, main


def measure(num_ranks: int, counts: Counts) -> Sample:
    """What the ranks and torchrun do after that is not counted."""
    os.environ.update(ONE_THREAD)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    place = ("--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks), str(PROGRAM))
    ((taken_s, _),) = printed_after_s([*torchrun, *place])
    return {"script_s": taken_s}


if __name__ == "__main__":
    main(measure)
