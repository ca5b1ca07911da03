"""What the process says that asks Slurm for nodes, without a Slurm."""

from __future__ import annotations

import sys

import pytest

from cellmesh.controller.session.launch.node_holder import NodeHolder
from cellmesh.errors import HostError

DRIVER = (sys.executable, "-m", "cellmesh.controller.session.launch.slurm_driver")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["true"], r"salloc has not named its job \(\): `squeue --me`"),
        (["echo", "slurm 24"], r"salloc has not named its job \(slurm 24\)"),
        (["sh", "-c", "echo no such partition; exit 1"], "Slurm refuses the job: no such part"),
        (["false"], "Slurm refuses the job"),
    ],
)
def test_end_of_salloc_without_a_job_is_explained(command: list[str], message: str) -> None:
    asked = {"command": command, "timeout_s": None}
    with NodeHolder() as holder, pytest.raises(HostError, match=f"^{message}"):
        holder.ask(DRIVER, asked, lambda text: None)
