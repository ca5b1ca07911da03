"""Cells in which the controller's process ends: a script that is killed, a notebook's kernel that
restarts.

The mesh lives on under its lease; this process then attaches to it, and checks that all is there.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cellmesh as cm
from tests.conftest import check_nothing_left, own_runtime_dir
from tests.mesh.test_kernel import Notebook, open_notebook

from .cells import ARRIVAL_S, CELL_S, Result
from .models import DIMS, NUM_RANKS, PRELOAD, SETUP
from .rig import Losses, Rig
from .rows import Doing, Fault, cell_for
from .watching import Shown, deadline, wait_until

# Ends a controller whose ranks have arrived at a gate; gives how long another took to attach, if
# one did.
Killer = Callable[[Path], float]

MESH_NAME = "survivor"
LEASE_S = 60.0
READY_S = 60.0
ATTACH_S = 30.0

_SCRIPT = """
import json, sys
import cellmesh as cm
asked = json.loads(sys.stdin.readline())
mesh = cm.start(
    asked["num_ranks"],
    mesh=asked["dims"],
    name=asked["name"],
    lease_s=asked["lease_s"],
    preload=asked["preload"],
)
mesh.cell(asked["setup"])
run = mesh.submit_cell(asked["cell"])
if asked["waits"]:
    run.result()
print("waiting", flush=True)
sys.stdin.read()
"""


def run_cell(fault: Fault, doing: Doing, losses: Losses) -> Result:
    """End the process of a controller while its ranks do something, and go on with them here."""
    with own_runtime_dir() as directory, contextlib.ExitStack() as stack:
        stack.enter_context(deadline(directory, 2 * CELL_S, f"{fault.name} x {doing.name}"))
        gate = directory / "gate0"
        cell = cell_for(fault, doing, str(gate))
        is_script = fault.name == "kernel SIGKILL"
        controller = _lost_script(cell, doing) if is_script else _restarted_kernel(cell, doing)
        attach_s = stack.enter_context(controller)(gate)
        began = time.monotonic()
        mesh = cm.attach(MESH_NAME, sink=Shown())
        stack.callback(mesh.stop)
        attach_s = attach_s or time.monotonic() - began
        assert attach_s < ATTACH_S, f"to attach took {attach_s:.1f} s"
        rig = Rig(mesh, directory, losses)
        _finish_runs(rig, gate, doing, shows_runs=is_script)
        rig.adopt()
        for kept in rig.kept.values():
            kept.counter = 1
        rig.verify()
        back_s = time.monotonic() - began
        rig.check_leftovers()
        mesh.stop()
        check_nothing_left(directory)
    return Result(fault.name, doing.name, "unharmed", attach_s, back_s)


def _finish_runs(rig: Rig, gate: Path, doing: Doing, shows_runs: bool) -> None:
    """The run in flight is known here; let it go on, and wait for its end."""
    runs = [run for run in rig.mesh.runs if not run.done()]
    gate.touch()
    if shows_runs and doing.place and doing.name != "sleep":  # a short sleep may be over by now
        assert runs, "the run in flight is not known to the controller that attached"
    for run in runs:
        run.result(timeout_s=ARRIVAL_S)


def _wait_for_arrival(gate: Path) -> None:
    marks = [gate.with_name(f"{gate.name}.{rank}") for rank in range(NUM_RANKS)]
    wait_until(lambda: all(mark.exists() for mark in marks), READY_S, "the ranks' arrival")


@contextlib.contextmanager
def _lost_script(cell: str, doing: Doing) -> Iterator[Killer]:
    """A script that is killed; gives what does that, and returns when it was."""
    command = [sys.executable, "-c", _SCRIPT]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    asked = {
        "num_ranks": NUM_RANKS,
        "dims": DIMS,
        "name": MESH_NAME,
        "lease_s": LEASE_S,
        "preload": PRELOAD,
        "setup": SETUP,
        "cell": cell,
        "waits": doing.name != "background run",
    }
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()

    def kill(gate: Path) -> float:
        _wait_for_arrival(gate)
        if not doing.place:
            _read_until(process, "waiting")
        process.kill()
        process.wait()
        return 0.0

    try:
        yield kill
    finally:
        process.kill()
        process.communicate()


def _read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while process.stdout.readline().strip() != line:  # ended by the deadline that the caller has
        if process.poll() is not None:
            raise AssertionError("the script has ended")


@contextlib.contextmanager
def _restarted_kernel(cell: str, doing: Doing) -> Iterator[Killer]:
    """A kernel that is restarted; the new one attaches, shows what it must, and detaches."""
    with open_notebook() as notebook:
        dims = ",".join(f"{name}={size}" for name, size in DIMS.items())
        for code in (
            "%load_ext cellmesh",
            f"%dist_start {NUM_RANKS} --mesh {dims} --name {MESH_NAME} --lease {LEASE_S:.0f} "
            f"--preload {','.join(PRELOAD)}",
            f"%%dist\n{SETUP}",
        ):
            _run(notebook, code)
        options = " --nowait" if doing.name == "background run" else ""
        sent = notebook.send(f"%%dist{options}\n{cell}")
        if not doing.place or options:
            assert notebook.finish(sent).status == "ok"

        def restart(gate: Path) -> float:
            _wait_for_arrival(gate)
            notebook.client.stop_channels()
            notebook.manager.restart_kernel(now=True)
            notebook.client = notebook.manager.blocking_client()
            notebook.client.start_channels()
            notebook.client.wait_for_ready(timeout=READY_S)
            _run(notebook, "%load_ext cellmesh")
            began = time.monotonic()
            _run(notebook, f"%dist_attach {MESH_NAME}")
            attach_s = time.monotonic() - began
            gate.touch()
            # It comes after what is in flight.
            text = _run(notebook, "print(mesh.pull(\"kept['counter']\").list)")
            assert text.strip() == str([1] * NUM_RANKS), text
            _run(notebook, "%dist_detach")
            return attach_s

        yield restart


def _run(notebook: Notebook, code: str) -> str:
    outcome = notebook.run(code)
    assert outcome.status == "ok", f"{code[:60]}: {outcome.errors()[-1:]}"
    return outcome.text()
