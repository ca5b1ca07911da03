"""Starting, shaping, restarting and stopping."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.session import start as starting
from cellmesh.errors import HostError, MeshUsageError, NoMeshError
from tests.conftest import check_nothing_left, own_runtime_dir

COLD = pytest.mark.usefixtures("starts_cold")


@pytest.fixture(scope="module")
def mesh() -> Iterator[cm.Mesh]:
    """Four ranks, 2 x 2, of a mesh that imports torch, shared by this module's tests."""
    with own_runtime_dir() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "own_prestart", lambda: None)
        with cm.start(4, mesh={"dp": 2, "tp": 2}) as started:
            patch.undo()
            yield started
        check_nothing_left(directory)


def test_ranks_have_the_environment_that_torchrun_sets(mesh: cm.Mesh) -> None:
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
    )

    def read() -> dict[str, str]:
        return {name: os.environ[name] for name in names}

    for rank, found in mesh.run(read).items():
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "4"
        assert found["MASTER_ADDR"] == "127.0.0.1"
    assert mesh[0].pull("int(__import__('os').environ['MASTER_PORT'])") > 0


def test_ranks_have_the_names_that_users_expect(mesh: cm.Mesh) -> None:
    assert mesh.pull("rank").list == [0, 1, 2, 3]
    assert mesh.pull("local_rank").list == [0, 1, 2, 3]
    assert set(mesh.pull("world_size").list) == {4}
    assert set(mesh.pull("str(device)").list) == {"cpu"}
    assert set(mesh.pull("dist.get_backend()").list) == {"gloo"}
    assert set(mesh.pull("torch.__name__").list) == {"torch"}


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


