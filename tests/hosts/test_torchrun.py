"""Hosts that torchrun starts: TorchElastic restarts what it has started, and agents live on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from tests.faults.watching import wait_until

from .netns import NOTEBOOK, Host
from .test_by_hand import AGENT, invitation_in

WAIT_S = 90.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"
TORCHRUN = (
    *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
    *("--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-endpoint", "cm1:29400"),
    *("--rdzv-id", "test", "-m", "cellmesh", "agent", "--ticket"),
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """The torchruns that a test starts; they end with the mesh."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.wait(WAIT_S)


@pytest.fixture
def mesh(
    machines: list[Host], runtime_dir: Path, started: list[subprocess.Popen[bytes]]
) -> Iterator[cm.Mesh]:
    options = {"launch": "torchrun", "nodes": 2, "nproc_per_host": 2, "address": NOTEBOOK}
    with ThreadPoolExecutor(1) as pool:
        to_be = pool.submit(lambda: cm.start(**options, timeout_s=WAIT_S, lease_s=60))
        ticket = str(invitation_in(runtime_dir))
        started += [host.start(*TORCHRUN, ticket) for host in machines[:2]]
        with to_be.result() as mesh:
            mesh.cell("kept = rank + 5")
            yield mesh


def host_of(mesh: cm.Mesh, rank: int, machines: list[Host]) -> Host:
    name = mesh.report()[rank].host
    return next(host for host in machines if host.name == name)


def agents_on(host: Host) -> list[psutil.Process]:
    return [process for process in host.meshes() if process.name() == "cellmesh-agent"]


def check_whole(mesh: cm.Mesh) -> None:
    assert mesh[[0, 1]].pull("kept").list == [5, 6]
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def test_ranks_run_where_torchrun_has_started_agents(mesh: cm.Mesh) -> None:
    assert mesh.run(lambda: __import__("socket").gethostname()).list == ["cm1", "cm1", "cm2", "cm2"]
    check_whole(mesh)
    variables = mesh.run(lambda: {k: v for k, v in __import__("os").environ.items() if "RANK" in k})
    assert [each["RANK"] for each in variables.list] == ["0", "1", "2", "3"]
    assert [each["GROUP_RANK"] for each in variables.list] == ["0", "0", "1", "1"]


def test_agent_that_is_killed_is_replaced_on_its_host(mesh: cm.Mesh, machines: list[Host]) -> None:
    (agent,) = agents_on(machines[1])
    agent.kill()
    wait_until(lambda: mesh.rank_set.session.dead_ranks == {2, 3}, WAIT_S, "its ranks are lost")
    assert mesh.heal(0).respawned == (2, 3)
    check_whole(mesh)


@pytest.mark.timeout(240)
def test_host_that_returns_heals_the_mesh(
    mesh: cm.Mesh,
    machines: list[Host],
    runtime_dir: Path,
    started: list[subprocess.Popen[bytes]],
) -> None:
    """With the torchrun of the lost host; that of the other one restarts what it has started."""
    survivor, lost = machines[:2]
    (agent,) = agents_on(survivor)
    lost.kill()
    wait_until(lambda: mesh.rank_set.session.dead_ranks == {2, 3}, WAIT_S, "its ranks are lost")
    started.append(lost.start(*TORCHRUN, str(invitation_in(runtime_dir))))
    wait_until(
        lambda: f"lives (process {agent.pid})" in survivor.read_log(),
        WAIT_S,
        "the stand-in has found the agent that lives",
    )
    assert mesh.heal(0).respawned == (2, 3)
    check_whole(mesh)
    assert agents_on(survivor) == [agent]


@pytest.mark.timeout(240)
def test_mesh_grows_by_a_host_that_is_started_by_hand_and_shrinks(
    mesh: cm.Mesh, machines: list[Host], runtime_dir: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """TorchElastic has no place for one more host."""
    started.append(machines[2].start(*AGENT, "--ticket", str(invitation_in(runtime_dir))))
    mesh.resize(hosts="cm3:2")
    assert [info.host for info in mesh.report()][4:] == ["cm3"] * 2
    check_values(mesh, 15.0)
    mesh.resize(2)
    check_values(mesh, 1.0)
    left = [host for host in machines if host is not host_of(mesh, 0, machines)]
    wait_until(lambda: not any(host.meshes() for host in left), WAIT_S, "the others have left")
    check_values(mesh, 1.0)


def check_values(mesh: cm.Mesh, total: float) -> None:
    """Check that the first ranks have kept what they had, and that all can reduce."""
    assert mesh[[0, 1]].pull("kept").list == [5, 6]
    mesh.cell(REDUCE)
    assert set(mesh.pull("float(x)").list) == {total}
