"""Gives a mesh's own Slurm job back when the last of its agents has ended: ``python -m
cellmesh.workers.agent.slurm_job JOB``, run in each agent's step after the agent.

The lowest step that lives waits for the others; they end at once. So no two steps leave the job to
each other, and an agent that is killed does not take the other hosts' nodes along.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_ASK_S = 0.5
# While slurmctld does not answer.
_MAX_FAILURES = 60


def main() -> None:
    """Cancel the job, unless a step with a lower number lives to do so."""
    job, own = sys.argv[1], os.environ.get("SLURM_STEP_ID", "")
    for _ in range(_MAX_FAILURES):
        while (steps := _living_steps(job)) is not None:
            others = [step for step in steps if step != own]
            if own.isdecimal() and any(int(step) < int(own) for step in others):
                return
            if not others:
                subprocess.run(["scancel", job], capture_output=True)
                return
            time.sleep(_ASK_S)
        time.sleep(_ASK_S)


def _living_steps(job: str) -> list[str] | None:
    """Return the numbers of a job's steps that were started by srun; None if Slurm does not
    answer.
    """
    command = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    steps = [line.strip().rpartition(".")[2] for line in done.stdout.splitlines()]
    return [step for step in steps if step.isdecimal()]


if __name__ == "__main__":
    main()
