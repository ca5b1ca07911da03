"""Start an agent on this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from ...errors import HostError
from ...wire.ticket import (
    Ticket,
    make_directory,
    new_key,
    remove_directory,
    runtime_root,
    write_ticket,
)
from ..options import Options


def make_ticket(options: Options) -> Ticket:
    """Make a mesh's directory and ticket.

    Args:
        options: what to start.

    Returns:
        The ticket, written.

    Raises:
        HostError: the runtime directory cannot be used.
    """
    name = options.name or f"mesh-{os.getpid()}-{secrets.token_hex(2)}"
    directory = make_directory(runtime_root(), name)
    ticket = Ticket(
        name=name,
        key=new_key(),
        directory=str(directory),
        num_ranks=options.num_ranks,
        backend=options.backend,
        mesh_dim_names=tuple(options.mesh),
        mesh_shape=tuple(options.mesh.values()),
        preload=options.preload,
        sys_path=tuple(path or os.getcwd() for path in sys.path),
        cwd=os.getcwd(),
        controller_pid=os.getpid(),
        created_at=time.time(),
    )
    try:
        write_ticket(ticket)
    except HostError:
        remove_directory(directory)
        raise
    return ticket


def start_agent(ticket: Ticket) -> subprocess.Popen[bytes]:
    """Start the agent of a ticket, in a session of its own: Jupyter signals the kernel's process group.

    Args:
        ticket: what it is to start.

    Returns:
        Its process.

    Raises:
        HostError: it could not be started.
    """
    package_parent = str(Path(__file__).parents[3])
    code = (
        f"import sys; sys.path.append({package_parent!r}); "
        "from cellmesh.workers.agent import main; sys.exit(main(sys.argv[1]))"
    )
    try:
        with open(ticket.logs / "agent.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", code, str(ticket.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as e:
        remove_directory(Path(ticket.directory))
        raise HostError(f"cannot start the agent ({sys.executable}): {e}") from e
