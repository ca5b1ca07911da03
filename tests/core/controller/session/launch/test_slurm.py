"""What Slurm is asked for, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.host_list import SlurmRequest, command_for
from cellmesh.controller.options import make_options
from cellmesh.controller.session.launch.slurm import Allocation, read_job, salloc_command
from cellmesh.errors import MeshUsageError


def test_request_names_only_what_was_given() -> None:
    assert salloc_command(SlurmRequest(2), "train") == [
        *("salloc", "--no-shell", "--job-name=train", "--nodes=2"),
    ]
    full = SlurmRequest(4, "1-0:00:00", "gpu,big")
    assert salloc_command(full, "x")[3:] == ["--nodes=4", "--time=1-0:00:00", "--partition=gpu,big"]


def test_agent_is_a_step_of_the_job_on_its_node() -> None:
    own = Allocation("12", ("n1", "n2"), is_own=True)
    command = command_for(own.template, "n2", ["python", "-m", "cellmesh"])
    assert command[:2] == ["srun", "--jobid=12"]
    assert "--nodelist=n2" in command
    assert command[-3:] == ["python", "-m", "cellmesh"]
    assert own.release_command == ("scancel", "12")
    assert Allocation("12", ("n1",), is_own=False).release_command == ()


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
        ({"num_ranks": 2, "nodes": 2}, "add --launch slurm"),
        ({"num_ranks": 2, "spares": 1}, "on which hosts"),
        ({"hosts": "a:1,b:1", "spares": 2}, "fewer than the 2 hosts"),
        ({"hosts": "a:1,b:1", "spares": -1}, "fewer than the 2 hosts"),
    ],
)
def test_requests_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        make_options(options.pop("num_ranks", None), **options)


def test_spares_are_the_last_hosts() -> None:
    options = make_options(hosts="a:2,b:2,c:2,d", spares=2)
    assert [entry.name for entry in options.hosts] == ["a", "b"]
    assert options.spares == ("c", "d")
    assert options.num_ranks == 4
