"""Tickets of meshes, for what is tried without one."""

from __future__ import annotations

import os
from typing import Any

from cellmesh.wire.hosts import Host
from cellmesh.wire.ticket import Ticket


def make_ticket(**fields: Any) -> Ticket:
    """A mesh of two ranks, whose controller is this process; any field may be another."""
    usual: dict[str, Any] = {
        "name": "found",
        "key": "00",
        "directory": "/nowhere",
        "num_ranks": 2,
        "backend": "gloo",
        "mesh_dim_names": ("dp",),
        "preload": (),
        "sys_path": (),
        "cwd": "/",
        "controller_pid": os.getpid(),
        "created_at": 0.0,
    }
    made = usual | fields
    return Ticket(**{"mesh_shape": (made["num_ranks"],), **made})


def address(host: str, first_rank: int = 0, num_ranks: int = 1, endpoint: str = "") -> Host:
    """The address of an agent."""
    return Host(host, endpoint or f"tcp://{host}:5", "key", first_rank, num_ranks)
