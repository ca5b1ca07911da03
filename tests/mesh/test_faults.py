"""Ranks, agents and notebooks that end, the stop button, and a rank without descriptors."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import HostError, NoMeshError, RanksInterrupted
from tests.conftest import check_nothing_left, clean_runtime_dir, process_named, processes_of

from .conftest import Recorder

WAIT_S = 40.0


@pytest.fixture(scope="module")
def hardy() -> Iterator[cm.Mesh]:
    """Three ranks that are interrupted and go on."""
    with clean_runtime_dir(), cm.start(3) as started:
        started.cell(
            "kept = rank; import threading, time, asyncio; gate = threading.Event()\n"
            "doze = lambda items: time.sleep(1000)"
        )
        yield started


@pytest.fixture(scope="module")
def waiting_mesh() -> Iterator[cm.Mesh]:
    """Two ranks that nobody but the user releases."""
    with clean_runtime_dir(), cm.start(2, settle_s=600) as started:
        yield started


# ---- deaths


def test_a_rank_that_dies_in_a_cell_is_reported_and_the_others_stay(
    own_mesh: cm.Mesh, recorder: Recorder
) -> None:
    own_mesh.cell("kept = rank")
    source = (
        "import os, sys\nif rank == 1:\n    print('last words', file=sys.stderr, flush=True)\n"
        "    os._exit(3)"
    )
    run = own_mesh.submit_cell(source, sink=recorder)
    with pytest.raises(cm.RankFailure, match="rank 1 exited with code 3") as caught:
        run.result(timeout_s=WAIT_S)
    died = caught.value.exceptions_by_rank[1]
    assert isinstance(died, cm.RankDied)
    assert "last words" in died.last_output
    assert own_mesh[0].pull("kept") == 0
    with pytest.raises(cm.RankDied, match=r"dist_heal"):
        own_mesh.cell("pass")
    assert [info.phase for info in own_mesh.report()] == ["idle", "dead"]
    assert {rank: why.type_name for rank, why in own_mesh.inspect("kept").refusals.items()} == {
        1: "RankDied"
    }
    own_mesh.heal()
    assert own_mesh.pull("globals().get('kept')").list == [0, None]
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]


def test_a_crash_below_python_leaves_its_stack(own_mesh: cm.Mesh) -> None:
    run = own_mesh[1].submit_cell("import faulthandler; faulthandler._sigsegv()")
    with pytest.raises(cm.RankFailure) as caught:
        run.result(timeout_s=WAIT_S)
    died = caught.value.exceptions_by_rank[1]
    assert isinstance(died, cm.RankDied)
    assert "Segmentation fault" in died.last_output or "Current thread" in died.last_output


def test_agents_death_ends_everything_and_is_reported(runtime_dir: Path) -> None:
    mesh = cm.start(2)
    mesh.cell("import subprocess; child = subprocess.Popen(['sleep', '1000']).pid")
    children = [psutil.Process(pid) for pid in mesh.pull("child").list]
    run = mesh.submit_cell("import time; time.sleep(1000)")
    process_named(runtime_dir, "cellmesh-agent").kill()
    with pytest.raises(cm.RankFailure, match="agent"):
        run.result(timeout_s=WAIT_S)
    check_nothing_left(runtime_dir)
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert not alive
    with pytest.raises(NoMeshError, match="agent"):
        mesh.run(int)
    mesh.stop()


SCRIPT = """
import sys, time
import cellmesh as cm
mesh = cm.start(2)
mesh.cell("import subprocess; child = subprocess.Popen(['sleep', '1000']).pid")
run = mesh.submit_cell("while True: pass")
print(*mesh.interrupt.__self__.ranks, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "exception"])
def test_no_process_is_left_when_the_notebook_ends(how: str, runtime_dir: Path) -> None:
    script = SCRIPT + ("raise ValueError\n" if how == "exception" else "")
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "0 1"
    sleepers = [
        child
        for owned in processes_of(runtime_dir)
        for child in owned.children(recursive=True)
        if child.name() == "sleep"
    ]
    assert len({sleeper.pid for sleeper in sleepers}) == 2
    if how.startswith("SIG"):
        process.send_signal(getattr(signal, how))
    process.stdin.close()
    process.wait(WAIT_S)
    process.stdout.close()
    check_nothing_left(runtime_dir)
    _, alive = psutil.wait_procs(sleepers, timeout=WAIT_S)
    assert not alive


