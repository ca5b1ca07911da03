"""cellmesh: a mesh of two ranks beside one that is there, in a script and in a kernel."""

from __future__ import annotations

import statistics

from .kernel import open_kernel
from .protocol import Counts, Sample, elapsed_s, main

_NUM_STARTS = 5
_KERNEL = """
from benchmarks.drivers.protocol import elapsed_s
_start_s = elapsed_s(
    lambda: get_ipython().run_line_magic("dist_start", "2 --name generator{number}")
)
"""


def measure(num_ranks: int, counts: Counts) -> Sample:
    """From the call of the start, or of the magic, to its end: the group is up then."""
    import cellmesh

    with cellmesh.start(num_ranks):
        script_s = []
        for _ in range(_NUM_STARTS):
            script_s.append(elapsed_s(lambda: cellmesh.start(2)))
        for mesh in [*cellmesh.meshes.values()][1:]:
            mesh.stop()
    with open_kernel() as execute:
        execute(f"%load_ext cellmesh\n%dist_start {num_ranks}")
        notebook_s = [
            float(execute(_KERNEL.format(number=number), "str(_start_s)"))
            for number in range(_NUM_STARTS)
        ]
        execute("import cellmesh\nfor mesh in [*cellmesh.meshes.values()]: mesh.stop()")
    return {
        "script_s": script_s[0],
        "script_more_s": statistics.median(script_s[1:]),
        "notebook_s": notebook_s[0],
        "notebook_more_s": statistics.median(notebook_s[1:]),
    }


if __name__ == "__main__":
    main(measure)
