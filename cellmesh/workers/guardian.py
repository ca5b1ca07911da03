"""The guardian: the agent's parent, which ends what is left of a mesh when the agent could not.

When the agent is killed, its ranks end with it. Processes that user code has started in sessions of their own
become children of the guardian, a subreaper, even if they have removed the mesh's mark. If the guardian is
killed, the agent goes on without it; if both are, the zygote ends the processes that carry the mark.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ..wire.ticket import read_ticket, remove_own_directory
from . import processes


def main(ticket_path: str) -> int:
    """Fork the agent, write its process number to descriptor 1, and wait for its end.

    Args:
        ticket_path: the mesh's ticket.

    Returns:
        Exit code.
    """
    ticket = read_ticket(Path(ticket_path))
    processes.become_subreaper()
    agent = os.fork()
    if agent == 0:
        os.dup2(2, 1)
        from .agent.agent import main as run_agent

        return run_agent(ticket_path)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they mean the agent
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"%d\n" % agent)
    os.dup2(2, 1)
    processes.name_process("cellmesh-guard")
    while os.wait()[0] != agent:
        pass
    processes.end_descendants()
    remove_own_directory(ticket)
    return 0
