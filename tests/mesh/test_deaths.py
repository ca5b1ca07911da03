"""Processes that end: why a rank did, and what replaces zygote and store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from tests.conftest import check_nothing_left, process_named, processes_named
from tests.faults.watching import wait_until

WAIT_S = 40.0
_GROUPS = Path("/sys/fs/cgroup/memory")


def death_in(mesh: cm.Mesh, source: str) -> cm.RankDied:
    """How rank 1 dies in a cell."""
    run = mesh[1].submit_cell(source)
    with pytest.raises(cm.RankFailure) as caught:
        run.result(WAIT_S)
    died = caught.value.exceptions_by_rank[1]
    assert isinstance(died, cm.RankDied)
    return died


def wait_for_process(directory: Path, name: str, other_than: int) -> int:
    """Until there is another process of this name; its number."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = [
            process.pid for process in processes_named(directory, name) if process.pid != other_than
        ]
        if found:
            return found[0]
    raise AssertionError(f"no new {name}")


# ---- memory


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that allows 600 MB."""
    if not os.access(_GROUPS / "memory.limit_in_bytes", os.W_OK):
        pytest.skip("no control group can be made here")
    group = _GROUPS / f"cellmesh-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("600000000")
    yield group
    group.rmdir()


def test_a_rank_that_the_kernel_kills_for_want_of_memory_says_so(
    small_group: Path, own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    zygote = process_named(runtime_dir, "cellmesh-zygote")
    (small_group / "cgroup.procs").write_text(str(zygote.pid))
    own_mesh.restart()
    died = death_in(own_mesh, "x = b'x' * (1 << 30)")
    assert died.reason.startswith("was killed by SIGKILL: out of memory (it held ")
    assert "use smaller batches, fewer ranks or a host with more memory)" in died.reason
    assert own_mesh[0].pull("rank") == 0


# ---- ranks anew


def test_all_ranks_may_be_replaced(own_mesh: cm.Mesh) -> None:
    run = own_mesh.submit_cell("import os; os._exit(7)")
    assert run.wait(WAIT_S)
    assert own_mesh.heal().respawned == (0, 1)
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]


def test_zygote_and_store_that_die_are_replaced_serve_a_heal_and_tidy_up(
    runtime_dir: Path,
) -> None:
    mesh = cm.start(2)
    mesh[0].cell("import subprocess; child = subprocess.Popen(['sleep', '1000']).pid")
    child = psutil.Process(mesh[0].pull("child"))
    agent = process_named(runtime_dir, "cellmesh-agent")
    for name in ("cellmesh-zygote", "cellmesh-zygote", *["cellmesh-store"] * 7):
        old = process_named(runtime_dir, name)
        old.kill()
        wait_for_process(runtime_dir, name, old.pid)
    death_in(mesh, "import os; os._exit(7)")
    assert mesh.heal().respawned == (1,)  # the new zygote has forked: it is done with its imports
    mesh.cell("g = dist.new_group([0, 1]); t = torch.ones(1); dist.all_reduce(t, group=g)")
    assert mesh.pull("t.item()").list == [2.0, 2.0]
    agent.kill()
    check_nothing_left(runtime_dir)
    child.wait(WAIT_S)
    mesh.stop()


LOSE_CUDA_CONTEXT = """
def lost(*_):
    raise torch.AcceleratorError("CUDA error: device-side assert triggered\\nmore")
torch.cuda.is_initialized = lambda: True
torch.cuda.current_stream = lost
torch.cuda.synchronize = lost
"""


def test_a_rank_whose_cuda_context_is_lost_ends_and_is_replaced(own_mesh: cm.Mesh) -> None:
    own_mesh.cell("kept = rank")
    own_mesh[1].cell(LOSE_CUDA_CONTEXT)
    with pytest.raises(cm.RankFailure, match="device-side assert"):
        own_mesh[1].cell("torch.cuda.synchronize()")
    # Before or after the death is known.
    with pytest.raises((cm.RankFailure, cm.RankDied)) as caught:
        own_mesh.cell("kept")
    error = caught.value
    died = error.exceptions_by_rank[1] if isinstance(error, cm.RankFailure) else error
    assert isinstance(died, cm.RankDied)
    assert "its CUDA context is lost (CUDA error: device-side assert triggered)" in died.last_output
    assert "A heal starts the rank again" in died.last_output
    own_mesh.heal()
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]
    assert own_mesh[0].pull("kept") == 0


def test_last_words_after_a_run_are_kept_by_an_agent_that_reads_late(
    own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    """The words are in the rank's pipe before the agent has read the run's end from its socket."""
    agent = process_named(runtime_dir, "cellmesh-agent")
    rank = process_named(runtime_dir, "cellmesh-r1")
    own_mesh[1].cell(f"print('begun')\nimport os, signal{LOSE_CUDA_CONTEXT}")
    stops = f"print('last')\nos.kill({agent.pid}, signal.SIGSTOP)\ntorch.cuda.synchronize()"
    run = own_mesh[1].submit_cell(stops)
    try:
        wait_until(lambda: rank.status() == psutil.STATUS_ZOMBIE, WAIT_S, "the rank ends")
    finally:
        agent.resume()
    with pytest.raises(cm.RankFailure):
        run.result(WAIT_S)
    wait_until(lambda: own_mesh.report()[1].phase == "dead", WAIT_S, "the death")
    assert "its CUDA context is lost" in own_mesh.report()[1].last_output
    own_mesh.heal()
