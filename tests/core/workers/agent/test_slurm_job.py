"""Which step gives a mesh's Slurm job back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cellmesh.workers.agent.slurm_job import choose, main


@pytest.mark.parametrize(
    ("own", "steps", "nodes", "choice"),
    [
        ("0", "7.0 n1", ["n1", "n2"], "cancel"),
        ("0", "7.0 n1\n7.1 n2", ["n1", "n2"], "wait"),
        ("1", "7.0 n1\n7.1 n2", ["n1", "n2"], "leave"),
        ("1", "7.1 n2", ["n1", "n2"], "cancel"),
        # The step of a node that has failed is listed for a while, and gives nothing back.
        ("1", "7.0 n2\n7.1 n1", ["n1"], "cancel"),
        ("0", "7.0 n1\n7.1 n2", ["n1"], "cancel"),
        ("1", "7.0 n3\n7.1 n1\n7.2 n2", ["n1", "n2"], "wait"),
        # Steps that srun has not started hold no agent.
        ("0", "7.extern n1\n7.batch n1\n7.0 n1", ["n1"], "cancel"),
        ("10", "7.9 n1\n7.10 n2", ["n1", "n2"], "leave"),
        ("", "7.0 n1", ["n1"], "wait"),
        ("", "", ["n1"], "cancel"),
    ],
)
def test_lowest_living_step_waits_for_the_others(
    own: str, steps: str, nodes: list[str], choice: str
) -> None:
    assert choose(own, steps, nodes) == choice


def test_slurm_that_does_not_answer_is_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\nexec sleep 100\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["slurm_job", "7"])
    for name, value in (("_COMMAND_S", 0.01), ("_ASK_S", 0.0), ("_MAX_FAILURES", 2)):
        monkeypatch.setattr(f"cellmesh.workers.agent.slurm_job.{name}", value)
    main()
