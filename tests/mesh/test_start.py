"""Starting, shaping, restarting and stopping."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import cellmesh as cm
from cellmesh.controller.session import start as starting
from cellmesh.errors import HostError, MeshUsageError, NoMeshError
from cellmesh.wire.ticket import Ticket
from tests.conftest import check_nothing_left, clean_runtime_dir, process_named, run_python

COLD = pytest.mark.usefixtures("starts_cold")


@pytest.fixture(scope="module")
def mesh() -> Iterator[cm.Mesh]:
    """Four ranks, 2 x 2, of a mesh that imports torch, shared by this module's tests."""
    with clean_runtime_dir(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "own_prestart", lambda: None)
        with cm.start(4, mesh={"dp": 2, "tp": 2}) as started:
            patch.undo()
            yield started


def test_ranks_have_the_environment_that_torchrun_sets(mesh: cm.Mesh) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def read() -> dict[str, str]:
        return {name: os.environ[name] for name in names}

    for rank, found in mesh.run(read).items():
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "4"
        assert found["MASTER_ADDR"] == "127.0.0.1"
        assert int(found["MASTER_PORT"]) > 0


def test_mesh_is_the_device_mesh_and_can_be_reshaped(mesh: cm.Mesh) -> None:
    assert mesh.pull("mesh.mesh_dim_names").list == [("dp", "tp")] * 4
    assert mesh.pull("mesh['tp'].get_local_rank()").list == [0, 1, 0, 1]
    mesh.reshape("pp=4")
    try:
        assert mesh.dims == {"pp": 4}
        assert mesh.pull("list(mesh.get_coordinate())").list == [[0], [1], [2], [3]]
    finally:
        mesh.reshape({"dp": 2, "tp": 2})


def test_parts_of_a_mesh_are_chosen_by_rank_and_coordinate(mesh: cm.Mesh) -> None:
    assert mesh[1:3].pull("rank").list == [1, 2]
    assert mesh[[0, 3]].pull("rank").list == [0, 3]
    assert mesh.at(tp=0).pull("rank").list == [0, 2]
    assert mesh.at(dp=1, tp=1).pull("rank").list == [3]
    assert mesh[2].pull("rank") == 2
    with pytest.raises(MeshUsageError, match=r"no dim 'pp'.*dp=2, tp=2"):
        mesh.at(pp=0)
    with pytest.raises(IndexError, match="no rank 9"):
        mesh[9]
    assert mesh[[0, 0, 1]].ranks == (0, 1)
    for wrong in ([9], "a", [None]):
        with pytest.raises(MeshUsageError, match="chooses no"):
            mesh[wrong]  # type: ignore[index]
    with pytest.raises(MeshUsageError, match="2 indices"):
        mesh.at(tp="x")  # type: ignore[arg-type]


def test_a_torchrun_script_runs_unchanged(mesh: cm.Mesh) -> None:
    script = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1) * (int(os.environ["RANK"]) + 1)
