"""Kernels of tests start their meshes from the zygote that waits in the tests' own process.

Each kernel would import torch for its mesh, which takes two seconds of a core. The tests' process
lends its zygote by a socket in IPYTHONDIR; a kernel runs this file when it starts.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from pathlib import Path

from cellmesh.controller.session.launch import prestart
from cellmesh.wire import marks
from cellmesh.wire.process import wait_readable
from cellmesh.wire.ticket import Ticket
from cellmesh.wire.waiting import READY

SOCKET, CONDITIONS = "prestart.sock", "prestart.conditions"
_START = "cellmesh.controller.session.start"


# Kernels have variables of their own; of those that are read at import, tests set such ones.
_READ_AT_IMPORT = ("CUDA", "LD_", "MKL", "OMP_", "PYTHON", "TORCH")


def are_same(one: prestart.Conditions, other: prestart.Conditions) -> bool:
    """Whether a zygote that was made in one of these conditions fits the other."""
    return _comparable(one) == _comparable(other)


def _comparable(made_in: prestart.Conditions) -> prestart.Conditions:
    """Return conditions with those variables alone that are read at import, and torch's file also
    where a link leads to it.
    """
    variables = made_in["environment"].items()
    read = {name: value for name, value in variables if name.startswith(_READ_AT_IMPORT)}
    path, changed_at = made_in["torch"]
    return {**made_in, "environment": read, "torch": (os.path.realpath(path), changed_at)}


class LentPrestart(prestart.Prestart):
    """The zygote of the tests' process, for one mesh of a kernel.

    Args:
        directory: where the socket is.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(keep_s=0)
        self._directory = directory
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def prepare(self, timeout_s: float, *_: object) -> bool:
        """Wait until the tests' process lends its zygote; it may refuse."""
        try:
            conditions = pickle.loads((self._directory / CONDITIONS).read_bytes())
            if not are_same(conditions, prestart.conditions(os.environ, sys.path)):
                return False
            self._socket = self.connection
            self.connection.connect(str(self._directory / SOCKET))
            wait_readable([self.connection.fileno()], timeout_s)
            return self.connection.recv(len(READY), socket.MSG_DONTWAIT) == READY
        except OSError:  # none is lent
            return False

    def start(self, ticket: Ticket, log: int) -> tuple[int, int]:
        """Have a mesh forked."""
        with self.connection:
            self.name_mesh(ticket)
            return super().start(ticket, log)

    def name_mesh(self, ticket: Ticket) -> None:
        """Say which mesh is to be forked, by which tests find its processes."""
        self.connection.send(json.dumps([ticket.directory, ticket.mark]).encode())


def lent_prestart() -> prestart.Prestart | None:
    """Stand in for `own_prestart` in a kernel."""
    if own := _own_prestart():
        return own
    directory = Path(os.environ.get("IPYTHONDIR", ""))
    is_lent = (directory / SOCKET).exists() and marks.VARIABLE not in os.environ
    return LentPrestart(directory) if is_lent else None


_own_prestart = prestart.own_prestart
if __name__ == "cellmesh tests":  # in a kernel
    for _module in (prestart, sys.modules.get(_START)):
        if _module is not None:
            _module.own_prestart = lent_prestart  # type: ignore[attr-defined]
