"""The guardian: the agent's parent process, which ends the mesh's remaining processes on this host
after the agent's death.

When the agent is killed, its ranks end with it. Processes that user code has started in sessions of
their own become children of the guardian, a subreaper, even if they have removed the mesh's mark
from their environment. If the guardian is killed, the agent continues without it; if both are
killed, the zygote ends the processes that carry the mark.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ...wire.ticket import read_ticket, remove_own_directory
from .. import linux_process
from .zygote_client import ZygoteClient

if TYPE_CHECKING:
    from ..zygote import Imported

# Line written to descriptor 1 once controllers on other hosts can reach the agent.
READY = b"ready\n"


def main(ticket_path: str, imported: Imported | None = None) -> int:
    """Fork the agent, write both process numbers to descriptor 1, and wait for the agent's end.

    Returns:
        0 if the agent has exited with status 0, else 1.
    """
    ticket = read_ticket(Path(ticket_path))
    linux_process.become_subreaper()
    agent = os.fork()
    if agent == 0:
        linux_process.allow_many_descriptors()
        try:
            # Start the zygote first: it imports torch while the agent imports its own modules. And
            # a forked zygote must not inherit the agent's descriptors and ZeroMQ's threads.
            zygote = ZygoteClient(ticket, imported, may_fork=True)
        except OSError as error:
            print(error, file=sys.stderr)
            return 1
        announcement = os.dup(1) if ticket.host is not None else -1
        os.dup2(2, 1)
        gc.enable()  # disabled in a parent that has preloaded torch
        from .agent import main as run_agent

        if announcement < 0:
            return run_agent(ticket_path, zygote)
        with open(announcement, "wb", buffering=0) as pipe:
            return run_agent(ticket_path, zygote, lambda: _announce(pipe))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the agent handles them
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"%d %d\n" % (os.getpid(), agent))
    os.dup2(2, 1)
    linux_process.name_process("cellmesh-guard")
    pid = status = 0
    while pid != agent:
        pid, status = os.wait()
    linux_process.end_descendants(ticket.mark)
    remove_own_directory(ticket)
    return int(status != 0)


def _announce(pipe: BinaryIO) -> None:
    """Report to the launcher, through its pipe, that controllers can reach this host's agent."""
    with pipe:
        pipe.write(READY)
