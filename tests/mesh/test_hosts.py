"""A mesh on many hosts, which all are this machine: agents over TCP with CURVE, ranks on gloo."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import cellmesh as cm
from cellmesh.controller.session.attach import stop_mesh
from cellmesh.controller.session.living import find_living
from cellmesh.errors import CellmeshError, HostError, MeshUsageError, RankFailure
from tests.conftest import check_nothing_left, own_runtime_dir
from tests.faults.watching import wait_until
from tests.support.lent_agent import ENGINE

WAIT_S = 60.0
# Engines that start an agent on "another host": one that is forked, and one that imports torch.
HERE, HERE_COLD = ENGINE, "{command}"
REDUCE = "import torch, torch.distributed as dist\nx = torch.ones(1) * rank; dist.all_reduce(x)"


def start(hosts: str = "a:2,b:2", **options: Any) -> cm.Mesh:
    return cm.start(**{"hosts": hosts, "launch": HERE, "lease_s": 60, **options})


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with own_runtime_dir() as directory:
        yield directory
        check_nothing_left(directory)


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


def test_failed_cell_releases_ranks_of_every_host(mesh: cm.Mesh) -> None:
    with pytest.raises(RankFailure, match="rank 3 raised ValueError"):
        mesh.cell(f"if rank == 3:\n    raise ValueError('no')\n{REDUCE}")
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def test_interrupted_cell_stops_on_every_host(mesh: cm.Mesh) -> None:
    run = mesh.submit_cell("import time\nwhile True: time.sleep(0.01)")
    run.interrupt()
    run.wait(WAIT_S)
    assert run.failed_ranks() == [0, 1, 2, 3]


def test_dead_ranks_of_both_hosts_are_replaced(mesh: cm.Mesh) -> None:
    mesh.cell("kept = rank")
    for rank in (1, 2):
        mesh[rank].submit_cell("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait()
    assert set(mesh.heal().respawned) == {1, 2}
    assert mesh[[0, 3]].pull("kept").list == [0, 3]
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def test_store_that_dies_is_replaced_for_every_host(mesh: cm.Mesh) -> None:
    (store,) = [
        process
        for process in agent_of(mesh, 0).children(recursive=True)
        if process.name() == "cellmesh-store"
    ]
    mesh.cell("kept = rank")
    store.kill()
    psutil.wait_procs([store], timeout=WAIT_S)
    assert mesh.pull("kept").list == [0, 1, 2, 3]
    mesh.cell(
        "g, y = dist.new_group([0, 3]), torch.ones(1)\n"
        "if rank in (0, 3): dist.all_reduce(y, group=g)"
    )
    assert mesh.pull("float(y)").list == [2.0, 1.0, 1.0, 2.0]


def test_restarted_mesh_spans_the_hosts(mesh: cm.Mesh) -> None:
    mesh.cell("old = 1")
    mesh.restart()
    assert mesh.pull("'old' in globals()").list == [False] * 4
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def test_left_mesh_says_what_it_runs_and_is_ended_by_its_name() -> None:
    with own_runtime_dir() as directory:
        mesh = start("a:1,b:1", name="left")
        mesh.submit_cell("import time; time.sleep(60)")
        mesh.states()  # the agents have what was sent before
        (held,) = find_living(asks=True)
        assert not held.is_free
        with pytest.raises(MeshUsageError, match="left is held by"):
            stop_mesh("left")
        mesh.detach()
        (left,) = find_living(asks=True)
        assert left.is_free
        assert [(info.title, info.ranks) for info in left.runs] == [("cell 1", (0, 1))]
        stop_mesh("left")
        check_nothing_left(directory)


def test_replaced_agent_that_wakes_ends_and_takes_part_in_nothing() -> None:
    """Another takes its place on the same host."""
    with own_runtime_dir() as directory:
        with start("a:2,b:1", host_lease_s=1.0) as mesh:
            mesh.cell("kept = rank + 5")
            agent = agent_of(mesh, 2)
            agent.suspend()
            wait_until(lambda: mesh.rank_set.session.dead_ranks == {2}, WAIT_S, "rank 2 is lost")
            (old,) = [each for each in agent.children(recursive=True) if "r2" in each.name()]
            with pytest.raises(HostError, match=r"process \d+\) lives there.*heal --hosts b`"):
                mesh.heal()
            assert mesh.heal(0, hosts="b").respawned == (2,)
            assert not old.is_running()
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.resume()
            mesh.cell(f"{REDUCE}\ng = dist.new_group([0, 2])")
            _, left = psutil.wait_procs([agent, old], timeout=WAIT_S)
            assert not left
            assert mesh.pull("float(x)").list == [3.0] * 3
        check_nothing_left(directory)


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
    with own_runtime_dir() as directory:
        with pytest.raises(error, match=f"(?s){message}"):
            cm.start(**{"hosts": "a:1,b:1", "launch": HERE, **options})
        check_nothing_left(directory)


def test_host_with_another_python_is_named(tmp_path: Path) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text(
        "import json, subprocess, sys\n"
        "ticket = json.loads(sys.stdin.readline())\n"
        "ticket['python'] = '2.7.18'\n"
        "text = json.dumps(ticket) + '\\n'\n"
        "sys.exit(subprocess.run(sys.argv[1:], input=text.encode()).returncode)\n"
    )
    with own_runtime_dir() as directory:
        with pytest.raises(HostError, match=r"a: .* the notebook has 2\.7\.18, .* has 3"):
            cm.start(hosts="a:1", launch=f"{sys.executable} {engine} {{command}}")
        check_nothing_left(directory)
