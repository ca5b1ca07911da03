"""Controllers that leave, end, come back, take over, and whose connections are cut."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import cellmesh as cm
from cellmesh.controller.session.attach import attach
from cellmesh.errors import HostError, NoMeshError, RanksInterrupted
from cellmesh.wire.ticket import read_ticket, runtime_root, write_ticket
from tests.conftest import processes_of

from .conftest import Recorder

WAIT_S = 40.0

SCRIPT = """
import sys
import cellmesh as cm
mesh = cm.start(2, name="kept", lease_s={lease_s})
mesh.cell("kept = rank; import pathlib, time")
{then}
mesh.states()  # the agent has what was sent before
print("up", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def controller(then: str = "", lease_s: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Another process that has started a mesh of two ranks, ``kept``."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=then, lease_s=lease_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "up\n" in iter(process.stdout.readline, "")  # what its cell prints may come before
        yield process
    finally:
        process.kill()
        process.communicate()


def gate(path: Path) -> str:
    """A cell that says something, waits for a file, and says something else."""
    return (
        f"print('begun', flush=True)\nwhile not pathlib.Path({str(path)!r}).exists(): "
        "time.sleep(0.01)\nprint('went on')\nfinal = 'done'"
    )


@pytest.fixture
def leased(runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Two ranks with a lease, started by this process."""
    mesh = cm.start(2, name="leased", lease_s=60)
    mesh.cell("kept = rank")
    yield mesh
    mesh.stop()
    with contextlib.suppress(NoMeshError):
        attach("leased", steal=True).stop()


# ---- who goes and comes


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_the_ranks_and_their_cell_outlive_the_notebook(
    how: str, runtime_dir: Path, tmp_path: Path, recorder: Recorder
) -> None:
    with controller(f'mesh.submit_cell("""{gate(tmp_path / "go")}""")') as process:
        if how == "SIGKILL":
            process.kill()
        process.communicate("")
        mesh = attach(sink=recorder)
        try:
            (run,) = mesh.runs
            assert run.title == "cell 2"
            (tmp_path / "go").touch()
            run.result(WAIT_S)
            recorder.wait_for_line("went on")
            assert "nobody was attached" in recorder.notes[0]
            assert mesh.pull("(kept, final)").list == [(0, "done"), (1, "done")]
            mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
            assert mesh.pull("t.item()").list == [2.0, 2.0]
        finally:
            mesh.stop()


def test_a_mesh_can_be_left_and_attached_again_in_one_process(leased: cm.Mesh) -> None:
    with pytest.raises(NoMeshError, match="there is no mesh 'x'"):
        attach("x")
    leased.reshape({"a": 2, "b": 1})
    leased.detach()
    assert not leased.alive
    with pytest.raises(NoMeshError, match="detached"):
        leased.run(int)
    again = attach()
    assert again.pull("kept").list == [0, 1]
    assert again.dims == {"a": 2, "b": 1}
    again.detach()
    leased.stop()  # it is not its own any more
    third = attach("leased")
    assert third.pull("kept").list == [0, 1]
    third.stop()
    with pytest.raises(NoMeshError, match="there is no mesh 'leased'"):
        attach("leased")


def test_a_wait_for_an_earlier_notebooks_input_is_named_and_can_be_interrupted(
    runtime_dir: Path, recorder: Recorder
) -> None:
    asks = """mesh.submit_cell("kept = 7; input('name? ')")
while not all(state.asks for state in mesh.states().values()): pass"""
    with controller(asks) as process:
        process.kill()
        process.communicate()
        mesh = attach(sink=recorder)
        try:
            (run,) = mesh.runs
            assert {state.asks for state in mesh.states().values()} == {True}
            mesh.interrupt()
            with pytest.raises(RanksInterrupted):
                run.result(WAIT_S)
            mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
            assert mesh.pull("(kept, t.item())").list == [(7, 2.0), (7, 2.0)]
        finally:
            mesh.stop()


def test_a_lease_ends_and_leaves_nothing(runtime_dir: Path) -> None:
    with controller(lease_s=0.5) as process:
        pidfds = [os.pidfd_open(owned.pid) for owned in processes_of(runtime_dir)]
        process.kill()
        process.communicate()
        for pidfd in pidfds:
            poll = select.poll()
            poll.register(pidfd)
            assert poll.poll(WAIT_S * 1000)
            os.close(pidfd)


# ---- who may not


def test_a_mesh_that_is_held_is_refused_and_can_be_stolen(runtime_dir: Path) -> None:
    then = """
import threading
run = mesh.submit_cell("time.sleep(1000)")
def tell():
    try:
        run.result()
    except cm.RankFailure as error:
        print("told:", error, flush=True)
threading.Thread(target=tell, daemon=True).start()
"""
    with controller(then) as process:
        with pytest.raises(NoMeshError, match=rf"held by process {process.pid}.*--steal"):
            attach()
        mesh = attach(steal=True)
        try:
            assert process.stdout is not None
            assert f"process {os.getpid()}" in process.stdout.readline()
            mesh.interrupt()
            (run,) = mesh.runs
            run.wait(WAIT_S)
            process.communicate("")  # its normal exit is no end of what it no longer holds
            assert mesh.pull("kept").list == [0, 1]
        finally:
            mesh.stop()


def test_tickets_that_do_not_fit_or_that_others_may_read_are_refused(leased: cm.Mesh) -> None:
    leased.detach()
    path = runtime_root() / "leased" / "ticket.json"
    ticket = read_ticket(path)
    for changes, error, words in (
        ({"version": "9.9.9"}, HostError, r"cellmesh 9\.9\.9, and this is"),
        ({"agent_ticks": 1}, NoMeshError, "has ended: `cellmesh ps`"),
        ({"boot": "another"}, HostError, "another host"),  # which has this one's name
        ({"pid_namespace": "pid:[1]"}, HostError, "another container"),
        ({"boot": "another", "host": "b"}, HostError, r"another host \(b; this is"),
    ):
        is_place = bool(changes.keys() & {"boot", "pid_namespace"})
        place = msgspec.structs.replace(ticket.place, **changes) if is_place else ticket.place
        more = {} if is_place else changes
        write_ticket(msgspec.structs.replace(ticket, place=place, **more))
        with pytest.raises(error, match=words):
            attach("leased")
    write_ticket(ticket)
    path.chmod(0o644)
    with pytest.raises(HostError, match="not yours alone"):
        attach("leased")
    path.chmod(0o600)
    attach("leased").stop()


# ---- cuts


def cut_connection() -> int:
    """Shut down this process's connections to agents; how many there were."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family == socket.AF_UNIX and str(copy.getpeername()).endswith("agent.sock"):
                    copy.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def test_messages_are_neither_lost_nor_doubled_for_any_cut(
    own_mesh: cm.Mesh, recorder: Recorder
) -> None:
    # More than the window is under way when the connection is cut.
    large = own_mesh.submit(lambda: b"x" * (40 << 20))
    assert cut_connection() == 1
    assert [len(value) for value in large.result(WAIT_S).list] == [40 << 20] * 2
    printing = own_mesh.submit_cell(
        "import time\nfor i in range(50):\n    print(i)\n    time.sleep(0.01)", sink=recorder
    )
    own_mesh.cell(
        "calls = []\ndef note(number, load):\n    calls.append(number)\n    return number"
    )

    def note_call(number: int, load: str) -> int:
        return note(number, load)  # type: ignore[name-defined,no-any-return]  # noqa: F821

    chance = random.Random(4)
    over = threading.Event()
    num_cuts = 0

    def keep_cutting() -> None:
        nonlocal num_cuts
        while num_cuts < 100 and not over.wait(chance.uniform(0, 0.02)):
            num_cuts += cut_connection()

    cutter = threading.Thread(target=keep_cutting)
    cutter.start()
    runs, number = [], 0
    try:
        while cutter.is_alive():
            size = chance.choice([1, 1, 1000, 300_000])
            runs.append((number, own_mesh.submit(note_call, number, "x" * size)))
            number += 1
            if number % 20 == 0:
                runs[-1][1].result(WAIT_S)
        for expected, run in runs:
            assert run.result(WAIT_S).list == [expected, expected]
    finally:
        over.set()
        cutter.join()
    assert num_cuts == 100
    assert own_mesh.pull("calls").list == [list(range(number))] * 2
    printing.result(WAIT_S)
    for rank in (0, 1):
        shown = [text for ranks, text in recorder.lines() if rank in ranks]
        assert shown == [str(i) for i in range(50)]


def test_a_cell_that_is_sent_between_an_attach_and_a_detach_runs(leased: cm.Mesh) -> None:
    leased.detach()
    visited = attach("leased")
    visited.submit_cell("kept = -1")
    visited.detach()
    again = attach("leased")
    assert again.pull("kept") == {0: -1, 1: -1}
    again.stop()
