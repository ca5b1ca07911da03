"""What ends: ranks, agent, zygote, store, notebook; and what the stop button stops."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import NoMeshError, RanksInterrupted
from cellmesh.workers.rank.stack_inspection import stacks_of_threads
from tests.conftest import check_nothing_left, own_runtime_dir, process_named, processes_of

from .conftest import Recorder, state_of

WAIT_S = 40.0


@pytest.fixture(scope="module")
def hardy() -> Iterator[cm.Mesh]:
    """Three ranks that are interrupted and go on."""
    with own_runtime_dir() as directory:
        with cm.start(3) as started:
            started.cell(
                "kept = rank; import threading, time, subprocess, asyncio; gate = threading.Event()"
            )
            yield started
        check_nothing_left(directory)


@pytest.fixture(scope="module")
def waiting_mesh() -> Iterator[cm.Mesh]:
    """Two ranks that nobody but the user releases."""
    with own_runtime_dir() as directory:
        with cm.start(2, on_error="wait") as started:
            yield started
        check_nothing_left(directory)


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


def test_processes_of_a_dead_rank_end_with_the_rank(own_mesh: cm.Mesh) -> None:
    own_mesh[0].cell("import subprocess, os; child = subprocess.Popen(['sleep', '1000']).pid")
    child = psutil.Process(own_mesh[0].pull("child"))
    with pytest.raises(cm.RankFailure):
        own_mesh[0].cell("os._exit(1)")
    gone, _ = psutil.wait_procs([child], timeout=WAIT_S)
    assert gone


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


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit", "exception"])
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
    check_nothing_left(runtime_dir)


# ---- interrupts

BUSY = {
    "python": "while True: pass",
    "sleep": "time.sleep(1000)",
    "lock": "gate.wait()",
    "subprocess": "subprocess.run(['sleep', '1000'])",
    "shell": "!sleep 1000",
    "asyncio": "await asyncio.sleep(1000)",
    "select": "import select; select.select([], [], [], 1000)",
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


LOADING = """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        time.sleep(1000 if index > 1 else 0)
        return index
batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=2))
next(batches)
torch.distributed.barrier()
print("fed")
next(batches), next(batches)
"""


def test_an_interrupt_ends_the_wait_for_a_data_loaders_workers(
    hardy: cm.Mesh, recorder: Recorder
) -> None:
    run = hardy.submit_cell(LOADING, sink=recorder)
    recorder.wait_for_line("fed")
    wait_until_busy(hardy, run)
    run.interrupt()
    with pytest.raises(RanksInterrupted):
        run.result(timeout_s=WAIT_S)
    hardy.cell("del batches")


def test_an_interrupt_reaches_runs_that_wait(hardy: cm.Mesh) -> None:
    first = hardy.submit_cell("time.sleep(1000)")
    second = hardy.submit_cell("never = True")
    hardy.interrupt()
    for run in (first, second):
        with pytest.raises(RanksInterrupted):
            run.result(timeout_s=WAIT_S)
    assert not any(hardy.pull("'never' in globals()").list)


def test_late_interrupt_hits_nothing(hardy: cm.Mesh) -> None:
    for _ in range(50):
        run = hardy.submit(int)
        run.interrupt()
        run.wait(WAIT_S)
        assert hardy.pull("rank").list == [0, 1, 2]


@pytest.mark.parametrize(
    "collective",
    [
        "dist.barrier()",
        "dist.all_reduce(torch.ones(2))",
        "dist.all_reduce(torch.ones(2), async_op=True).wait()",
        "dist.recv(torch.ones(1), src=0)",
        "ddp(torch.ones(1, 2)).sum().backward()",
    ],
)
def test_the_stop_button_frees_ranks_from_a_collective(
    collective: str, waiting_mesh: cm.Mesh, recorder: Recorder
) -> None:
    mesh = waiting_mesh
    mesh.cell("kept = rank; ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    run = mesh.submit_cell(
        f"if rank == 0:\n    raise ValueError('boom')\n{collective}", sink=recorder
    )
    note = recorder.wait_for_note("stop button")
    assert "rank 1" in note
    assert "line 3" in note
    run.interrupt()
    assert run.wait(WAIT_S)
    with pytest.raises(RanksInterrupted, match="rank 0 raised ValueError"):
        run.result()
    mesh.cell("ddp(torch.ones(1, 2)).sum().backward(); t = torch.ones(1); dist.all_reduce(t)")
    assert mesh.pull("(kept, t.item())").list == [(0, 2.0), (1, 2.0)]


def test_ctrl_c_in_result_interrupts_the_ranks(hardy: cm.Mesh) -> None:
    run = hardy.submit_cell("time.sleep(1000)")
    wait_until_busy(hardy, run)
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        while "result" not in stack_of(main):
            pass
        signal.pthread_kill(main, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(RanksInterrupted):
        run.result(timeout_s=WAIT_S)
    presser.join()
    assert hardy.pull("kept").list == [0, 1, 2]


def stack_of(thread: int) -> list[str]:
    return [frame.f_code.co_name for frame in stacks_of_threads()[thread]]


def wait_until_busy(mesh: cm.Mesh, run: cm.Run[None]) -> None:
    """Until every rank runs the cell's last line (its control thread says so)."""
    for _ in range(2000):
        states = mesh.states()
        if len(states) == len(mesh) and all(
            state.run == run.number and state.line for state in states.values()
        ):
            return
    raise AssertionError(mesh.states())


def test_rank_waits_on_where_ended_ranks_are_outside_its_group(
    hardy: cm.Mesh, tmp_path: Path
) -> None:
    # The last operation that rank 0 has begun has ended, on another group than that which it waits
    # for.
    hardy.cell("first, second = dist.new_group([0, 1]), dist.new_group([0, 2])")
    run = hardy.submit_cell(
        f"""
import os
meet, early = torch.ones(1), torch.ones(1)
if rank == 0:
    work = dist.all_reduce(early, group=first, async_op=True)
    dist.all_reduce(meet, group=second)
    work.wait()
elif rank == 1:
    while not os.path.exists({str(tmp_path / "go")!r}):
        time.sleep(0.01)
    dist.all_reduce(early, group=first)
else:
    dist.all_reduce(meet, group=second)
"""
    )
    wait_until_it_would_be_released(hardy, run)
    (tmp_path / "go").touch()
    run.result(timeout_s=WAIT_S)


def test_rank_waits_on_where_ended_ranks_are_no_members_of_the_group_that_it_makes(
    hardy: cm.Mesh, tmp_path: Path
) -> None:
    run = hardy.submit_cell(
        f"""
import os
while rank == 1 and not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.01)
dist.new_group([0, 1])
"""
    )
    wait_until_it_would_be_released(hardy, run)
    (tmp_path / "go").touch()
    run.result(timeout_s=WAIT_S)


def wait_until_it_would_be_released(mesh: cm.Mesh, run: cm.Run[None]) -> None:
    """Until rank 2 has ended and rank 0 has waited for much longer than ranks that wait in vain,
    which are released after a second.
    """
    pause = threading.Event()
    while 2 in run.waiting_ranks() or state_of(mesh, 0).waited_s < 3:
        assert 0 in run.waiting_ranks()
        pause.wait(0.02)
