"""Command line, import path and file descriptors of cellmesh's processes.

Agent and zygote import the same modules as the kernel; their interpreters run this file. ``python
-m`` could find another cellmesh than the kernel's, and ``python -c`` would put the working
directory first on the path: a ``cellmesh`` or ``torch`` in some directory must not be imported
instead. The file imports only the standard library, as all other modules are found on the kernel's
path.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # This file's folder; `-P` would leave it out, too, but scripts on ranks would find it set.
    sys.path.pop(0)

import contextlib
import importlib
import json
import os
import resource
import select
from collections.abc import Iterable
from pathlib import Path

# Descriptors that a process needs for one more host: the pipes of its command, its connections, and
# the connections that are tried out during its start.
FILES_A_HOST = 16


def isolated_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a Python interpreter that runs a module of this copy of cellmesh.

    Args:
        module: name of the module whose `main` is called with the arguments and returns the exit
            code.
        arguments: arguments of `main`; the last is the path of the mesh's ticket.
    """
    return [sys.executable, os.path.abspath(__file__), module, *arguments]


def take_import_path(ticket_path: str) -> None:
    """Set this process's import path to that of the notebook's kernel, without its working
    directory.

    The ticket is read as plain JSON, as msgspec can be imported only from that path.
    """
    sys.path[:] = absolute(json.loads(Path(ticket_path).read_bytes())["sys_path"]) or sys.path


def absolute(sys_path: Iterable[str]) -> list[str]:
    """Return the absolute directories of an import path, which do not depend on the working
    directory.
    """
    return [directory for directory in sys_path if os.path.isabs(directory)]


def wait_readable(descriptors: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Wait until one of these file descriptors is readable or has hung up; return all that are or
    have.

    Uses ``poll(2)``, as ``select(2)`` takes no descriptor from 1,024 on.

    Args:
        descriptors: file descriptors to wait for.
        timeout_s: time limit, in seconds; None for no limit.
    """
    poll = select.poll()
    for number in descriptors:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def make_room(num_more: int) -> int:
    """Raise the soft limit of open files, at most to the hard one, so that `num_more` can be
    opened.

    No further than that: some programs visit each number below the soft limit, which they inherit.

    Args:
        num_more: number of files to be opened besides the open ones.

    Returns:
        The previous soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even that can be opened
        num_open = soft
    needed = num_open + num_more
    if soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def limit_child(pid: int, soft: int) -> None:
    """Set a child process's soft limit of open files back to the limit before `make_room`, which
    has returned it.
    """
    with contextlib.suppress(OSError):  # it has ended
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def _run(module: str, *arguments: str) -> int | None:
    package = Path(os.path.abspath(__file__)).parents[1]
    sys.path.insert(0, str(package.parent))
    importlib.import_module(package.name)  # from now on its modules are found in its directory
    del sys.path[0]
    take_import_path(arguments[-1])
    status: int | None = importlib.import_module(module).main(*arguments)
    return status


if __name__ == "__main__":
    sys.exit(_run(*sys.argv[1:]))
