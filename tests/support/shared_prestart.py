"""A zygote that waits in the tests' process for the meshes of many tests, also for those of kernels
(`kernel_prestart`): each would import torch, which takes two seconds of a core.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from cellmesh.controller.session.launch.prestart import Prestart, conditions
from cellmesh.wire.ticket import Ticket
from cellmesh.wire.waiting import READY
from tests.conftest import FORKED_MARKS
from tests.support.kernel_prestart import CONDITIONS, SOCKET

IMPORT_S = 100.0


class SharedPrestart(Prestart):
    """A zygote that waits for the meshes of all tests, whose ranks can be found."""

    is_lent = True

    def start(self, ticket: Ticket, log: int) -> tuple[int, int]:
        """Have a mesh forked."""
        FORKED_MARKS[Path(ticket.directory).parents[1]].add(ticket.mark)
        return super().start(ticket, log)

    def lend(self, listener: socket.socket) -> None:
        """Have meshes forked for kernels, until the socket is closed."""
        with contextlib.suppress(OSError):
            while True:
                kernel, _ = listener.accept()
                threading.Thread(target=self._lend_once, args=(kernel,), daemon=True).start()

    def _lend_once(self, kernel: socket.socket) -> None:
        with kernel, contextlib.suppress(OSError):
            with self._lock:
                self._look(IMPORT_S)
                if self._state != "ready" or not self.is_lent:
                    return
            kernel.send(READY)
            if not (order := kernel.recv(1 << 16)):
                return
            directory, mark = json.loads(order)
            FORKED_MARKS[Path(directory).parents[1]].add(mark)
            data, descriptors, _, _ = socket.recv_fds(kernel, 1, 3)
            try:
                with self._lock:
                    if self._socket is not None:
                        socket.send_fds(self._socket, [data], descriptors)
            finally:
                for number in descriptors:
                    os.close(number)


@contextlib.contextmanager
def lending(directory: Path) -> Iterator[SharedPrestart]:
    """A zygote in the environment of now, which is lent to the kernels whose IPYTHONDIR this is."""
    waiting = SharedPrestart(keep_s=3600)
    waiting.begin()
    (directory / CONDITIONS).write_bytes(pickle.dumps(conditions(os.environ, sys.path)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SOCKET))
        listener.listen()
        lending = threading.Thread(target=waiting.lend, args=(listener,), daemon=True)
        lending.start()
        yield waiting
        listener.shutdown(socket.SHUT_RDWR)
        lending.join()
    waiting.end()
