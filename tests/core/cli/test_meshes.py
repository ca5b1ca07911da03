"""The state of a mesh by its ticket and processes."""

from __future__ import annotations

import pytest

from cellmesh.cli.meshes import classify
from cellmesh.wire.ticket import Ticket


def ticket(agent_pid: int) -> Ticket:
    return Ticket(
        name="train",
        key="00",
        directory="/run/cellmesh/train",
        num_ranks=2,
        backend="auto",
        mesh_dim_names=("dp",),
        mesh_shape=(2,),
        preload=(),
        sys_path=(),
        cwd="/",
        controller_pid=1,
        created_at=0.0,
        agent_pid=agent_pid,
    )


@pytest.mark.parametrize(
    ("agent_pid", "pids", "age_s", "state"),
    [
        (70, [70, 71], 3600.0, "running"),
        (70, [71], 3600.0, "leftover"),
        (70, [], 1.0, "stale"),
        (0, [], 1.0, "starting"),
        (0, [70], 90.0, "starting"),
        (0, [], 61.0, "stale"),
    ],
)
def test_mesh_state_follows_from_agent_and_holder(
    agent_pid: int, pids: list[int], age_s: float, state: str
) -> None:
    assert classify(ticket(agent_pid), pids, age_s) == state