dist.all_reduce(t)
total = t.item()
"""
    mesh.cell(script)
    assert mesh.pull("total").list == [10.0] * 4


@COLD
def test_restart_gives_new_ranks_and_nothing_old(own_mesh: cm.Mesh) -> None:
    own_mesh.cell("left = 1")
    own_mesh.reshape("pp=2")
    before = [info.pid for info in own_mesh.report()]
    own_mesh.restart()
    after = [info.pid for info in own_mesh.report()]
    assert not set(before) & set(after)
    assert own_mesh.pull("'left' in globals(), mesh.mesh_dim_names").list == [(False, ("pp",))] * 2
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]


@COLD
def test_stop_is_idempotent_and_says_so_afterwards(runtime_dir: Path) -> None:
    mesh = cm.start(1)
    mesh.stop()
    mesh.stop()
    check_nothing_left(runtime_dir)
    with pytest.raises(NoMeshError, match="dist_start"):
        mesh.run(int)
    with pytest.raises(NoMeshError):
        mesh.restart()
    assert not mesh.alive
    assert (mesh.states(), mesh.report(), mesh.read_log(0)) == ({}, (), None)


def test_exit_handlers_run_on_stop(runtime_dir: Path, tmp_path: Path) -> None:
    with cm.start(1) as mesh:
        mesh.push(path=str(tmp_path / "left"))
        mesh.cell("import atexit, pathlib; atexit.register(pathlib.Path(path).touch)")
    assert (tmp_path / "left").exists()


@COLD
def test_a_preload_that_does_not_exist_is_named(runtime_dir: Path) -> None:
    with pytest.raises(MeshUsageError, match="no_such_module_here"):
        cm.start(1, preload="no_such_module_here")


@COLD
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "--preload bad_one: ZeroDivisionError: division by zero"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "--preload bad_one uses CUDA"),
    ],
)
def test_a_preload_that_cannot_serve_is_named(
    source: str, reason: str, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_one.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MeshUsageError, match=reason):
        cm.start(1, preload="bad_one")


def test_a_start_that_takes_too_long_says_so(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HostError, match=r"not ready after 1(\.0)? s"):
        cm.start(1, preload="hangs", timeout_s=1)


def test_ranks_import_what_the_notebook_does_whatever_its_directory_holds(
    runtime_dir: Path, tmp_path: Path
) -> None:
    for name in ("cellmesh", "torch", "msgspec", "zmq", "IPython", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError(f'{__file__} was imported')")
    (tmp_path / "beside.py").touch()
    script = (
        "import json, sys, cellmesh as cm, importlib.util as util\n"
        "sys.path += ['']\n"
        "def see(): return [cm.__file__, sys.path, bool(util.find_spec('beside'))]\n"
        "with cm.start(1) as mesh: print(json.dumps([see(), mesh[0].run(see)]))\n"
    )
    done = run_python("-P", "-c", script, cwd=tmp_path)
    here, there = json.loads(done.stdout)
    assert here == there
    assert here[2] is True


def test_too_few_descriptors_are_reported(runtime_dir: Path) -> None:
    script = (
        "import resource, cellmesh as cm\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n"
        "try:\n    cm.start(16)\nexcept cm.CellmeshError as e:\n    print(type(e).__name__, e)\n"
    )
    done = run_python("-c", script)
    assert "HostError" in done.stdout
    assert "Too many open files" in done.stdout


@COLD
def test_a_torch_that_was_installed_since_the_kernel_began_is_named(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "1.0.0")
    with pytest.raises(
        MeshUsageError, match=r"the ranks import torch [2-9].*notebook has 1\.0\.0: restart"
    ):
        cm.start(1)


@COLD
def test_the_first_zygote_is_a_fork_that_inherits_nothing_of_the_agent(
    own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    zygote = process_named(runtime_dir, "cellmesh-zygote")
    assert zygote.cmdline() == process_named(runtime_dir, "cellmesh-agent").cmdline()
    assert zygote.num_threads() == 1
    files = [os.readlink(path) for path in Path(f"/proc/{zygote.pid}/fd").iterdir()]
    log, sockets = f"{own_mesh.name}/logs/zygote.log", [f for f in files if "socket:" in f]
    assert len(sockets) == 2  # to the agent, and for the next mesh of this process
    assert {name[-len(log) :] for name in files} - {*sockets} == {log, "/dev/null"}


@COLD
@pytest.mark.parametrize(
    "step",
    ["start._import_session", "session.Session.__init__", "session.Session.wait_until_ready"],
)
def test_a_start_that_is_interrupted_leaves_nothing(
    step: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> NoReturn:
        interrupted_at.append(time.monotonic())
        raise KeyboardInterrupt

    interrupted_at: list[float] = []
    monkeypatch.setattr(f"cellmesh.controller.session.{step}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cm.start(1)


@COLD
def test_every_file_of_a_mesh_is_its_users_alone(own_mesh: cm.Mesh, runtime_dir: Path) -> None:
    own_mesh.cell("print('to the log')")
    files = list((runtime_dir / "cellmesh").rglob("*"))
    assert {"ticket.json", "zygote.log", "rank0.log"} <= {path.name for path in files}
    sockets = {path.name for path in files if path.is_socket()}
    assert sockets == {"agent.sock", "guest.sock", "zygote.sock"}
    assert [path for path in files if path.lstat().st_mode & 0o077] == []


def test_a_start_that_is_interrupted_before_it_connects_ends_at_once(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(ticket: Ticket, *args: object, **options: object) -> None:
        deadline = time.monotonic() + 30
        while not Path(ticket.directory, "agent.sock").exists():  # it handles signals then
            assert time.monotonic() < deadline
            time.sleep(0.01)
        interrupted_at.append(time.monotonic())
        raise KeyboardInterrupt

    interrupted_at: list[float] = []
    monkeypatch.setattr("cellmesh.controller.session.session.Session", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cm.start(1)
    assert time.monotonic() - interrupted_at[0] < 4, "the agent has waited for its controller"
