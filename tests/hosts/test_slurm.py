"""A real Slurm: inside an allocation, in one of the mesh's own, and what ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.session.hosts import connections
from cellmesh.errors import CellmeshError, HostError, MeshUsageError
from tests.conftest import check_nothing_left
from tests.faults.watching import wait_until

from .netns import run
from .slurm import slurm

WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Path]:
    """Two nodes, ``n1`` and ``n2``."""
    assert os.getuid() == 0, "a Slurm of its own needs root: sudo make hosts"
    with slurm() as directory:
        yield directory


@pytest.fixture(autouse=True)
def _no_job_is_left(runtime_dir: Path) -> Iterator[None]:
    yield
    check_nothing_left(runtime_dir)
    wait_until(lambda: not run("squeue", "-h"), WAIT_S, "no job is left")


def nodes_of(mesh: cm.Mesh) -> list[Any]:
    return mesh.run(lambda: os.environ.get("SLURMD_NODENAME")).list


def test_mesh_asks_for_nodes_and_gives_them_back() -> None:
    stages: list[str] = []
    with cm.start(
        launch="slurm",
        nodes=2,
        nproc_per_host=2,
        time_limit="5",
        mesh="host=2,gpu=2",
        on_progress=lambda progress: stages.append(progress.stage),
    ) as mesh:
        assert nodes_of(mesh) == ["n1", "n1", "n2", "n2"]
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [6.0] * 4
        assert len(run("squeue", "-h").splitlines()) == 1
    assert any(stage.startswith("job ") for stage in stages)


def test_mesh_uses_the_allocation_that_it_is_in() -> None:
    script = (
        "import cellmesh as cm, os\n"
        "with cm.start(4, launch='slurm') as mesh:\n"
        "    print(mesh.run(lambda: os.environ['SLURMD_NODENAME']).list)\n"
    )
    text = run("salloc", "--nodes=2", "--time=5", sys.executable, "-c", script)
    assert "['n1', 'n1', 'n2', 'n2']" in text


def test_cancelled_job_ends_the_mesh_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HOST_LEASE_S", 1.0)
    mesh = cm.start(launch="slurm", nodes=2, nproc_per_host=1, lease_s=60)
    subprocess.run(["scancel", "--name=cellmesh"], check=True)
    wait_until(lambda: not mesh.alive, WAIT_S, "the mesh has ended")
    with pytest.raises(CellmeshError, match="ended"):
        mesh.run(abs, -1)
    mesh.stop()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"nodes": 2, "partition": "nosuch"}, HostError, "Slurm refuses the job.*partition"),
        ({"nodes": 9, "timeout_s": 3.0}, HostError, "was not started by Slurm within 3 s"),
        ({"nodes": 0}, MeshUsageError, "--nodes must be at least 1"),
        ({"nodes": 1, "time_limit": "soon"}, MeshUsageError, "no time of Slurm's"),
        ({"nodes": 1, "hosts": "a:1"}, MeshUsageError, "leave --hosts out"),
        ({"nodes": 1, "mesh": "a=3"}, MeshUsageError, "and the mesh 3"),
        ({"nodes": 1, "preload": "no_such_module"}, CellmeshError, "no_such_module"),
    ],
)
def test_start_that_fails_gives_back_what_it_got(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        cm.start(launch="slurm", nproc_per_host=1, **options)
