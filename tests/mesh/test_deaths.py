"""Processes that end: why a rank did, and what replaces zygote and store."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from tests.conftest import check_nothing_left, process_named, processes_named

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
    assert "and its control group may use 600 MB" in died.reason


def test_another_kill_is_not_taken_for_that(own_mesh: cm.Mesh) -> None:
    died = death_in(own_mesh, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert died.reason == "was killed by SIGKILL"


def test_allocation_refused_by_a_limit_is_reported(own_mesh: cm.Mesh) -> None:
    died = death_in(
        own_mesh,
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8_000_000_000, -1))\n"
        "try:\n    x = bytearray(50_000_000_000)\n"
        "except MemoryError:  # as the C++ runtime ends a program\n"
        "    os.write(2, b\"terminate called after throwing an instance of 'std::bad_alloc'\\n\")\n"
        "    os.abort()",
    )
    assert died.reason.startswith("was killed by SIGABRT: it was refused more memory (it held ")
    assert "`ulimit -v`, is 8.0 GB" in died.reason


# ---- ranks anew


def test_all_ranks_may_be_replaced(own_mesh: cm.Mesh) -> None:
    run = own_mesh.submit_cell("import os; os._exit(7)")
    assert run.wait(WAIT_S)
    assert own_mesh.heal().respawned == (0, 1)
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]


@pytest.mark.parametrize("name", ["cellmesh-zygote", "cellmesh-store"])
def test_dead_rank_is_replaced_at_once_and_serves_a_heal(
    name: str, own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    old = process_named(runtime_dir, name)
    old.kill()
    wait_for_process(runtime_dir, name, old.pid)
    death_in(own_mesh, "import os; os._exit(7)")
    assert own_mesh.heal().respawned == (1,)
    own_mesh.cell("g = dist.new_group([0, 1]); t = torch.ones(1); dist.all_reduce(t, group=g)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]


def test_a_heal_does_not_wait_for_the_zygote_to_be_missed(
    own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    rank = own_mesh.report()[1].pid
    for process in (process_named(runtime_dir, "cellmesh-zygote"), psutil.Process(rank)):
        process.kill()
    with pytest.raises((cm.RankFailure, cm.RankDied)):
        own_mesh[1].run(int)
    assert own_mesh.heal().respawned == (1,)
    assert own_mesh.pull("rank").list == [0, 1]


def test_a_zygote_that_keeps_dying_is_replaced_on_demand(
    own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    old = process_named(runtime_dir, "cellmesh-zygote")
    for _ in range(3):
        old.send_signal(signal.SIGKILL)
        old = psutil.Process(wait_for_process(runtime_dir, "cellmesh-zygote", old.pid))
    death_in(own_mesh, "import os; os._exit(7)")
    assert own_mesh.heal().respawned == (1,)


def test_a_zygote_that_was_replaced_tidies_up_as_well(runtime_dir: Path) -> None:
    mesh = cm.start(2)
    mesh[0].cell("import subprocess; child = subprocess.Popen(['sleep', '1000']).pid")
    child = psutil.Process(mesh[0].pull("child"))
    old = process_named(runtime_dir, "cellmesh-zygote")
    agent = process_named(runtime_dir, "cellmesh-agent")
    old.kill()
    wait_for_process(runtime_dir, "cellmesh-zygote", old.pid)
    death_in(mesh, "import os; os._exit(7)")
    mesh.heal()  # the new zygote has forked: it is done with its imports
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
    assert "%dist_heal" in died.last_output
    own_mesh.heal()
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]
    assert own_mesh[0].pull("kept") == 0