def test_a_start_that_is_interrupted_leaves_nothing(runtime_dir: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import cellmesh as cm; cm.start(2, on_progress=lambda p: print(p.stage, flush=True))",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert "importing" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.wait(WAIT_S)
    process.stdout.close()


# ---- interrupts

BUSY = {
    "python": "while True: pass",
    "lock": "gate.wait()",
    "shell": "!sleep 1000",
    "asyncio": "await asyncio.sleep(1000)",
    "data loader": "list(torch.utils.data.DataLoader([rank], num_workers=1, collate_fn=doze))",
}


@pytest.mark.parametrize("doing", BUSY)
def test_an_interrupt_ends_the_cell_and_keeps_the_ranks(
    doing: str, hardy: cm.Mesh, recorder: Recorder
) -> None:
    run = hardy.submit_cell(f"started = '{doing}'; print('begun')\n{BUSY[doing]}", sink=recorder)
    recorder.wait_for_line("begun")
    if doing != "asyncio":  # a coroutine that waits is in no frame of the main thread's
        wait_until_busy(hardy, run)
    run.interrupt()
    with pytest.raises(RanksInterrupted):
        run.result(timeout_s=WAIT_S)
    assert hardy.pull("(kept, started)").list == [(0, doing), (1, doing), (2, doing)]


@pytest.mark.parametrize(
    "collective",
    ["dist.recv(torch.ones(1), src=0)", "ddp(torch.ones(1, 2)).sum().backward()"],
)
def test_the_stop_button_frees_ranks_from_a_collective(
    collective: str, waiting_mesh: cm.Mesh, recorder: Recorder
) -> None:
    mesh = waiting_mesh
    mesh.cell("kept = rank; ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    run = mesh.submit_cell(
        f"if rank == 0:\n    raise ValueError('boom')\n{collective}", sink=recorder
    )
    wait_until_blocked(mesh, run)
    run.interrupt()
    assert run.wait(WAIT_S)
    with pytest.raises(RanksInterrupted, match="rank 0 raised ValueError"):
        run.result()
    mesh.cell("ddp(torch.ones(1, 2)).sum().backward(); t = torch.ones(1); dist.all_reduce(t)")
    assert mesh.pull("(kept, t.item())").list == [(0, 2.0), (1, 2.0)]


def test_rank_waits_on_for_members_of_its_group(hardy: cm.Mesh) -> None:
    """Rank 2, which is in no such group, has ended long before."""
    hardy.cell("time.sleep(3 * (rank == 1))\ndist.new_group([0, 1])")


def wait_until_blocked(mesh: cm.Mesh, run: cm.Run[None]) -> None:
    """Until rank 0 has ended the run, and rank 1 waits in an operation."""
    for _ in range(2000):
        state = mesh.states().get(1)
        if run.failed_ranks() == [0] and state is not None and state.collective:
            return
    raise AssertionError(mesh.states())


def wait_until_busy(mesh: cm.Mesh, run: cm.Run[None]) -> None:
    """Until every rank runs the cell's last line (its control thread says so)."""
    for _ in range(2000):
        states = mesh.states()
        if len(states) == len(mesh) and all(
            state.run == run.number and state.line for state in states.values()
        ):
            return
    raise AssertionError(mesh.states())


# ---- a rank without a free descriptor

HOARD = """
import os, resource, time
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
hoard = []
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        while True:
            hoard.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
"""
LET_GO = "[os.close(hoard.pop()) for _ in range(len(hoard))]"
MEET = "t = torch.ones(1); dist.all_reduce(t)"


def test_a_heal_without_descriptors_fails_and_says_what_to_do(
    own_mesh: cm.Mesh, recorder: Recorder
) -> None:
    mesh = own_mesh
    mesh.cell("kept = rank; group = dist.new_group([0, 1])")
    pids = [info.pid for info in mesh.report()]
    mesh.cell(HOARD)
    assert mesh.pull("len(hoard) > 50").list == [False, True]

    mesh.submit_cell("print('still heard')", sink=recorder).result(WAIT_S)
    assert ((0, 1), "still heard") in recorder.lines()
    run = mesh.submit_cell("time.sleep(1000)")
    wait_until_busy(mesh, run)
    run.interrupt()
    with pytest.raises(RanksInterrupted):
        run.result(WAIT_S)
    with pytest.raises(cm.RankFailure, match="rank 0 raised ValueError"):  # rank 1 is released
        mesh.cell(f"if rank == 0:\n    raise ValueError('boom')\n{MEET}")

    words = r"rank 1: \d+ of 200 descriptors are free, and .* needs \d+: close .* `ulimit -n`"
    with pytest.raises(HostError, match=words):
        mesh.heal()
    assert [info.pid for info in mesh.report()] == pids
    mesh.cell(LET_GO)
    mesh.heal()
    mesh.cell(f"{MEET}; dist.all_reduce(t, group=group)")
    assert mesh.pull("(kept, t.item())").list == [(0, 4.0), (1, 4.0)]
    assert [info.pid for info in mesh.report()] == pids


def test_a_group_takes_no_standard_descriptor_that_user_code_has_closed(own_mesh: cm.Mesh) -> None:
    own_mesh.cell("import os\nfor number in range(3):\n    os.close(number)")
    own_mesh.cell(f"group = dist.new_group([0, 1]); {MEET}; dist.all_reduce(t, group=group)")
    names = "[os.path.realpath(f'/proc/self/fd/{number}') for number in range(3)]"
    assert own_mesh.pull(names).list == [["/dev/null"] * 3] * 2
