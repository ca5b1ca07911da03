"""A real Ray: a cluster of two nodes on this machine, which are two hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.session.life import StartProgress
from cellmesh.errors import HostError, MeshUsageError
from tests.conftest import check_nothing_left
from tests.faults.watching import wait_until

from .interrupted_start import die_at, die_with_mesh, interrupt_at, remove_dead
from .netns import Host
from .ray import RayCluster, ray_cluster

WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def machines() -> list[Host]:
    """No host of a network of its own."""
    return []


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(num_nodes=2, num_cpus=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_is_reserved(cluster: RayCluster, runtime_dir: Path) -> Iterator[None]:
    yield
    for directory in (runtime_dir, *cluster.directories):
        check_nothing_left(directory)
    wait_until(lambda: cluster.num_free_cpus() == 4, WAIT_S, "Ray has all CPUs back")


def test_ranks_run_in_a_bundle_of_each_node(cluster: RayCluster) -> None:
    with cm.start(launch="ray", nodes=2, nproc_per_host=2, mesh="host=2,gpu=2") as mesh:
        assert cluster.num_free_cpus() == 0
        directories = mesh.run(lambda: os.environ["JUPYTER_RUNTIME_DIR"]).list
        assert directories[0] == directories[1] != directories[2] == directories[3]
        assert set(directories) == set(map(str, cluster.directories))
        assert mesh.run(lambda: os.environ["OMP_NUM_THREADS"]).list == ["1"] * 4
        assert mesh.run(lambda: os.environ.get("PYTHONBREAKPOINT")).list == [None] * 4
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [6.0] * 4


def test_dead_agent_is_started_again_in_its_bundle(cluster: RayCluster) -> None:
    with cm.start(launch="ray", nodes=2, nproc_per_host=1, lease_s=60) as mesh:
        mesh.cell("kept = rank + 5")
        session = mesh.rank_set.session
        os.kill(mesh[0].run(os.getppid), signal.SIGKILL)  # its agent
        wait_until(lambda: session.dead_ranks == {0}, WAIT_S, "rank 0 is lost")
        assert mesh.heal(1).respawned == (0,)
        assert mesh[1].pull("kept") == 6
        mesh.cell(REDUCE)


def test_mesh_outlives_its_killed_notebook_for_its_lease(
    cluster: RayCluster, runtime_dir: Path
) -> None:
    die_with_mesh(launch="ray", nodes=2, nproc_per_host=1, lease_s=5, name="kept")
    assert cluster.num_free_cpus() == 2
    with cm.attach("kept", steal=True) as mesh:  # before the notebook is missed
        assert mesh.pull("kept").list == [5, 6]
        mesh.detach()
    assert cluster.num_free_cpus() == 2
    wait_until(lambda: cluster.num_free_cpus() == 4, WAIT_S, "the nodes are given back")
    remove_dead(runtime_dir, *cluster.directories)


@pytest.mark.parametrize(
    ("end", "step"), [(die_at, "start agents"), (interrupt_at, "wait for ranks")]
)
def test_start_that_ends_with_nodes_gives_them_back(
    cluster: RayCluster, runtime_dir: Path, end: Callable[..., None], step: str
) -> None:
    end(step, launch="ray", nodes=2, nproc_per_host=1, lease_s=600)
    wait_until(lambda: cluster.num_free_cpus() == 4, WAIT_S, "the nodes are given back")
    remove_dead(runtime_dir, *cluster.directories)


def test_nodes_in_use_are_waited_for_until_an_interrupt(cluster: RayCluster) -> None:
    stages: list[str] = []

    def show(progress: StartProgress) -> None:
        stages.append(progress.stage)
        if "free" in progress.stage:
            signal.raise_signal(signal.SIGINT)

    with cm.start(launch="ray", nodes=1, nproc_per_host=2) as mesh:
        with pytest.raises(MeshUsageError, match=r"^other: no node joins a mesh on Ray"):
            mesh.resize(hosts="other:1")
        with pytest.raises(KeyboardInterrupt):
            cm.start(launch="ray", nodes=2, nproc_per_host=1, on_progress=show)
        wanted = "2 nodes of Ray with CPU=1 each; CPU=2 are free in all (`ray status`)"
        assert stages[-1] == wanted


def test_start_without_a_cluster_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(HostError, match=r"no Ray cluster is reached .*refused.*`ray start --head`"):
        cm.start(launch="ray", nodes=1, nproc_per_host=1)
