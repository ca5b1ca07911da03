"""What is lost while a mesh is restarted or healed, and ranks that can be spoken to no longer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError
from tests.conftest import check_nothing_left, own_runtime_dir, process_named, processes_named

WAIT_S = 60.0
VICTIMS = ["cellmesh-store", "cellmesh-zygote", "cellmesh-r1"]
MEET = "t = torch.ones(1); dist.all_reduce(t)"


@pytest.fixture(scope="module")
def lossy() -> Iterator[tuple[cm.Mesh, Path]]:
    """Two ranks that lose what they need again and again."""
    with own_runtime_dir() as directory:
        with cm.start(2) as mesh:
            yield mesh, directory
        check_nothing_left(directory)


def check_whole(mesh: cm.Mesh) -> None:
    mesh.cell(MEET)
    assert mesh.pull("t.item()").list == [2.0, 2.0]


def pids_named(directory: Path, name: str) -> set[int]:
    return {process.pid for process in processes_named(directory, name)}


@contextlib.contextmanager
def killing(directory: Path, victim: str, moment: str) -> Iterator[None]:
    """Kill a process before something is done, when the old rank 1 has gone, or when a new one is
    there.
    """
    old = pids_named(directory, "cellmesh-r1")

    def kill() -> None:
        with contextlib.suppress(ValueError, psutil.Error):  # it is being replaced right now
            process_named(directory, victim).kill()

    def wait_and_kill() -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            now = pids_named(directory, "cellmesh-r1")
            if (now - old) if moment == "new rank" else not now & old:
                return kill()
        raise AssertionError(f"the moment of {moment!r} did not come")

    if moment == "before":
        kill()
        yield
        return
    killer = threading.Thread(target=wait_and_kill)
    killer.start()
    yield
    killer.join()


@pytest.mark.parametrize("moment", ["before", "old rank gone", "new rank"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_process_that_dies_within_a_restart_is_replaced(
    victim: str, moment: str, lossy: tuple[cm.Mesh, Path]
) -> None:
    mesh, directory = lossy
    with killing(directory, victim, moment):
        mesh.restart()
    with contextlib.suppress(CellmeshError):  # where the new rank was killed when it was ready
        mesh[1].run(int)  # returns once the controller has the death of rank 1
    if mesh.report()[1].phase == "dead":
        mesh.heal()
    check_whole(mesh)


@pytest.mark.parametrize("victim", VICTIMS)
def test_process_that_dies_within_a_heal_costs_one_more_heal(
    victim: str, lossy: tuple[cm.Mesh, Path]
) -> None:
    mesh, directory = lossy
    mesh.cell("kept = rank")
    with pytest.raises(cm.RankFailure):
        mesh[1].cell("import os; os._exit(1)")
    with killing(directory, victim, "new rank"), contextlib.suppress(CellmeshError):
        mesh.heal()
    with contextlib.suppress(CellmeshError):  # where the new rank was killed when it was ready
        mesh[1].run(int)
    mesh.heal()
    check_whole(mesh)
    assert mesh[0].pull("kept") == 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("os.execvp('sleep', ['sleep', '1000'])", r"closed its connection .*os.exec.*: killed"),
        ("os.execv(sys.executable, [sys.executable, '-c', 'input()'])", "closed its connection"),
        ("os.closerange(3, 256)\nwhile True: pass", "closed its connection to the agent"),
        ("os.close(3)\nwhile True: pass", "closed its connection to the agent"),
        ("os.close(4)\nwhile True: pass", "closed its connection to the agent"),
        ("os.write(3, b'x' * 100)\nwhile True: pass", "wrote into its connection to the agent"),
    ],
)
def test_a_rank_that_can_be_spoken_to_no_longer_has_died(
    source: str, words: str, lossy: tuple[cm.Mesh, Path]
) -> None:
    mesh, _ = lossy
    mesh.cell("import os, sys; kept = rank")
    indented = source.replace("\n", "\n    ")
    run = mesh.submit_cell(f"if rank == 1:\n    {indented}\n{MEET}")
    with pytest.raises(cm.RankFailure, match=f"rank 1 {words}"):
        run.result(WAIT_S)
    assert mesh.heal().respawned == (1,)
    check_whole(mesh)
    assert mesh[0].pull("kept") == 0
