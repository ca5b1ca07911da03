"""Finds the mesh that a command of a terminal is for, by its name, and says why there is none."""

from __future__ import annotations

from ..controller.session.attach import check_ticket
from ..controller.session.living import FoundMesh, find_living, look_at
from ..errors import MeshUsageError, NoMeshError, did_you_mean
from ..wire.ticket import find_strange, read_ticket, runtime_root


def find_mesh(name: str | None) -> FoundMesh:
    """Return the living mesh of this name or, without a name, the only living mesh.

    Whether a process holds it is for the caller (`FoundMesh.is_free`). Blocks at most two seconds,
    for a mesh on many hosts.

    Raises:
        NoMeshError: there is no such mesh, or it has ended.
        MeshUsageError: no name is given, and several meshes live.
        HostError: the mesh cannot be used from here: its host, user or version is another one.
    """
    root = runtime_root()
    if name and "/" not in name and (path := root / name / "ticket.json").exists():
        ticket = read_ticket(path)
        check_ticket(ticket)
        return look_at(ticket, root)
    living = find_living(asks=True)
    if name is None and len(living) == 1:
        return living[0]
    names = [mesh.name for mesh in living]
    strange = "".join(f"; {why}" for _, why in find_strange(root))
    if name is None and living:
        raise MeshUsageError(f"{len(living)} meshes live: name one of {', '.join(names)}")
    missing = "no mesh is running" if name is None else f"there is no mesh {name!r}"
    there = f" (running: {', '.join(names)})" if names else ""
    near = did_you_mean(name or "", names)
    start = "" if names else ": `cellmesh start 4` starts one"
    raise NoMeshError(f"{missing}{near}{there}{start}{strange}")
