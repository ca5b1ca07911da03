"""The command lines by which Slurm and Ray start agents, and the requests that they refuse."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from cellmesh.controller.engines import template_for
from cellmesh.controller.host_list import command_for
from cellmesh.controller.options import make_options
from cellmesh.errors import MeshUsageError
from cellmesh.wire.hosts import Host

AGENT = ["python", "-m", "cellmesh"]


@pytest.fixture(autouse=True)
def _no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)


def srun(**options: Any) -> list[str]:
    """Return the command line for a mesh named ``train``, without what all have."""
    made = make_options(launch="slurm", **options)
    argv = command_for(made.command, "", AGENT, mesh="train")
    assert argv[0] == "srun"
    assert argv[-3:] == AGENT
    always = {"--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"}
    assert always < set(argv)
    return [word for word in argv[1:-3] if word not in {*always, "--mpi=none", "--cpu-bind=none"}]


def test_srun_asks_for_what_was_given() -> None:
    own = ["--nodes=2", "--ntasks=2", "--job-name=train", "--cpus-per-task=4"]
    assert srun(num_ranks=8, nodes=2) == own
    asked = srun(
        nodes=2,
        nproc_per_host=4,
        time_limit="1-0:00:00",
        partition="gpu,big",
        launch_args="--gres=gpu:4 --account 'a b'",
        queue_timeout_s="1m",
    )
    assert asked == [
        *(*own, "--immediate=60", "--time=1-0:00:00", "--partition=gpu,big"),
        *("--gres=gpu:4", "--account", "a b"),
    ]


def test_srun_takes_the_nodes_of_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert srun(num_ranks=6) == ["--nodes=3", "--ntasks=3", "--overlap"]
    assert srun(nodes=2, nproc_per_host=1) == ["--nodes=2", "--ntasks=2", "--overlap"]


def test_hosts_of_an_engine_name_themselves() -> None:
    assert make_options(6, launch="slurm", nodes=2).hosts == (Host("", num_ranks=3),) * 2


def test_ray_driver_gets_what_was_asked_for() -> None:
    options = make_options(launch="ray", nodes=2, nproc_per_host=3, launch_args="CPU=8 fast=1")
    argv = command_for(options.command, "", AGENT, mesh="train")
    assert argv[-5] == "start"
    assert argv[-3:] == AGENT
    assert json.loads(argv[-4]) == {
        "mesh": "train",
        "nodes": 2,
        "ranks_per_node": 3,
        "resources": {"CPU": 8.0, "fast": 1.0},
        "may_use_gpus": True,
        "timeout_s": None,
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
    # The shell on the host splits what ssh has joined.
    assert command_for(template_for("", ""), "n1", ["/a b/python", "-m"])[-1] == "'/a b/python' -m"


SLURM: dict[str, Any] = {"launch": "slurm", "nproc_per_host": 1}
RAY: dict[str, Any] = {"launch": "ray", "nproc_per_host": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch": "slurm", "nodes": 2}, "how many ranks run on"),
        ({"launch": "slurm", "nodes": 2, "num_ranks": 5}, "cannot be divided"),
        (SLURM | {"nodes": 0}, "on how many hosts"),
        (SLURM | {"partition": "a b"}, "no name of a partition"),
        (SLURM | {"time_limit": "2h"}, "no time of Slurm's"),
        (SLURM | {"hosts": "a:1"}, "leave --hosts out"),
        (SLURM | {"launch_args": "gpu"}, "'gpu' are no options of srun's"),
        (SLURM | {"launch_args": "'"}, "cannot be read"),
        (RAY, "on how many hosts .* Say it, like --nodes 2"),
        (RAY | {"nodes": 1, "partition": "p"}, "are Slurm's"),
        (RAY | {"nodes": 1, "launch_args": "GPU"}, "'GPU' is no amount of a Ray resource"),
        (RAY | {"nodes": 1, "queue_timeout_s": "x"}, "no span"),
        ({"num_ranks": 2, "nodes": 2}, "add --launch slurm"),
        ({"num_ranks": 2, "launch_args": "--x"}, "add --launch slurm"),
        ({"num_ranks": 2, "nproc_per_host": 1}, "on which hosts"),
        ({"hosts": "a:1", "address": "eth0"}, "--interface chooses the network of all hosts"),
    ],
)
def test_requests_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        make_options(**options)
