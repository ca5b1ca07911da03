"""Gives a mesh's own Slurm job back when the last of its agents has ended: ``python -m
cellmesh.workers.agent.slurm_job JOB``, run in each agent's step after the agent.

The lowest step that lives waits for the others; they end at once. So no two steps leave the job to
each other, and an agent that is killed does not take the other hosts' nodes along. A step on a node
that the job has lost counts as ended: Slurm lists it for a while, and nothing of it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Literal

_ASK_S = 0.5
# How long a command of Slurm's may take.
_COMMAND_S = 30.0
# While slurmctld does not answer.
_MAX_FAILURES = 60


def main() -> None:
    """Cancel the job, unless a step with a lower number lives to do so."""
    job, own = sys.argv[1], os.environ.get("SLURM_STEP_ID", "")
    num_failures = 0
    while num_failures < _MAX_FAILURES:
        steps = _ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %N")
        nodes = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%N")
        names = _ask("scontrol", "show", "hostnames", nodes.strip()) if nodes else None
        if steps is None or names is None:
            num_failures += 1
        else:
            choice = choose(own, steps, names.split())
            if choice == "cancel":
                _ask("scancel", job)
            if choice != "wait":
                return
        time.sleep(_ASK_S)


def choose(own: str, steps: str, nodes: Collection[str]) -> Literal["cancel", "leave", "wait"]:
    """Return what a step whose agent has ended does with the job. Pure.

    Args:
        own: the step's number; "" if it is not known.
        steps: what squeue prints of the job's steps: a line with id and node each.
        nodes: the names of those that the job has.
    """
    living = []
    for line in steps.splitlines():
        name, _, node = line.strip().partition(" ")
        number = name.rpartition(".")[2]
        if number.isdecimal() and node.strip() in nodes:  # started by srun
            living.append(number)
    others = [number for number in living if number != own]
    if own.isdecimal() and any(int(number) < int(own) for number in others):
        return "leave"
    return "wait" if others else "cancel"


def _ask(*command: str) -> str | None:
    """Return what a command of Slurm's prints; None if slurmctld does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout


if __name__ == "__main__":
    main()
