"""torchrun's options, as `cellmesh run` takes them."""

from __future__ import annotations

import pytest

from cellmesh.cli import torchrun
from cellmesh.errors import MeshUsageError


@pytest.mark.parametrize(
    "given",
    [
        {"nnodes": "1", "node_rank": "0", "standalone": True, "max_restarts": "0"},
        {"nnodes": "1:1", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "rdzv_id": "7"},
        {"master_addr": "127.0.0.1", "master_port": "29501", "role": "trainer"},
        {"rdzv_endpoint": "", "start_method": "spawn", "run_path": True},
    ],
)
def test_a_launch_on_one_host_means_the_same(given: dict[str, object]) -> None:
    torchrun.check(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nnodes": "2"}, r"--nnodes 2 .*--hosts a:4,b:4 .* slurm, ray or torchrun"),
        ({"nnodes": "1:4"}, "--nnodes 1:4 .*--hosts"),
        ({"rdzv_endpoint": "node0:29500"}, "--rdzv-endpoint node0:29500 .*--hosts"),
        ({"master_addr": "10.0.0.1"}, "--master-addr 10.0.0.1 .*--launch"),
        ({"node_rank": "1"}, "--node-rank 1 .*--hosts"),
        ({"max_restarts": "3"}, "--max-restarts 3 .*--keep"),
        ({"no_python": True}, "--no-python is not supported: a program that is not Python"),
        ({"virtual_local_rank": True}, "--virtual-local-rank is not supported: .*--gpus"),
    ],
)
def test_other_launches_name_the_option_for_them(given: dict[str, object], message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        torchrun.check(given)


def test_ranks_are_counted_as_torchrun_counts_them() -> None:
    assert torchrun.count_ranks("3", lambda: 8, 2) == 3
    assert torchrun.count_ranks("auto", lambda: 8, 2) == torchrun.count_ranks("gpu", lambda: 8, 2)
    assert torchrun.count_ranks("auto", lambda: 0, 2) == torchrun.count_ranks("cpu", int, 2) == 2
    for text, message in (("gpu", "has no GPU"), ("0", "from 1, auto"), ("four", "from 1, auto")):
        with pytest.raises(MeshUsageError, match=message):
            torchrun.count_ranks(text, lambda: 0, 2)


def test_streams_are_named_by_number() -> None:
    both = ("stdout", "stderr")
    assert torchrun.streams_of("--tee", "3", 2) == {0: both, 1: both}
    assert torchrun.streams_of("--tee", "0:1,1:2", 4) == {0: ("stdout",), 1: ("stderr",)}
    for text in ("4", "0:5", "9:1", "all"):
        with pytest.raises(MeshUsageError, match=f"--tee {text}: say 1"):
            torchrun.streams_of("--tee", text, 4)
