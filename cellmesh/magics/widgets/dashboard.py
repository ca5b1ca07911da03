"""The mesh dashboard."""

from __future__ import annotations

from typing import Any

from ...controller.mesh import Mesh


def show_dashboard(mesh: Mesh) -> Any:
    """What ``%dist_status --live`` shows."""
    raise NotImplementedError
