"""Start a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .mesh import Mesh
from .options import make_options, read_project_options
from .session import Progress, Session


def start(
    num_ranks: int | None = None,
    *,
    mesh: Mapping[str, int] | str | None = None,
    backend: str | None = None,
    preload: Iterable[str] | str | None = None,
    name: str | None = None,
    timeout_s: float = 120.0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Mesh:
    """Start a mesh on this machine, and wait until every rank has answered.

    Options that are not given come from the ``[tool.cellmesh]`` table of the nearest ``pyproject.toml``.

    Args:
        num_ranks: number of ranks; may be left out where `mesh` gives it.
        mesh: dims of the DeviceMesh, ``{"dp": 2, "tp": 4}`` or ``"dp=2,tp=4"``; by default one, ``dp``.
        backend: ``auto`` (the default: NCCL where each rank has a GPU of its own, else gloo), ``gloo`` or
            ``nccl``.
        preload: modules to import once, before the ranks are forked.
        name: for ``cellmesh ps``; by default one of its own.
        timeout_s: how long the start may take, in seconds.
        on_progress: told how far it has come; called on another thread.

    Returns:
        The mesh, ready.

    Raises:
        MeshUsageError: an option is wrong.
        HostError: this machine cannot give what the mesh needs.
    """
    given = {
        "num_ranks": num_ranks,
        "mesh": mesh,
        "backend": backend,
        "preload": preload,
        "name": name,
    }
    options = read_project_options(Path.cwd())
    if num_ranks is not None or mesh is not None:
        # What the call says of the mesh's size replaces all that the project says of it.
        options.pop("num_ranks", None)
        options.pop("mesh", None)
    options.update({key: value for key, value in given.items() if value is not None})
    session = Session(make_options(**options), on_progress)
    session.wait_until_ready(timeout_s)
    return Mesh(session)