def test_a_torchrun_script_may_destroy_its_group_and_run_again(runtime_dir: Path) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1); dist.all_reduce(t); totals = globals().get("totals", []) + [t.item()]
dist.destroy_process_group()
"""
    with cm.start(2) as mesh:
        for _ in range(3):
            mesh.cell(script)
        assert mesh.pull("totals").list == [[2.0] * 3] * 2
    check_nothing_left(runtime_dir)


def test_asking_for_another_backend_than_the_meshs_is_refused(mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure) as caught:
        mesh.cell("dist.init_process_group('mpi')")
    assert "not 'mpi'" in str(caught.value.exceptions_by_rank[0])


def test_user_sockets_and_groups_survive_beside_ours(mesh: cm.Mesh) -> None:
    mesh.cell(
        "g = dist.new_group([0, 1])\nx = torch.ones(1)\nif rank < 2: dist.all_reduce(x, group=g)"
    )
    assert mesh.pull("x.item()").list == [2.0, 2.0, 1.0, 1.0]


@COLD
def test_restart_gives_new_ranks_and_nothing_old(own_mesh: cm.Mesh) -> None:
    own_mesh.cell("left = 1")
    before = [info.pid for info in own_mesh.report()]
    own_mesh.restart()
    after = [info.pid for info in own_mesh.report()]
    assert not set(before) & set(after)
    assert own_mesh.pull("'left' in globals()").list == [False, False]
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("t.item()").list == [2.0, 2.0]


def test_restart_ends_runs_in_flight(own_mesh: cm.Mesh) -> None:
    run = own_mesh.submit_cell("import time; time.sleep(1000)")
    own_mesh.restart()
    with pytest.raises(cm.RankFailure, match="restarted"):
        run.result(timeout_s=30)


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


def test_stop_does_not_wait_for_a_cell(runtime_dir: Path) -> None:
    mesh = cm.start(2)
    run = mesh.submit_cell("while True: pass")
    mesh.stop()
    assert run.done()
    check_nothing_left(runtime_dir)


def test_exit_handlers_run_on_stop(runtime_dir: Path, tmp_path: Path) -> None:
    with cm.start(1) as mesh:
        mesh.push(path=str(tmp_path / "left"))
        mesh.cell("import atexit, pathlib; atexit.register(pathlib.Path(path).touch)")
    assert (tmp_path / "left").exists()


@COLD
def test_preloaded_modules_are_there(runtime_dir: Path) -> None:
    with cm.start(1, preload="colorsys,wave") as mesh:
        assert mesh[0].pull("[m in __import__('sys').modules for m in ('colorsys', 'wave')]") == [
            True,
            True,
        ]


@COLD
def test_a_preload_that_does_not_exist_is_named(runtime_dir: Path) -> None:
    with pytest.raises(MeshUsageError, match="no_such_module_here"):
        cm.start(1, preload="no_such_module_here")
    check_nothing_left(runtime_dir)


def test_a_start_that_takes_too_long_says_so(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HostError, match=r"not ready after 1(\.0)? s"):
        cm.start(1, preload="hangs", timeout_s=1)
    check_nothing_left(runtime_dir)


def test_a_second_mesh_of_the_same_name_is_refused(runtime_dir: Path) -> None:
    with cm.start(1, name="twin"), pytest.raises(HostError, match="cellmesh stop twin"):
        cm.start(1, name="twin")
    check_nothing_left(runtime_dir)


def test_meshes_live_side_by_side(runtime_dir: Path) -> None:
    with cm.start(2) as a, cm.start(1) as b:
        a.push(x=1)
        b.push(x=2)
        assert a.pull("x").list == [1, 1]
        assert b.pull("x").list == [2]
    check_nothing_left(runtime_dir)


def test_options_are_read_from_the_projects_file(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.cellmesh]\nnum_ranks = 2\nmesh = "tp=2"\n')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    with cm.start() as mesh:
        assert mesh.dims == {"tp": 2}
        assert mesh.pull("__import__('os').getcwd()").list == [str(tmp_path / "below")] * 2
    (tmp_path / "pyproject.toml").write_text("[tool.cellmesh]\nnum_rank = 2\n")
    with pytest.raises(MeshUsageError, match="did you mean 'num_ranks'"):
        cm.start()


def test_an_unwritable_runtime_directory_is_named(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = runtime_dir / "file"
    in_the_way.touch()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(in_the_way / "runtime"))
    with pytest.raises(HostError, match="JUPYTER_RUNTIME_DIR"):
        cm.start(1)


def test_a_full_runtime_directory_is_named(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = runtime_dir / "s"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700,nr_inodes=4", "tmpfs", str(small)],
        check=False, capture_output=True,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.fail(f"cannot mount a tmpfs here: {mounted.stderr.decode()}")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(small))
    try:
        with pytest.raises(HostError, match="Free some space"):
            cm.start(1)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    "on_path", [False, True], ids=["without the working directory", "with it last"]
)
def test_ranks_import_what_the_notebook_does_whatever_its_directory_holds(
    on_path: bool, runtime_dir: Path, tmp_path: Path
) -> None:
    for name in ("cellmesh", "torch", "msgspec", "zmq", "IPython", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError(f'{__file__} was imported')")
    (tmp_path / "beside.py").touch()
    script = (
        "import json, sys, cellmesh as cm, importlib.util as util\n"
        f"sys.path += [''] * {on_path}\n"
        "def see(): return [cm.__file__, sys.path, bool(util.find_spec('beside'))]\n"
        "with cm.start(1) as mesh: print(json.dumps([see(), mesh[0].run(see)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    here, there = json.loads(done.stdout)
    assert here == there
    assert here[2] is on_path
    check_nothing_left(runtime_dir)


@COLD
def test_a_torch_that_was_installed_since_the_kernel_began_is_named(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "1.0.0")
    with pytest.raises(
        MeshUsageError, match=r"the ranks import torch [2-9].*notebook has 1\.0\.0: restart"
    ):
        cm.start(1)
    check_nothing_left(runtime_dir)


@COLD
def test_every_file_of_a_mesh_is_its_users_alone(own_mesh: cm.Mesh, runtime_dir: Path) -> None:
    own_mesh.cell("print('to the log')")
    files = list((runtime_dir / "cellmesh").rglob("*"))
    assert {"ticket.json", "agent.sock", "agent.log", "zygote.log", "rank0.log"} <= {
        path.name for path in files
    }
    assert [path for path in files if path.lstat().st_mode & 0o077] == []


async def _awaited(run: cm.Run[Any]) -> None:
    await run


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "use",
    [
        lambda mesh, run: mesh.run(int),
        lambda mesh, run: mesh.pull("rank"),
        lambda mesh, run: mesh.states(),
        lambda mesh, run: mesh.heal(),
        lambda mesh, run: run.result(),
        lambda mesh, run: run.wait(),
        lambda mesh, run: next(iter(run)),
        lambda mesh, run: asyncio.run(_awaited(run)),
    ],
    ids=["run", "pull", "states", "heal", "result", "wait", "iterate", "await"],
)
def test_forked_child_is_refused_the_mesh(quick: cm.Mesh, use: Callable[..., object]) -> None:
    run = quick.submit(int)
    run.result()
    waits = quick.submit(time.sleep, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: it has threads
        child = os.fork()
    if child == 0:
        try:
            use(quick, waits)
        except cm.errors.MeshUsageError as error:
            os._exit(7 if "was forked from the one that holds the mesh" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    waits.cancel()
    waits.wait()
    assert run.result() == {0: 0, 1: 0}
