"""Steps of DDP, FSDP2 and tensor parallel programs on a mesh and under torchrun, and the step after
an edit.

``python -m benchmarks.training``: both have four ranks that are there at once, with one thread
each, and run the same source; they are measured in turn, a batch of steps each, while the others
wait. Of each batch the ratio or the difference is kept, so that what else the machine does meets
both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import cellmesh

from .drivers.protocol import Sample, elapsed_s
from .drivers.torchrun_rank import TIMED_LOOP
from .figures import Figures
from .machine import describe_machine
from .processes import cpu_s
from .report import table, targets_table
from .targets import TRAINING_TARGETS
from .units import MICROSECONDS, MILLISECONDS, SECONDS, TIMES

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("ddp", "fsdp2", "tp")
NOTEBOOK = ROOT / "notebooks" / "11_language_model.ipynb"
SCRIPT = ROOT / "tests" / "exactness" / "scripts" / "11_language_model.py"
LAST_CELL = "first"  # of the notebook's, before the first step after an edit
EDIT = ("max_norm, norm)", "0.5 * max_norm, norm)")  # a line of its training step
NUM_RANKS, NUM_MODEL_RANKS = 4, 8
NUM_WARMUPS, NUM_EDITS = 10, 5
_TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
)
_WAYS = {"torchrun": "torchrun", "loop": "loop in a cell", "cell": "one step a cell"}
Taken = tuple[float, float]  # by a batch on a rank: on the clock, and CPU time
_LEAVE_S = 30.0
_CONNECT_S = 120.0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the batches; one round of edits"
    )
    parser.add_argument("--only", choices=(*PROGRAMS, "edit"), action="append", help="repeatable")
    parser.add_argument("--out", type=Path, help="write the tables here as well, as Markdown")
    arguments = parser.parse_args(argv)
    chosen = arguments.only or (*PROGRAMS, "edit")
    machine = describe_machine()
    num_batches, num_rounds = (4, 1) if arguments.quick else (40, 3)
    # The same for both: a rank's number of threads, and the interface that gloo uses.
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    samples: dict[str, list[Sample]] = {}
    for name in chosen:
        print(f"{name} ... ", end="", flush=True)
        began = time.monotonic()
        samples[name] = (
            _measure_edits(num_rounds) if name == "edit" else _measure_steps(name, num_batches)
        )
        print(f"{time.monotonic() - began:.0f} s")
    figures = Figures(samples)
    facts = "\n".join(f"- {name}: {fact}" for name, fact in machine.items())
    tables = [steps_table(figures), edits_table(figures), targets_table(figures, TRAINING_TARGETS)]
    text = "\n\n".join([facts, *(each.strip() for each in tables)]) + "\n"
    print("\n" + text)
    if arguments.out is not None:
        arguments.out.write_text(
            f"# Training\n\nWritten by `python -m benchmarks.training`.\n\n{text}"
        )


# ---- steps


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
        command = [*_TORCHRUN, "--nproc-per-node", str(NUM_RANKS), str(rank_file), str(program)]
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


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is told to end."""
    process.terminate()
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- edits


def _measure_edits(num_rounds: int) -> list[Sample]:
    """The language model: a changed line and the step after it, against the script started
    again.
    """
    cells = _cells_of_the_model()
    edits = [cells["step"].replace(*EDIT), cells["step"]]
    assert edits[0] != edits[1], "the notebook's step has no such line any more"
    here = os.getcwd()
    os.chdir(NOTEBOOK.parent)  # where its ranks look for the book
    try:
        with cellmesh.start(NUM_MODEL_RANKS, mesh={"pp": 2, "dp": 2, "tp": 2}) as mesh:
            for source in cells.values():
                mesh.submit_cell(source, quiet=True).result()

            def edit_and_step_s(step: int) -> float:
                began = time.perf_counter()
                mesh.cell(edits[step % 2])
                mesh.cell(f"loss, norm = train_step({step})")
                return time.perf_counter() - began

            samples = []
            for number in range(num_rounds):
                scratch_s = _first_step_from_scratch_s()
                first = 1 + number * NUM_EDITS
                edit_s = statistics.median(map(edit_and_step_s, range(first, first + NUM_EDITS)))
                samples.append(
                    {"scratch_s": scratch_s, "edit_s": edit_s, "edit_ratio": scratch_s / edit_s}
                )
            return samples
    finally:
        os.chdir(here)


def _cells_of_the_model() -> dict[str, str]:
    """The notebook's cells for the ranks, by id, up to its first step."""
    cells: dict[str, str] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        first_line, _, source = "".join(cell["source"]).partition("\n")
        if cell["cell_type"] == "code" and first_line.startswith("%%dist"):
            cells[cell["id"]] = source
        if cell["id"] == LAST_CELL:
            break
    return cells


def _first_step_from_scratch_s() -> float:
    """From the call of torchrun until rank 0 says that the first step is done."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [*_TORCHRUN, "--nproc-per-node", str(NUM_MODEL_RANKS), str(SCRIPT)],
        env={**os.environ, "NOTEBOOK_STEPS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 0"):
                return time.perf_counter() - began
        raise RuntimeError(f"{SCRIPT.name} took no step: exit status {process.wait()}")
    finally:
        _end(process)


# ---- tables


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


def edits_table(figures: Figures) -> str:
    """The first step after an edit."""
    lines = [["", "torchrun from scratch", "cell again, and a step", "times faster"]]
    shown = [SECONDS.show(figures.get("edit", measure)) for measure in ("scratch_s", "edit_s")]
    return table(
        [*lines, ["language model", *shown, TIMES.show(figures.get("edit", "edit_ratio"))]]
    )


if __name__ == "__main__":
    main()
