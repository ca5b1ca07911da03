"""Hosts and their ranks, the command lines that start their agents, and refused requests."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from cellmesh.controller.engines import template_for
from cellmesh.controller.host_list import awaited_hosts, command_for, parse_hosts
from cellmesh.controller.options import make_options
from cellmesh.errors import MeshUsageError
from cellmesh.wire.hosts import Host

A2, B2 = Host("a", num_ranks=2), Host("b", num_ranks=2)


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "nproc_per_host", "expected"),
    [
        (" a:2 , b:2 ", 4, None, (A2, B2)),
        (["a:2", "b:2"], None, None, (A2, B2)),
        ("a,b", 4, None, (A2, B2)),
        ("a:1,b", 3, None, (Host("a", num_ranks=1), B2)),
        ("a:1,b", None, 2, (Host("a", num_ranks=1), B2)),
        ("root@node-1.site:3", None, None, (Host("root@node-1.site", num_ranks=3),)),
    ],
)
def test_hosts_are_read(hosts: Any, num_ranks: Any, nproc_per_host: Any, expected: Any) -> None:
    assert parse_hosts(hosts, num_ranks, nproc_per_host) == expected


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "nproc_per_host", "message"),
    [
        (" , ", None, None, "names no host"),
        ("a,b", None, None, "how many ranks run on a, b"),
        ("a,b", 3, None, "cannot be divided"),
        ("a:4,b", 4, None, "cannot be divided"),
        ("a:2,b:2", 5, None, "4 ranks in all, and the mesh 5"),
        ("a:0", None, None, "'a:0' is no host"),
        ("a b:2", None, None, "is no host"),
        ("-oProxyCommand=x:2", None, None, "is no host"),
        ("a:1,a:2", None, None, "names 'a' twice"),
        ("a,b", None, 0, "at least 1"),
    ],
)
def test_hosts_are_refused(hosts: str, num_ranks: Any, nproc_per_host: Any, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        parse_hosts(hosts, num_ranks, nproc_per_host)


AGENT = ["/opt/my env/python", "-m", "cellmesh"]
JOINED = "'/opt/my env/python' -m cellmesh"
LOADS = "ssh {host} 'module load cuda; {command}'"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{command}", AGENT),
        ("kubectl exec pod-{host} -- {command}", ["kubectl", "exec", "pod-n1", "--", *AGENT]),
        ("", ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "n1", JOINED]),
        (LOADS, ["ssh", "n1", f"module load cuda; {JOINED}"]),
    ],
)
def test_command_stands_where_the_template_says(template: str, expected: list[str]) -> None:
    assert command_for(template, "n1", AGENT) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [("ssh {host}", "lacks {command}"), ("ssh 'open {command}", "is no command line")],
)
def test_template_without_a_command_is_refused(template: str, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        command_for(template, "n1", AGENT)


def test_hosts_that_announce_themselves_have_equal_numbers_of_ranks() -> None:
    assert [host.num_ranks for host in awaited_hosts("hand", 2, 6, None)] == [3, 3]
    assert [host.num_ranks for host in awaited_hosts("hand", 2, None, 4)] == [4, 4]
    messages = {(None, 4): "--nodes 2", (0, 4): "not 0", (2, None): "--nproc", (2, 3): "equally"}
    for (nodes, num_ranks), message in messages.items():
        with pytest.raises(MeshUsageError, match=message):
            awaited_hosts("hand", nodes, num_ranks, None)


# ---- Slurm and Ray


@pytest.fixture(autouse=True)
def _no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)


def srun(**options: Any) -> list[str]:
    """Return the command line for a mesh named ``train``, without what all have."""
    made = make_options(launch="slurm", **options)
    argv = command_for(made.command, "", AGENT, mesh="train")
    assert (argv[0], argv[-3:]) == ("srun", AGENT)
    always = {"--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"}
    assert always < set(argv)
    return [word for word in argv[1:-3] if word not in {*always, "--mpi=none", "--cpu-bind=none"}]


def test_srun_asks_for_what_was_given() -> None:
    own = ["--nodes=2", "--ntasks=2", "--job-name=train", "--cpus-per-task=4"]
    assert srun(num_ranks=8, nodes=2) == own
    asked = srun(nodes=2, nproc_per_host=4, launch_args="--time=5 --account 'a b'")
    assert asked == [*own, "--time=5", "--account", "a b"]


def test_srun_takes_the_nodes_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert srun(num_ranks=6) == ["--nodes=3", "--ntasks=3", "--overlap"]
    assert srun(nodes=2, nproc_per_host=1) == ["--nodes=2", "--ntasks=2", "--overlap"]


def test_ray_driver_gets_what_was_asked_for() -> None:
    options = make_options(launch="ray", nodes=2, nproc_per_host=3, launch_args="CPU=8 fast=1")
    assert options.hosts == (Host("", num_ranks=3),) * 2  # which name themselves
    argv = command_for(options.command, "", AGENT, mesh="train")
    assert (argv[-5], argv[-3:]) == ("start", AGENT)
    assert json.loads(argv[-4]) == {
        "mesh": "train",
        "nodes": 2,
        "ranks_per_node": 3,
        "resources": {"CPU": 8.0, "fast": 1.0},
    }


def test_command_line_of_the_users_may_start_all_hosts() -> None:
    options = make_options(launch="flux run -N 2 {command}", nodes=2, nproc_per_host=4)
    assert (options.command, options.num_ranks) == ("flux run -N 2 {command}", 8)
    assert make_options(launch="sudo {command}", hosts="here:2").command == ""


def test_agent_is_started_again_in_the_job() -> None:
    argv = command_for(template_for("slurm", "12"), "n2", AGENT)
    assert argv[:2] == ["srun", "--jobid=12"]
    assert {"--overlap", "--nodelist=n2"} < set(argv)
    assert argv[-3:] == AGENT
    assert shlex.split(template_for("ray", "g"))[-4:] == ["again", "g", "{host}", "{command}"]
    assert template_for("docker exec {host} {command}", "") == "docker exec {host} {command}"


SLURM: dict[str, Any] = {"launch": "slurm", "nproc_per_host": 1}
RAY: dict[str, Any] = {"launch": "ray", "nproc_per_host": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch": "slurm", "nodes": 2}, "how many ranks run on"),
        ({"launch": "slurm", "nodes": 2, "num_ranks": 5}, "cannot be divided"),
        (SLURM | {"nodes": 0}, "on how many hosts"),
        (SLURM | {"hosts": "a:1"}, "leave --hosts out"),
        (SLURM | {"launch_args": "gpu"}, "'gpu' are no options of srun's"),
        (SLURM | {"launch_args": "'"}, "cannot be read"),
        (RAY, "on how many hosts .* Say it, like --nodes 2"),
        (RAY | {"nodes": 1, "launch_args": "GPU"}, "'GPU' is no amount of a Ray resource"),
        ({"num_ranks": 2, "nodes": 2}, "--nodes is for --launch slurm"),
        ({"num_ranks": 2, "launch_args": "--x"}, "add --launch slurm"),
        ({"num_ranks": 2, "nproc_per_host": 1}, "on which hosts"),
        ({"hosts": "a:1", "address": "eth0"}, "--interface chooses the network of all hosts"),
    ],
)
def test_requests_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        make_options(**options)
