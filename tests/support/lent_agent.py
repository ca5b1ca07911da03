"""Runs `cellmesh agent` as an engine does, and has the agent forked from the zygote of the tests'
process: that of each "host" would import torch, which takes two seconds of a core.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
# What starts an agent on "another host".
ENGINE = f"{sys.executable} -P {__file__} {{command}}"


class ForkedGuardian:
    """A guardian that another process has forked, in the form of `subprocess.Popen`."""

    def __init__(self, pid: int, first_line: bytes, output: IO[bytes]) -> None:
        self.pid, self._pidfd = pid, os.pidfd_open(pid)
        self._first_line, self._output = first_line, output

    @property
    def stdout(self) -> ForkedGuardian:
        return self

    def readline(self) -> bytes:
        line, self._first_line = self._first_line, b""
        return line or self._output.readline()

    def wait(self) -> int:
        """Wait for its end; only its parent knows its exit code."""
        wait_readable([self._pidfd])
        return 0

    communicate = wait


class Subprocess:
    """Stands in for the module `subprocess` in `on_host`.

    Args:
        lend: gives the zygote for one agent.
    """

    def __init__(self, lend: Callable[[], LentPrestart]) -> None:
        self._lend = lend

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, argv: list[str], *, stderr: IO[bytes], **options: Any) -> Any:
        lent = self._lend()
        if lent.prepare(WAIT_S):
            read_end, write_end = os.pipe()
            output = open(read_end, "rb", buffering=0)  # noqa: SIM115
            ask(lent, read_ticket(Path(argv[-1])), write_end, stderr.fileno())
            if line := output.readline():
                return ForkedGuardian(int(line.split()[0]), line, output)
        return subprocess.Popen(argv, stderr=stderr, **options)


def ask(lent: LentPrestart, ticket: Ticket, pipe: int, log: int) -> None:
    """Have a guardian forked that writes to this pipe and log."""
    order = StartMesh(str(ticket.path), os.getcwdb(), dict(os.environb))
    request = os.memfd_create("cellmesh-start")
    os.write(request, msgspec.msgpack.encode(order))
    with lent.connection as connection:
        lent.name_mesh(ticket)
        socket.send_fds(connection, [b"m"], [request, pipe, log])
    os.close(request)
    os.close(pipe)


if __name__ == "__main__":
    # As of `python -m cellmesh`, which follows in the command line.
    sys.path[:0] = [os.getcwd(), str(ROOT)]
    sys.argv[:] = sys.argv[sys.argv.index("cellmesh") :]

from cellmesh.wire.marks import StartMesh  # noqa: E402
from cellmesh.wire.process import wait_readable  # noqa: E402
from cellmesh.wire.ticket import Ticket, read_ticket  # noqa: E402
from tests.support.kernel_prestart import LentPrestart  # noqa: E402

WAIT_S = 60.0

if __name__ == "__main__":
    from cellmesh.cli.main import main
    from cellmesh.workers.agent import on_host

    own = functools.partial(LentPrestart, Path(os.environ["IPYTHONDIR"]))
    on_host.subprocess = Subprocess(own)  # type: ignore[assignment]
    main()
