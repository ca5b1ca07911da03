"""cellmesh: the first step in a kernel and as a script, and what a project's second notebook
imports.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from .first_step import PROGRAM, printed_after_s
from .kernel import open_kernel
from .protocol import Counts, Sample, elapsed_s, main

# From `%load_ext` until `%dist_start`, as a user reads and types.
_TYPING_S = 10.0
_NUM_LATER_RUNS = 2
_SCRIPT = """
import time
from pathlib import Path

import cellmesh

if __name__ == "__main__":
    began = time.perf_counter()
    with cellmesh.start({num_ranks}) as mesh:
        mesh.cell(Path({program!r}).read_text())
        taken_s = time.perf_counter() - began
        assert len(set(mesh.pull("loss").list)) == 1
        print("taken", taken_s, flush=True)
"""
_IMPORTS = "%%dist\nfrom transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer"


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Nothing has run before: what earlier runs have taught cellmesh is beside its runtime files,
    and those of a driver are its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(_SCRIPT.format(num_ranks=num_ranks, program=str(PROGRAM)))
        (first_s, _), *later = (_run_script(script) for _ in range(1 + _NUM_LATER_RUNS))
    scripts_s, steps_s = zip(*later, strict=True)
    sample = {
        "script_first_s": first_s,
        "script_s": statistics.median(scripts_s),
        "step_s": statistics.median(steps_s),
        "kernel_s": _in_a_kernel_s(num_ranks, f"%%dist\n{PROGRAM.read_text()}", is_whole=True),
    }
    for name in ("imports_first_s", "imports_s"):
        sample[name] = _in_a_kernel_s(num_ranks, _IMPORTS)
    return sample


def _run_script(script: Path) -> tuple[float, float]:
    """The time from the script's call until its loss is printed, and that of start and step."""
    (loss_s, _), (_, taken) = printed_after_s([sys.executable, str(script)])
    return loss_s, float(taken.split()[1])


def _in_a_kernel_s(num_ranks: int, cell: str, is_whole: bool = False) -> float:
    """The time of a first cell, in seconds; with that of `%dist_start` if asked for."""
    with open_kernel() as execute:
        execute("%load_ext cellmesh")
        time.sleep(_TYPING_S)
        start_s = elapsed_s(lambda: execute(f"%dist_start {num_ranks}"))
        cell_s = elapsed_s(lambda: execute(cell))
        execute("%dist_stop")
    return start_s + cell_s if is_whole else cell_s


if __name__ == "__main__":
    main(measure)
