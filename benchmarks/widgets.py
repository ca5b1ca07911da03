"""What it costs to look at a tensor: time to its picture, and bytes over the wire, by its size.

``python -m benchmarks.widgets``: one rank holds float32 tensors of 1 thousand, 16 million and 1
billion elements (4 GB: ``--max-elements`` leaves that out). Each is pictured whole (496 x 496
pixels, as many as the inspector asks for; two reductions), then a corner of it, pixel by element,
then described (statistics and digest). Beside each stands the floor of the same run: one pass over
the tensor's memory (``tensor.sum()``) on the rank, one thread.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import cellmesh as cm
from benchmarks.machine import describe_machine
from cellmesh.controller.inspect import look
from cellmesh.magics.views.inspector.inspector import MAX_PIXELS
from cellmesh.wire.inspect import AnyRequest, Overview, Picture, Reduction

SIDES = (32, 4096, 32768)
PIXELS = MAX_PIXELS
REDUCTIONS: tuple[Reduction, ...] = ("mean", "absmax")


def _median_ms(action: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _ask(mesh: cm.Mesh, subject: AnyRequest, is_beside: bool = False) -> Any:
    looked = look(mesh[0].rank_set, subject, is_beside=is_beside)
    if looked.refusals:
        raise RuntimeError(str(looked.refusals[0]))
    return looked.answers[0]


def _picture(side: int, region: int, reduction: Reduction) -> Picture:
    size, sides = min(PIXELS, region), (0, region)
    return Picture(
        "x", dims=(0, 1), rows=sides, cols=sides, height=size, width=size, reduction=reduction
    )


def _measure(mesh: cm.Mesh, side: int, rounds: int) -> None:
    mesh.cell(f"x = torch.randn({min(side, 4096)}, {side}).repeat({max(1, side // 4096)}, 1)")
    floor_ms = mesh[0].pull(f"time_sum({rounds})") * 1e3
    print(
        f"\n## {side} x {side}: {side * side:,} elements; one pass over them: {floor_ms:.2f} ms\n"
    )
    print("| what | ms | of one pass | bytes |")
    print("|---|---|---|---|")
    views = [(f"whole, {reduction}", _picture(side, side, reduction)) for reduction in REDUCTIONS]
    views.append(("a corner, exact", _picture(side, min(side, PIXELS), "mean")))
    subjects: list[tuple[str, AnyRequest]] = [*views, ("described", Overview("x"))]
    for name, subject in subjects:
        num_bytes = len(pickle.dumps(_ask(mesh, subject), 5))
        took_ms = _median_ms(lambda subject=subject: _ask(mesh, subject), rounds)
        print(f"| {name} | {took_ms:.1f} | {took_ms / floor_ms:.2f} | {num_bytes:,} |", flush=True)
    run = mesh.submit_cell("import time\nstop = False\nwhile not stop: time.sleep(0.001)")
    took_ms = _median_ms(lambda: _ask(mesh, views[0][1], is_beside=True), rounds)
    print(f"| whole, mean, while a cell runs | {took_ms:.1f} | {took_ms / floor_ms:.2f} | |")
    run.interrupt()
    run.wait()


_FLOOR = """
import statistics, time
def time_sum(rounds):
    times = []
    for _ in range(max(3, rounds)):
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
"""


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-elements", type=float, default=2e9)
    options = parser.parse_args()
    print(", ".join(describe_machine().values()))
    with cm.start(1) as mesh:
        mesh.cell(_FLOOR)
        for side in SIDES:
            if side * side <= options.max_elements:
                _measure(mesh, side, options.rounds if side <= 4096 else 3)


if __name__ == "__main__":
    main()
