"""The proof of the pudding: a small mesh, started, used and stopped."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from ... import Mesh, start
from ...errors import CellmeshError
from ...wire.ticket import runtime_root
from ..meshes import find_meshes, processes_of
from .facts import Trial

_START_S = 120.0
_COLLECTIVE_S = 30.0
_REDUCE = (
    "_sum = torch.full((1024,), rank + 1.0, device=device); "
    "dist.all_reduce(_sum); _sum = _sum.tolist()"
)


def try_mesh(num_ranks: int = 2) -> Trial:
    """Start a mesh, run an all_reduce on it, stop it, and look for what it left. Blocks.

    Args:
        num_ranks: of how many ranks.
    """
    try:
        # What ranks print of an error is no part of the report, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            return _try_mesh(num_ranks)
    except (CellmeshError, TimeoutError, OSError) as error:
        return Trial(num_ranks=num_ranks, error=f"{type(error).__name__}: {error}")


def _try_mesh(num_ranks: int) -> Trial:
    # All said here, so that a project's own options have no part in it.
    mesh = start(
        num_ranks,
        mesh={"dp": num_ranks},
        backend="auto",
        preload=(),
        name=f"doctor-{os.getpid()}",
        timeout_s=_START_S,
    )
    try:
        ticket = next(
            each.ticket for each in find_meshes(runtime_root()) if each.ticket.name == mesh.name
        )
        _reduce(mesh)  # the first one connects the ranks
        started_at = time.monotonic()
        _reduce(mesh)
        collective_s = time.monotonic() - started_at
        backend = str(mesh[0].pull("dist.get_backend()"))
        sums = mesh.pull("_sum[0], _sum[-1]")
    finally:
        stopping_at = time.monotonic()
        mesh.stop()
        stop_s = time.monotonic() - stopping_at
    expected = float(sum(range(1, num_ranks + 1)))
    wrong = {rank: ends for rank, ends in sums.items() if tuple(ends) != (expected, expected)}
    leftovers = [f"process {pid}" for pid in sorted(processes_of(ticket))]
    if os.path.lexists(ticket.directory):
        leftovers.append(str(Path(ticket.directory)))
    return Trial(
        num_ranks=num_ranks,
        backend=backend,
        start_s=mesh.start_s,
        collective_s=collective_s,
        stop_s=stop_s,
        error=f"all_reduce gave {wrong} and not {expected}" if wrong else "",
        leftovers=tuple(leftovers),
    )


def _reduce(mesh: Mesh) -> None:
    mesh.submit_cell(_REDUCE, quiet=True).result(_COLLECTIVE_S)
