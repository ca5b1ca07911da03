"""What readers of the code found: each once broke a rank, the agent or the notebook."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError
from tests.conftest import check_nothing_left, processes_named, stop_process

from .conftest import Recorder

WAIT_S = 40.0


@pytest.mark.parametrize(
    "written",
    [
        "struct.pack('<IIQ', 0x68736D63, 1, 2**60)",
        "b'\\xff' * 64",
        "struct.pack('<II', 0x68736D63, 2**31)",
    ],
)
def test_no_rank_can_take_the_agent_along(written: str, own_mesh: cm.Mesh) -> None:
    source = f"import os, struct, time; os.write(3, {written}); time.sleep(1000)"
    with pytest.raises(cm.RankFailure, match=r"wrote into its connection.*killed"):
        own_mesh[1].submit_cell(source).result(timeout_s=WAIT_S)
    assert own_mesh[0].run(lambda: 1) == 1


@pytest.mark.parametrize(
    "source",
    [
        "try: 1/0\nexcept Exception as e: raise e from e",
        "class S(str): pass\nclass E(Exception):\n    def __str__(self): return S('odd')\nraise "
        "E()",
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E()",
        "class E(Exception):\n    def __bool__(self): raise ValueError\nraise ValueError from E()",
        "__name__ = 3\nraise ValueError",
        "raise ValueError('\\udc80')",
        "print('\\udc80'); raise ValueError",
    ],
)
def test_no_exception_is_too_odd_for_a_rank(source: str, mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure):
        mesh.submit_cell(source).result(timeout_s=WAIT_S)
    mesh.cell("__name__ = '__main__'")
    assert mesh.pull("rank").list == [0, 1, 2, 3]


def test_the_zygotes_death_with_unread_news_costs_no_rank(
    own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    (zygote,) = processes_named(runtime_dir, "cellmesh-zygote")
    stop_process(zygote.pid)
    os.kill(own_mesh.report()[1].pid, signal.SIGKILL)
    with pytest.raises((cm.RankDied, cm.RankFailure), match="SIGKILL"):
        own_mesh[1].run(int)
    zygote.kill()
    psutil.wait_procs([zygote], timeout=WAIT_S)
    assert own_mesh[0].run(lambda: 7) == 7


def test_a_restart_keeps_the_dims_that_were_given_since(runtime_dir: Path) -> None:
    with cm.start(4, mesh="dp=2,tp=2") as mesh:
        mesh.reshape("pp=4")
        mesh.restart()
        assert mesh.dims == {"pp": 4}
        assert mesh.pull("mesh.mesh_dim_names").list == [("pp",)] * 4
    check_nothing_left(runtime_dir)


def test_a_cells_output_survives_many_calls_beside_it(mesh: cm.Mesh, recorder: Recorder) -> None:
    mesh[0].cell("import threading; gate = threading.Event()")
    run = mesh[0].submit_cell("gate.wait(60); print('still heard')", sink=recorder)
    for _ in range(600):
        mesh[1].submit(int)
    mesh[1].run(int)
    run.interrupt()
    run.wait(WAIT_S)
    run = mesh[0].submit_cell(
        "t = threading.Thread(target=lambda: (gate.wait(), print('late')))", sink=recorder
    )
    run.result(timeout_s=WAIT_S)
    mesh[0].submit_cell("t.start()", sink=recorder).result(timeout_s=WAIT_S)
    for _ in range(600):
        mesh[1].run(int)
    mesh[0].cell("gate.set(); t.join()")
    recorder.wait_for_line("late")


def test_an_interrupt_ends_what_c_code_waits_for(mesh: cm.Mesh) -> None:
    mesh.cell("import os, subprocess")
    for source in ("os.system('sleep 1000')", "subprocess.run(['bash', '-c', 'sleep 1000; true'])"):
        run = mesh.submit_cell(source)
        workers = [psutil.Process(info.pid) for info in mesh.report()]
        for worker in workers:
            for _ in range(10_000):
                if any(child.name() == "sleep" for child in worker.children(recursive=True)):
                    break
        run.interrupt()
        assert run.wait(WAIT_S)
        sleepers = [c for w in workers for c in w.children(recursive=True) if c.name() == "sleep"]
        _, alive = psutil.wait_procs(sleepers, timeout=WAIT_S)
        assert not alive


def test_an_interrupt_that_user_code_handles_leaves_the_process_group_alone(mesh: cm.Mesh) -> None:
    source = (
        "import time\nhandled = False\ntry:\n    while True: time.sleep(1000)\nexcept "
        "KeyboardInterrupt:\n    until = time.monotonic() + 1.0\n    while time.monotonic() < "
        "until: pass\n    handled = True"
    )
    run = mesh.submit_cell(source)
    for _ in range(10_000):
        if len([s for s in mesh.states().values() if s.run == run.number and s.line == 4]) == 4:
            break
    run.interrupt()
    run.result(timeout_s=WAIT_S)
    mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert mesh.pull("(handled, t.item())").list == [(True, 4.0)] * 4


def test_helpers_methods_and_partials_find_the_ranks_names(mesh: cm.Mesh) -> None:
    def helper() -> int:
        return rank + 1  # type: ignore[name-defined,no-any-return]  # noqa: F821

    def call() -> int:
        return helper() * 10

    class Counter:
        def count(self) -> int:
            return world_size  # type: ignore[name-defined,no-any-return]  # noqa: F821

    assert mesh.run(call).list == [10, 20, 30, 40]
    assert mesh.run(Counter().count).list == [4] * 4
    assert mesh.run(functools.partial(helper)).list == [1, 2, 3, 4]


def test_too_few_descriptors_are_reported(runtime_dir: Path) -> None:
    import subprocess
    import sys

    script = (
        "import resource, cellmesh as cm\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n"
        "try:\n    cm.start(16)\nexcept cm.CellmeshError as e:\n    print(type(e).__name__, e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "HostError" in done.stdout
    assert "Too many open files" in done.stdout
    check_nothing_left(runtime_dir)


def test_a_preload_that_starts_threads_is_refused(runtime_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(MeshUsageError, match="starts threads"):
            cm.start(1, preload="threaded")
    finally:
        sys.path.remove(str(tmp_path))
    check_nothing_left(runtime_dir)
