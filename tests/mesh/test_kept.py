"""What is kept of what has ended: in the notebook and on a rank."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RanksInterrupted
from tests.conftest import process_named
from tests.faults.watching import wait_until

WAIT_S = 20.0


def _held() -> tuple[int, list[str]]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


def _start() -> cm.Mesh:
    return cm.start(1, name="held", lease_s=60)


def _kill_agent() -> None:
    mesh = _start()
    process_named(Path(os.environ["JUPYTER_RUNTIME_DIR"]), "cellmesh-agent").kill()
    wait_until(lambda: not mesh.alive, WAIT_S, "the mesh's end")


def _steal() -> None:
    mesh = _start()
    code = "import cellmesh as cm; cm.attach('held', steal=True).stop()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    wait_until(lambda: not mesh.alive, WAIT_S, "the mesh's end")


def _restart_heal_and_attach() -> None:
    mesh = _start()
    mesh.restart()
    with contextlib.suppress(cm.RankFailure):
        mesh.cell("import os; os._exit(1)")
    mesh.heal()
    for run in [mesh.submit(time.sleep, 60) for _ in range(10)]:
        run.cancel()
    mesh.run(int)
    mesh.detach()
    cm.attach("held").stop()


def _fail_to_start() -> None:
    with pytest.raises(MeshUsageError):
        cm.start(1, preload="no_such_module")


def test_a_mesh_that_has_ended_keeps_no_descriptor_and_no_thread(runtime_dir: Path) -> None:
    with _start():  # what is imported and made once
        pass
    before = _held()
    acts: list[Callable[[], None]] = [
        _kill_agent, _steal, _restart_heal_and_attach, _fail_to_start,
    ]  # fmt: skip
    for act in acts:
        act()
        wait_until(lambda: _held() == before, WAIT_S, f"nothing of {act.__name__} is held")


def _count_kept() -> tuple[int, int, list[str]]:
    gc.collect()
    names = sorted(
        thread.name for thread in threading.enumerate() if "free_if_stuck" not in thread.name
    )
    return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), names


CELLS = {
    "ends": "x = [1]\nx",
    "raises": "def f(x):\n    raise ValueError(x)\nf(7)",  # IPython keeps the syntax tree
    "raises in torch": "import torch.nn as nn\nnn.Linear(2, 3)(torch.ones(4))",
    "interrupted": "while True: pass",
}


def test_a_rank_keeps_little_of_a_cell(own_mesh: cm.Mesh) -> None:
    def run_cells(cell: str, num: int = 25) -> None:
        for _ in range(num):
            run = own_mesh.submit_cell(cell, quiet=True)
            if "while" in cell:
                run.cancel()
            with contextlib.suppress(cm.RankFailure, RanksInterrupted):
                run.result()

    for name, cell in CELLS.items():
        run_cells(cell)  # what is made once
        objects, descriptors, threads = own_mesh[0].run(_count_kept)
        run_cells(cell)
        after = own_mesh[0].run(_count_kept)
        assert after[1:] == (descriptors, threads), name
        assert (after[0] - objects) / 25 < 20, name
