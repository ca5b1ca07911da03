"""The process that waits for a notebook's next mesh."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, cast

from cellmesh.workers.preload import Loading
from cellmesh.workers.prestart import _Waiting


def test_it_ends_after_its_time_and_loads_nothing_then(tmp_path: Path) -> None:
    kernel, own = socket.socketpair()
    loading = Loading([], str(tmp_path / "list.json"), "")
    pidfd = os.pidfd_open(os.getpid())
    with kernel, own:
        _Waiting(own, [pidfd], 0.01, cast(Any, None), loading).serve()
    os.close(pidfd)
