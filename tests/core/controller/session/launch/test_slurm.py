"""What Slurm is asked for, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.host_list import command_for
from cellmesh.controller.node_request import NodeRequest, parse_arguments
from cellmesh.controller.options import make_options
from cellmesh.controller.session.launch.slurm import (
    allocation_of,
    explain_loss,
    read_job,
    salloc_command,
)
from cellmesh.errors import MeshUsageError


def test_request_names_only_what_was_given() -> None:
    assert salloc_command(NodeRequest("slurm", 2, 8), "train") == [
        *("salloc", "--job-name=train", "--nodes=2", "--ntasks-per-node=4"),
        *("--no-kill", "--no-shell"),
    ]
    arguments = parse_arguments("--gres=gpu:4 --account 'a b'")
    full = NodeRequest("slurm", 4, None, 2, "1-0:00:00", "gpu,big", arguments)
    assert salloc_command(full, "x")[2:] == [
        *("--nodes=4", "--ntasks-per-node=2", "--time=1-0:00:00", "--partition=gpu,big"),
        *("--gres=gpu:4", "--account", "a b", "--no-kill", "--no-shell"),
    ]


def test_agent_is_a_step_of_the_job_on_its_node() -> None:
    own = allocation_of("12", ("n1", "n2"), is_own=True)
    command = command_for(own.template, "n2", ["python", "-m", "cellmesh"])
    assert command[:2] == ["srun", "--jobid=12"]
    assert "--nodelist=n2" in command
    assert command[-3:] == ["python", "-m", "cellmesh"]
    assert own.release_command == ("scancel", "12")
    assert own.leave_command[-1] == own.slurm_job == "12"
    given = allocation_of("12", ("n1",), is_own=False)
    assert given.release_command == given.leave_command == ()


@pytest.mark.parametrize(
    ("job", "node", "why"),
    [
        ("JobState=RUNNING NodeList=(null)", "State=MIXED", ""),
        ("JobState=TIMEOUT Reason=TimeLimit TimeLimit=00:01:00", "State=IDLE", "limit (00:01:00)"),
        ("JobState=PREEMPTED Reason=None", "State=IDLE", "another job has preempted it"),
        ("JobState=CANCELLED Reason=None", "State=IDLE", "it was cancelled"),
        ("JobState=NODE_FAIL Reason=NodeDown", "State=DOWN", "one of its nodes has failed"),
        ("JobState=FAILED Reason=NonZeroExitCode", "State=IDLE", "FAILED, NonZeroExitCode"),
        (
            "JobState=RUNNING NodeList=(null)",
            "State=DOWN* Reason=Not responding [slurm@2026-01-01]",
            "node n2 from job 7 (it is DOWN*: Not responding)",
        ),
        ("", "", ""),
    ],
)
def test_loss_is_explained_as_slurm_reports_it(job: str, node: str, why: str) -> None:
    said = explain_loss(f"JobId=7 {job}", f"NodeName=n2 {node}", "n2")
    assert why in said
    assert bool(why) == bool(said)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("", ""),
        ("salloc: Granted job allocation 7\n", "7"),
        ("salloc: Pending job allocation 31\nsalloc: job 31 queued and waiting", "31"),
        ("salloc: error: invalid partition specified: x", ""),
    ],
)
def test_job_is_read_from_what_salloc_says(text: str, job: str) -> None:
    assert read_job(text) == job


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch": "slurm", "nodes": 2}, "how many ranks run on a node"),
        ({"launch": "slurm", "nodes": 2, "num_ranks": 5}, "cannot be divided"),
        ({"launch": "slurm", "nodes": 0, "nproc_per_host": 1}, "at least 1"),
        ({"launch": "slurm", "nproc_per_host": 1, "partition": "a b"}, "no name of a partition"),
        ({"launch": "slurm", "nproc_per_host": 1, "time_limit": "2h"}, "no time of Slurm's"),
        ({"launch": "slurm", "nproc_per_host": 1, "hosts": "a:1"}, "leave --hosts out"),
        (
            {"launch": "slurm", "nproc_per_host": 1, "launch_args": "gpu"},
            "'gpu' are no options of salloc's",
        ),
        ({"launch": "slurm", "nproc_per_host": 1, "launch_args": "'"}, "cannot be read"),
        (
            {"launch": "slurm", "nproc_per_host": 1, "launch_args": "--mem=1G --quiet"},
            "--quiet: leave it out",
        ),
        ({"launch": "slurm", "nproc_per_host": 1, "launch_args": "-Q"}, "-Q: leave it out"),
        ({"launch": "ray", "nproc_per_host": 1}, "on how many nodes of the Ray cluster"),
        ({"launch": "ray", "nodes": 1, "nproc_per_host": 1, "partition": "p"}, "are Slurm's"),
        (
            {"launch": "ray", "nodes": 1, "nproc_per_host": 1, "launch_args": "GPU"},
            "'GPU' is no amount of a Ray resource",
        ),
        ({"launch": "ray", "nodes": 1, "nproc_per_host": 1, "queue_timeout_s": "x"}, "no span"),
        ({"num_ranks": 2, "nodes": 2}, "add --launch slurm"),
        ({"num_ranks": 2, "launch_args": "--x"}, "add --launch slurm"),
        ({"num_ranks": 2, "nproc_per_host": 1}, "on which hosts"),
    ],
)
def test_requests_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        make_options(options.pop("num_ranks", None), **options)
