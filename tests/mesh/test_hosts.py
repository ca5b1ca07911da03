"""A mesh on many hosts, which all are this machine: agents over TCP with CURVE, ranks on gloo."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError, HostError, RankFailure
from tests.conftest import clean_runtime_dir
from tests.faults.watching import wait_until
from tests.support.lent_agent import ENGINE

WAIT_S = 60.0
# Engines that start an agent on "another host": one that is forked, and one that imports torch.
HERE, HERE_COLD = ENGINE, "{command}"
# A host counts as lost soon; the networks of these tests lose nothing.
SHORT_LEASE_S = 1.0
REDUCE = "import torch, torch.distributed as dist\nx = torch.ones(1) * rank; dist.all_reduce(x)"


def start(hosts: str = "a:2,b:2", **options: Any) -> cm.Mesh:
    return cm.start(**{"hosts": hosts, "launch": HERE, "lease_s": 60, **options})


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with clean_runtime_dir() as directory:
        yield directory


@pytest.fixture(scope="module")
def mesh(directory: Path) -> Iterator[cm.Mesh]:
    """Two hosts with two ranks each."""
    with start(mesh="host=2,gpu=2", launch=HERE_COLD) as mesh:
        yield mesh


def agent_of(mesh: cm.Mesh, rank: int) -> psutil.Process:
    pids = {info.rank: info.pid for info in mesh.report()}
    parent = psutil.Process(pids[rank]).parent()
    assert parent is not None
    assert parent.name() == "cellmesh-agent"
    return parent


def test_ranks_are_numbered_host_by_host(mesh: cm.Mesh) -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    values = mesh.run(lambda: [int(os.environ[name]) for name in names]).list
    assert values == [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 2, 1, 2], [3, 1, 2, 1, 2]]
    assert mesh.pull("local_rank").list == [0, 1, 0, 1]
    assert [info.host for info in mesh.report()] == ["a", "a", "b", "b"]
    assert mesh.pull("mesh['gpu'].get_local_rank()").list == [0, 1, 0, 1]


def test_dead_ranks_of_both_hosts_are_replaced(mesh: cm.Mesh) -> None:
    with pytest.raises(RankFailure, match="rank 3 raised ValueError"):
        mesh.cell(f"if rank == 3:\n    raise ValueError('no')\n{REDUCE}")
    mesh.cell("kept = rank")
    for rank in (1, 2):
        mesh[rank].submit_cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait()
    assert set(mesh.heal().respawned) == {1, 2}
    assert mesh[[0, 3]].pull("kept").list == [0, 3]
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def lose(mesh: cm.Mesh, ranks: set[int], number: signal.Signals) -> psutil.Process:
    """Signal the agent of some ranks, and wait until the ranks count as lost."""
    agent = agent_of(mesh, min(ranks))
    agent.send_signal(number)
    wait_until(lambda: ranks <= mesh.rank_set.session.dead_ranks, WAIT_S, f"{ranks} are lost")
    return agent


def test_lost_host_is_started_again() -> None:
    """The first one, whose store the other host takes over."""
    lost, living = {0, 1}, [2, 3]
    with clean_runtime_dir(), start(host_lease_s=SHORT_LEASE_S) as mesh:
        mesh.cell("kept = rank + 5\ng = dist.new_group([0, 2])")
        lose(mesh, lost, signal.SIGKILL)
        report = mesh.heal(living[0])
        assert set(report.respawned) == lost
        assert mesh[living].pull("kept").list == [rank + 5 for rank in living]
        assert mesh[sorted(lost)].pull("kept").list == [living[0] + 5] * 2
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [6.0] * 4
        mesh.cell("import torch\ny = torch.ones(1)\nif rank in (0, 2): dist.all_reduce(y, group=g)")
        assert mesh[[0, 2]].pull("float(y)").list == [2.0, 2.0]
        mesh.restart()
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [6.0] * 4


@pytest.mark.parametrize("new_host", ["b", "c"])
def test_replaced_agent_that_wakes_ends_and_takes_part_in_nothing(new_host: str) -> None:
    with clean_runtime_dir(), start("a:2,b:1", host_lease_s=1.0) as mesh:
        mesh.cell("kept = rank + 5")
        agent = lose(mesh, {2}, signal.SIGSTOP)
        (old,) = [each for each in agent.children(recursive=True) if "r2" in each.name()]
        if new_host == "b":
            with pytest.raises(HostError, match=r"process \d+\) lives there.*heal --hosts b`"):
                mesh.heal()
        assert mesh.heal(0, hosts=new_host).respawned == (2,)
        assert old.is_running() == (new_host == "c")  # one on the same host has been ended
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.send_signal(signal.SIGCONT)
        mesh.cell(f"{REDUCE}\ng = dist.new_group([0, 2])")
        _, left = psutil.wait_procs([agent, old], timeout=WAIT_S)
        assert not left
        assert mesh.pull("float(x)").list == [3.0] * 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"launch": "no-such-engine {command}"}, HostError, "a: cannot run no-such-engine"),
        (
            {"launch": "sh -c 'echo refused >&2; exit 5' {command}"},
            HostError,
            "[ab]: .*exited with 5.*refused",
        ),
        ({"launch": "sh -c 'exit 127' {command}"}, HostError, "is cellmesh installed on [ab]"),
        ({"interface": "nosuch0"}, HostError, "[ab]: .*no interface nosuch0"),
        ({"preload": "no_such_module"}, CellmeshError, "on [ab]: .*no_such_module"),
        ({"hosts": "localhost.invalid:1", "launch": ""}, HostError, "localhost.invalid"),
    ],
)
def test_start_that_fails_says_where_and_leaves_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with clean_runtime_dir(), pytest.raises(error, match=f"(?s){message}"):
        cm.start(**{"hosts": "a:1,b:1", "launch": HERE, **options})
