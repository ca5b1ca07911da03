"""Messages between a kernel and its waiting zygote, and how other processes recognise such a
zygote.

A waiting zygote has no directory and no socket file: it is found by its arguments, and nothing is
left of it when it is killed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

READY = b"ready"
_NAME = "zygote-of-"


class StartMesh(msgspec.Struct, frozen=True):
    """Ask the waiting zygote to fork a mesh's guardian; two descriptors are sent with it: a pipe
    for its stdout, a log file for its stderr.

    The request itself is in a third file, as an environment may be larger than a message.
    """

    ticket_path: str
    cwd: bytes
    environment: dict[bytes, bytes]


def argument(root: Path, kernel_pid: int) -> str:
    """Return the command line argument that marks the waiting zygote of a kernel.

    Args:
        root: as `ticket.runtime_root` gives; there is no such file in it.
        kernel_pid: the kernel's process.
    """
    return f"{root}/{_NAME}{kernel_pid}"


def kernel_of(root: Path, arguments: list[str]) -> int:
    """Return the process id of the kernel whose waiting zygote has these arguments; 0 if none."""
    for word in arguments:
        pid = word.removeprefix(f"{root}/{_NAME}")
        if pid != word and pid.isdecimal():
            return int(pid)
    return 0
