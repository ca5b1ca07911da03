"""A floor: one `import torch` in a fresh process, without the interpreter's own start."""

from __future__ import annotations

import statistics
import subprocess
import sys

from .protocol import Counts, Sample, main

_NUM_IMPORTS = 3
_CODE = "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"


def measure(num_ranks: int, counts: Counts) -> Sample:
    """One process at a time: nothing competes for the cores."""
    return {"start_s": statistics.median(_import_s() for _ in range(_NUM_IMPORTS))}


def _import_s() -> float:
    return float(
        subprocess.run([sys.executable, "-c", _CODE], check=True, stdout=subprocess.PIPE).stdout
    )


if __name__ == "__main__":
    main(measure)
