"""Steps of DDP, FSDP2 and tensor parallel programs on a mesh and under torchrun.

``python -m benchmarks.training``: both have four ranks that are there at once, with one thread
each, and run the same source; they are measured in turn, a batch of steps each, while the others
wait. Of each batch the ratio or the difference is kept, so that what else the machine does meets
both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import cellmesh

from .drivers.first_step import ONE_THREAD, TORCHRUN
from .drivers.protocol import Sample, elapsed_s
from .drivers.torchrun_rank import TIMED_LOOP
from .figures import Figures
from .machine import describe_machine
from .processes import cpu_s
from .report import table, targets_table
from .targets import TRAINING_TARGETS
from .units import MICROSECONDS, MILLISECONDS, TIMES

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("ddp", "fsdp2", "tp")
NUM_RANKS = 4
NUM_WARMUPS = 10
_WAYS = {"torchrun": "torchrun", "loop": "loop in a cell", "cell": "one step a cell"}
Taken = tuple[float, float]  # by a batch on a rank: on the clock, and CPU time
_LEAVE_S = 30.0
_CONNECT_S = 120.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the batches")
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="repeatable")
    parser.add_argument("--out", type=Path, help="write the tables here as well, as Markdown")
    arguments = parser.parse_args(argv)
    machine = describe_machine()
    os.environ.update(ONE_THREAD)
    samples: dict[str, list[Sample]] = {}
    for name in arguments.only or PROGRAMS:
        print(f"{name} ... ", end="", flush=True)
        began = time.monotonic()
        samples[name] = _measure_steps(name, 4 if arguments.quick else 40)
        print(f"{time.monotonic() - began:.0f} s")
    figures = Figures(samples)
    facts = "\n".join(f"- {name}: {fact}" for name, fact in machine.items())
    tables = [steps_table(figures), targets_table(figures, TRAINING_TARGETS)]
    text = "\n\n".join([facts, *(each.strip() for each in tables)]) + "\n"
    print("\n" + text)
    if arguments.out is not None:
        arguments.out.write_text(
            f"# Training\n\nWritten by `python -m benchmarks.training`.\n\n{text}"
        )


def _measure_steps(name: str, num_batches: int) -> list[Sample]:
    """One program; a sample a batch."""
    program = ROOT / "benchmarks" / "programs" / f"{name}.py"
    with _under_torchrun(program) as peers, cellmesh.start(NUM_RANKS) as mesh:
        mesh.cell(program.read_text())
        pids = mesh.pull("__import__('os').getpid()").list

        def under_torchrun(num_steps: int) -> list[Taken]:
            for peer in peers:
                peer.send(num_steps)
            return [peer.recv() for peer in peers]

        def loop_in_a_cell(num_steps: int) -> list[Taken]:
            mesh.cell(TIMED_LOOP.format(num_steps=num_steps))
            return mesh.pull("taken").list

        def one_step_a_cell(num_steps: int) -> list[Taken]:
            before_s = [*map(cpu_s, pids)]
            taken_s = elapsed_s(lambda: [mesh.cell("step()") for _ in range(num_steps)])
            return [
                (taken_s, cpu_s(pid) - used_s) for pid, used_s in zip(pids, before_s, strict=True)
            ]

        ways = {"torchrun": under_torchrun, "loop": loop_in_a_cell, "cell": one_step_a_cell}
        for way in ways.values():
            way(NUM_WARMUPS)
        # Batches of about a third of a second.
        num_steps = max(5, round(0.3 * NUM_WARMUPS / under_torchrun(NUM_WARMUPS)[0][0]))
        samples = []
        for number in range(num_batches):
            first = number % len(ways)
            order = [*ways][first:] + [*ways][:first]
            sample = {}
            for way in order:
                taken_s, cpus_s = zip(*ways[way](num_steps), strict=True)
                sample[f"{way}_s"] = taken_s[0] / num_steps
                sample[f"{way}_cpu_s"] = sum(cpus_s) / NUM_RANKS / num_steps
            sample["loop_ratio"] = sample["loop_cpu_s"] / sample["torchrun_cpu_s"]
            sample["cell_extra_s"] = sample["cell_cpu_s"] - sample["loop_cpu_s"]
            samples.append(sample)
        return samples


@contextlib.contextmanager
def _under_torchrun(program: Path) -> Iterator[list[Connection]]:
    """Connections to the ranks of a program that torchrun has started, by rank."""
    rank_file = Path(__file__).parent / "drivers" / "torchrun_rank.py"
    with (
        tempfile.TemporaryDirectory() as folder,
        Listener(f"{folder}/socket", "AF_UNIX") as listener,
    ):
        # A rank that fails to start never connects: accepting must not wait for ever.
        listener._listener._socket.settimeout(_CONNECT_S)  # type: ignore[attr-defined]
        command = [*TORCHRUN, str(NUM_RANKS), str(rank_file), str(program)]
        process = subprocess.Popen([*command, f"{folder}/socket"])
        try:
            peers: dict[int, Connection] = {}
            while len(peers) < NUM_RANKS:
                peer = listener.accept()
                peers[peer.recv()] = peer
            yield [peers[rank] for rank in sorted(peers)]
            for peer in peers.values():
                peer.send(0)
            process.wait(_LEAVE_S)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is told to end."""
    process.terminate()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def steps_table(figures: Figures) -> str:
    """Medians of a step, and what a mesh adds."""
    lines = [["program", "", *_WAYS.values(), "loop / torchrun", "a cell more"]]
    for name in PROGRAMS:
        if figures.get(name, "torchrun_s") is None:
            continue
        shown = {
            kind: [MILLISECONDS.show(figures.get(name, f"{way}{kind}")) for way in _WAYS]
            for kind in ("_s", "_cpu_s")
        }
        ratio = TIMES.show(figures.get(name, "loop_ratio"))
        extra = MICROSECONDS.show(figures.get(name, "cell_extra_s"))
        lines.append([name, "on the clock", *shown["_s"], "", ""])
        lines.append(["", "CPU time a rank", *shown["_cpu_s"], ratio, extra])
    return table(lines)


if __name__ == "__main__":
    main()
