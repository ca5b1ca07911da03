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
from tests.conftest import check_nothing_left, process_named

WAIT_S = 20.0


def _held() -> tuple[int, list[str]]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


def _start() -> cm.Mesh:
    return cm.start(1, name="held", lease_s=60)


def _kill_agent() -> None:
    mesh = _start()
    process_named(Path(os.environ["JUPYTER_RUNTIME_DIR"]), "cellmesh-agent").kill()
    _await(lambda: not mesh.alive)


def _steal() -> None:
    mesh = _start()
    code = "import cellmesh as cm; cm.attach('held', steal=True).stop()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    _await(lambda: not mesh.alive)


def _restart_and_heal() -> None:
    with _start() as mesh:
        mesh.restart()
        with contextlib.suppress(cm.RankFailure):
            mesh.cell("import os; os._exit(1)")
        mesh.heal()


def _come_and_go() -> None:
    _start().detach()
    cm.attach("held").detach()
    cm.attach("held").stop()


def _fail_to_start() -> None:
    with pytest.raises(MeshUsageError):
        cm.start(1, preload="no_such_module")


def _cancel() -> None:
    with _start() as mesh:
        for run in [mesh.submit(time.sleep, 60) for _ in range(10)]:
            run.cancel()
        mesh.run(int)


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "act", [_kill_agent, _steal, _restart_and_heal, _come_and_go, _fail_to_start, _cancel]
)
def test_a_mesh_that_has_ended_keeps_no_descriptor_and_no_thread(
    act: Callable[[], None], runtime_dir: Path
) -> None:
    with _start():  # what is imported and made once
        pass
    before = _held()
    act()
    _await(lambda: _held() == before)
    assert _held() == before
    check_nothing_left(runtime_dir)


def _count_kept() -> tuple[int, int, list[str]]:
    gc.collect()
    names = sorted(
        thread.name for thread in threading.enumerate() if "free_if_stuck" not in thread.name
    )
    return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), names


@pytest.mark.parametrize(
    ("cell", "max_objects"),
    [
        (
            "def f(x):\n    raise ValueError(x)\nf(7)",
            20,
        ),  # IPython's rendering kept the syntax tree: 200
        ("x = [1]\nx", 20),
        ("import torch.nn as nn\nnn.Linear(2, 3)(torch.ones(4))", 20),
        ("while True: pass", 20),
    ],
    ids=["raises", "ends", "raises in torch", "interrupted"],
)
def test_a_rank_keeps_little_of_a_cell(cell: str, max_objects: int, own_mesh: cm.Mesh) -> None:
    num = 25

    def run_cells() -> None:
        for _ in range(num):
            run = own_mesh.submit_cell(cell, quiet=True)
            if "while" in cell:
                run.cancel()
            with contextlib.suppress(cm.RankFailure, RanksInterrupted):
                run.result()

    run_cells()  # what is made once
    objects, descriptors, threads = own_mesh[0].run(_count_kept)
    run_cells()
    after = own_mesh[0].run(_count_kept)
    assert after[1] == descriptors
    assert after[2] == threads
    assert (after[0] - objects) / num < max_objects
