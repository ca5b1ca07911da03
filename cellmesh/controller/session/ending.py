"""Describes how a mesh ended, and makes the errors of work that is asked of an ended mesh."""

from __future__ import annotations

from ...errors import CellmeshError, HostError, MeshUsageError, NoMeshError
from ...wire.attach import Detached, Refused
from ...wire.messages import StartFailed, Stopped
from ..core.core import State

# Why there is no more to be done with a mesh.
End = StartFailed | Refused | Detached | Stopped


def describe_end(name: str, end: End | None, has_left: bool) -> str:
    """Say that a mesh has ended, and why; "" if it has not."""
    if isinstance(end, Detached):
        return f"this notebook has left {name} ({end.reason})"
    if end is None and not has_left:
        return ""
    return f"{name} has ended{_in_brackets(end)}"


def refuse_use(name: str, end: End | None, state: State) -> NoMeshError:
    """Return the error of work for a mesh that is not ready."""
    if isinstance(end, Detached):
        return NoMeshError(
            f"the mesh lives on without this notebook{_in_brackets(end)}: `%dist_attach {name}` "
            "has it again, with --steal if somebody holds it"
        )
    return NoMeshError(
        f"the mesh is {state}{_in_brackets(end)}: start another with `%dist_start` or "
        "cellmesh.start()"
    )


def explain_start(end: End | None, timeout_s: float, log: str) -> CellmeshError:
    """Return the error of a start that failed or took too long.

    Args:
        end: what ended it.
        timeout_s: how long was waited.
        log: what the agent has said last.
    """
    if end is None:
        return HostError(f"the mesh was not ready after {timeout_s} s. {log}".strip())
    if isinstance(end, StartFailed):
        return MeshUsageError(end.text) if end.fault == "user" else HostError(end.text)
    return HostError(f"the mesh did not start: {reason_of(end)}. {log}".strip())


def reason_of(end: End | None) -> str:
    """Return the reason of an end, as far as it is known."""
    if end is None:
        return ""
    return end.text if isinstance(end, StartFailed) else end.reason


def _in_brackets(end: End | None) -> str:
    reason = reason_of(end)
    return f" ({reason})" if reason else ""
