"""The same thing again and again: calls (also without waiting), cells, failed cells, restarts,
heals, starts.

::

    python -m tests.faults.endurance --output docs/reliability.md

While a kind is repeated, memory, descriptors and threads of all processes are taken; none may have
more in the last quarter than in the second. ``--share 0.01`` repeats each a hundredth as often.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import cellmesh as cm
from tests.conftest import check_nothing_left, clean_runtime_dir, own_runtime_dir

from .growth import Growth
from .table import describe_machine, write_into
from .watching import Shown, deadline, wait_until

NUM_RANKS, NUM_SAMPLES = 4, 40
STEP = "loss = model(torch.ones(2, 4)).sum()\nloss.backward()"
MODEL = (
    "torch.manual_seed(0)\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, "
    "4))\n" + STEP
)


@dataclass(frozen=True)
class Kind:
    """What is repeated, and how often."""

    name: str
    number: int
    once: Callable[[cm.Mesh, int], None]
    longest_s: float


def call(mesh: cm.Mesh, number: int) -> None:
    assert mesh.run(abs, -number).list == [number] * NUM_RANKS


def submit(mesh: cm.Mesh, number: int) -> None:
    """A call that is not waited for, but for one of a thousand."""
    run = mesh.submit(abs, -number)
    if number % 1000 == 999:
        assert run.result().list == [number] * NUM_RANKS


def cell(mesh: cm.Mesh, number: int) -> None:
    mesh.cell(f"kept = {number}")


def fail(mesh: cm.Mesh, number: int) -> None:
    """One rank raises in a step while the others wait for it; the models step on."""
    source = f"{STEP}\nif rank == {number % NUM_RANKS}: raise ValueError({number})\n{STEP}"
    with pytest.raises(cm.RankFailure) as caught:
        mesh.submit_cell(source, sink=Shown()).result(60)
    assert isinstance(caught.value.exceptions_by_rank[number % NUM_RANKS], ValueError)


def restart(mesh: cm.Mesh, number: int) -> None:
    mesh.restart()
    assert mesh.pull("world_size").list == [NUM_RANKS] * NUM_RANKS


def heal(mesh: cm.Mesh, number: int) -> None:
    """A rank is killed and replaced."""
    victim = number % NUM_RANKS
    os.kill(mesh.report()[victim].pid, signal.SIGKILL)
    wait_until(lambda: mesh.report()[victim].phase == "dead", 20, "a death")
    mesh.heal()
    mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert mesh.pull("t.item()").list == [float(NUM_RANKS)] * NUM_RANKS


def start_and_stop(directory: Path) -> None:
    with cm.start(NUM_RANKS) as mesh:
        assert mesh.run(abs, -1).list == [1] * NUM_RANKS
    check_nothing_left(directory)


KINDS = (
    Kind("calls", 200_000, call, 3600),
    Kind("pipelined calls", 1_000_000, submit, 2 * 3600),
    Kind("cells", 100_000, cell, 3600),
    Kind("failed cells", 2_000, fail, 3600),
    Kind("heals", 100, heal, 1200),
    Kind("restarts", 200, restart, 1200),
)
STARTS, NUM_STARTS = "starts and stops", 500


def repeat(name: str, number: int, directory: Path, once: Callable[[int], None]) -> str:
    """Do something so often, take samples and judge their growth; returns the figures as
    Markdown.
    """
    growth, began = Growth(), time.monotonic()
    every = max(1, number // NUM_SAMPLES)
    for index in range(number):
        once(index)
        if index % every == 0:
            growth.sample(directory)
    # The zygote of a new mesh imports for some seconds more: few times are warm-up.
    is_short = number <= NUM_SAMPLES
    growth.check(memory_share=0.25 if is_short else 0.05, num_zygote_fds=4 if is_short else 0)
    took_s = time.monotonic() - began
    return (
        f"{number:,} {name}: {describe_machine()}, {NUM_RANKS} "
        f"ranks, {took_s / 60:.1f} minutes.\n\n{growth.table()}"
    )


@contextmanager
def enduring_mesh() -> Iterator[tuple[cm.Mesh, Path]]:
    """A mesh with a model, and its runtime directory; nothing of it is left in the end."""
    with clean_runtime_dir() as directory, cm.start(NUM_RANKS, settle_s=0.1) as mesh:
        mesh.cell(MODEL)
        yield mesh, directory


def repeat_kind(kind: Kind, share: float, mesh: cm.Mesh, directory: Path) -> str:
    """Repeat one kind on a mesh; returns its figures as Markdown."""
    number = math.ceil(kind.number * share)
    with deadline(directory, kind.longest_s, kind.name, mesh):
        return repeat(kind.name, number, directory, lambda index: kind.once(mesh, index))


def repeat_starts(share: float) -> str:
    """Start and stop meshes; returns their figures as Markdown."""
    number = math.ceil(NUM_STARTS * share)
    with own_runtime_dir() as directory:
        return repeat(STARTS, number, directory, lambda index: start_and_stop(directory))


def main(arguments: Sequence[str]) -> int:
    """The command."""
    names = [*(kind.name for kind in KINDS), STARTS]
    parser = argparse.ArgumentParser(prog="python -m tests.faults.endurance", description=__doc__)
    parser.add_argument("--only", choices=names, help="one kind (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="how much of it (default: all)")
    parser.add_argument("--output", type=Path, help="write the figures here (between their marks)")
    given = parser.parse_args(arguments)
    # A shell that starts this in the background has it ignore the stop button.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in names if given.only is None else [given.only]:
        if name == STARTS:
            text = repeat_starts(given.share)
        else:
            (kind,) = (kind for kind in KINDS if kind.name == name)
            with enduring_mesh() as (mesh, directory):
                text = repeat_kind(kind, given.share, mesh, directory)
        print(text, flush=True)
        if given.output:
            write_into(given.output, name, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
