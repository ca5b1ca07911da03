"""Losses while a mesh is restarted or healed, ranks that can be spoken to no longer, and operations
whose message a dead rank has left in its middle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError
from cellmesh.magics.render.tables import status_table
from tests.conftest import (
    clean_runtime_dir,
    process_named,
    processes_named,
    stop_process,
)
from tests.faults.watching import wait_until

from .conftest import Recorder, state_of

WAIT_S = 60.0
VICTIMS = ["cellmesh-store", "cellmesh-zygote", "cellmesh-r1"]
CLOSED = "(closed its connection to the agent|was killed by SIGABRT)"
MEET = "t = torch.ones(1); dist.all_reduce(t)"


@pytest.fixture(scope="module")
def lossy() -> Iterator[tuple[cm.Mesh, Path]]:
    """Two ranks that lose what they need again and again."""
    with clean_runtime_dir() as directory, cm.start(2) as mesh:
        yield mesh, directory


def check_whole(mesh: cm.Mesh) -> None:
    mesh.cell(MEET)
    assert mesh.pull("t.item()").list == [2.0, 2.0]


def pids_named(directory: Path, name: str) -> set[int]:
    return {process.pid for process in processes_named(directory, name)}


@contextlib.contextmanager
def killing(directory: Path, victim: str) -> Iterator[None]:
    """Kill a process when a new rank 1 is there."""
    old = pids_named(directory, "cellmesh-r1")

    def wait_and_kill() -> None:
        wait_until(lambda: pids_named(directory, "cellmesh-r1") - old, WAIT_S, "a new rank 1")
        with contextlib.suppress(ValueError, psutil.Error):  # it is being replaced right now
            process_named(directory, victim).kill()

    killer = threading.Thread(target=wait_and_kill)
    killer.start()
    yield
    killer.join()


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("act", ["restart", "heal"])
def test_a_process_that_dies_within_a_restart_or_a_heal_is_replaced(
    act: str, victim: str, lossy: tuple[cm.Mesh, Path]
) -> None:
    mesh, directory = lossy
    mesh.cell("kept = rank")
    if act == "heal":
        with pytest.raises(cm.RankFailure):
            mesh[1].cell("import os; os._exit(1)")
    with killing(directory, victim), contextlib.suppress(CellmeshError):
        mesh.restart() if act == "restart" else mesh.heal()
    with contextlib.suppress(CellmeshError):  # where the new rank was killed when it was ready
        mesh[1].run(int)  # returns once the controller has the death of rank 1
    mesh.heal()
    check_whole(mesh)
    assert mesh[0].pull("globals().get('kept')") == (0 if act == "heal" else None)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("os.execvp('sleep', ['sleep', '1000'])", r"closed its connection .*os.exec.*: killed"),
        ("os.closerange(3, 256)\nwhile True: pass", "closed its connection to the agent"),
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


def test_auto_heal_replaces_an_idle_rank_and_the_next_cell_says_so(
    runtime_dir: Path, recorder: Recorder
) -> None:
    with cm.start(2, auto_heal=True) as mesh:
        mesh.cell("value = rank")
        os.kill(mesh.report()[1].pid, signal.SIGKILL)
        wait_until(
            lambda: mesh.report()[1].phase == "idle" and mesh.report()[1].predecessor_ending,
            WAIT_S,
            "a new rank 1",
        )
        assert "new and empty: its predecessor was killed by SIGKILL" in repr(
            status_table("", mesh.report(), mesh.states())
        )
        run = mesh.submit_cell(f"{MEET}\nvalue", sink=recorder)
        with pytest.raises(cm.RankFailure, match="NameError"):
            run.result(WAIT_S)
        told = (
            "rank 1 was killed by SIGKILL; it is new and empty "
            "(`%dist_heal --from 0` copies from a rank)"
        )
        assert recorder.notes[0].endswith(told)  # after the mesh's name, among several
        assert mesh.heal(source=0).copied_to == (1,)
        mesh.submit_cell(f"{MEET}\nvalue", sink=recorder).result(WAIT_S)
        assert sum(note.endswith(told) for note in recorder.notes) == 1
        assert mesh.pull("(value, t.item())").list == [(0, 2.0), (0, 2.0)]


# gloo does not end with its connection (gloo/transport/tcp/pair.cc, signalException) a message that
# was being received when the rank that sends it died, and one that its receiver had asked for and
# that could not be written any more, as the receiver had died.
# What rank 1 begins before it dies, and where rank 0 waits: in Python, in C++ for a Work, or for a
# future.
ASK, SEND = "dist.broadcast(t, 0, async_op=True)", "dist.broadcast(big, 1, async_op=True)"
WAITS = {
    "Python": (ASK, "dist.broadcast(t, 0)"),
    "future of C++": (ASK, "pg.broadcast([t], options).get_future().wait()"),
    "functional": (ASK, "funcol.wait_tensor(funcol.broadcast(t, 0, pg))"),
    "send": ("dist.irecv(some, 0)", "dist.send(some, 1)"),
    "C++, arriving": (SEND, "dist._broadcast_coalesced(pg, [big], 1 << 30, 1)"),
    "recv from anyone": ("dist.isend(big, 0)", "dist.recv(big)"),
}
PREPARE = """
import os, signal, socket, struct, time
import torch.distributed._functional_collectives as funcol
from cellmesh.workers.groups import connections
kept, t, some, big = rank, torch.ones(4), torch.ones(1 << 15), torch.ones(25_000_000)
pg = dist.distributed_c10d._get_default_group()
options = dist.BroadcastOptions()
options.rootRank = 0
"""
# Rank 1's connections are reset, not closed, once what it has sent has arrived.
CELL = """
if rank == 0:
    {wait}
else:
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    work = {ask}
    sockets = connections.connected(connections.open_sockets())
    connections.await_quiet(sockets)
    for descriptor in sockets:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("ask", "wait"), WAITS.values(), ids=WAITS.keys())
def test_a_rank_that_waits_for_one_that_died_in_the_middle_of_a_message_is_released(
    ask: str, wait: str, lossy: tuple[cm.Mesh, Path], tmp_path: Path
) -> None:
    mesh, _ = lossy
    mesh.cell(PREPARE)
    pid = mesh.report()[0].pid
    gate = tmp_path / "gate"
    run = mesh.submit_cell(CELL.format(ask=ask, wait=wait, gate=str(gate)))
    wait_until(lambda: has_begun(mesh), WAIT_S, "rank 0's operation")
    stop_process(pid)
    gate.touch()
    wait_until(lambda: mesh.report()[1].phase == "dead", WAIT_S, "rank 1's death")
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(cm.RankFailure) as caught:
        run.result(timeout_s=WAIT_S)
    assert isinstance(caught.value.exceptions_by_rank[0], cm.Released)
    mesh.heal()
    check_whole(mesh)
    assert mesh[0].pull("kept") == 0


def has_begun(mesh: cm.Mesh) -> bool:
    """Whether rank 0 has begun what it waits in."""
    state = state_of(mesh, 0)
    numbers = (
        (count.num_collectives, count.num_sent, count.num_received) for count in state.counts
    )
    return bool(state.collective) or any(map(any, numbers))
