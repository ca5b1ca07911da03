"""A small mesh, started, used and stopped."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import msgspec

from ...errors import CellmeshError

_NUM_RANKS = 2
_START_S = 120.0
_COLLECTIVE_S = 30.0
_REDUCE = "_sum = torch.ones(1024, device=device); dist.all_reduce(_sum); _sum = _sum.tolist()"


class Trial(msgspec.Struct, frozen=True):
    """A mesh that was started, used and stopped.

    Attributes:
        backend: what ``dist.get_backend()`` said.
        start_s: seconds until every rank had answered.
        collective_s: seconds an all_reduce took, the first one not counted.
        stop_s: seconds until all had ended.
        error: what went wrong.
    """

    num_ranks: int
    backend: str = ""
    start_s: float = 0.0
    collective_s: float = 0.0
    stop_s: float = 0.0
    error: str = ""


def try_mesh() -> Trial:
    """Start a mesh, run an all_reduce on it, and stop it. Blocks."""
    try:
        # What ranks print of an error is no part of the report, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            return _try_mesh()
    except (CellmeshError, ImportError, TimeoutError, OSError) as error:
        return Trial(num_ranks=_NUM_RANKS, error=f"{type(error).__name__}: {error}")


def _try_mesh() -> Trial:
    from ... import start  # of a broken installation, it may fail

    # Every option is given, so that a project's own have no part in it.
    mesh = start(
        _NUM_RANKS,
        mesh={"dp": _NUM_RANKS},
        backend="auto",
        preload=(),
        name=f"doctor-{os.getpid()}",
        timeout_s=_START_S,
    )
    try:
        # The first all_reduce connects the ranks.
        mesh.submit_cell(_REDUCE, quiet=True).result(_COLLECTIVE_S)
        started_at = time.monotonic()
        mesh.submit_cell(_REDUCE, quiet=True).result(_COLLECTIVE_S)
        collective_s = time.monotonic() - started_at
        backend = str(mesh[0].pull("dist.get_backend()"))
    finally:
        stopping_at = time.monotonic()
        mesh.stop()
        stop_s = time.monotonic() - stopping_at
    return Trial(_NUM_RANKS, backend, mesh.start_s, collective_s, stop_s)
