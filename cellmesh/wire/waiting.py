"""The zygotes that wait for the next mesh of a shell: each listens on a socket in one directory
(mode 0700) beside the directory of meshes.

A socket's name has the place, the number of modules that the zygote has learned (-1 while it
imports torch), and its process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import zlib
from collections.abc import Mapping

import msgspec

from .host import Process, host_name, is_process, started_ticks
from .own_file import open_own_directory
from .process import wait_readable
from .ticket import runtime_root

# A zygote's answer to a request for which it is to import more first: ask again.
IMPORTING = "the waiting zygote imports modules"
READY = b"ready"
# The socket of a mesh's zygote, from which its controller's next mesh is forked, in the mesh's
# directory.
OF_MESH = "zygote.sock"
# Time limit for the request of a process that has connected: the next one waits for it.
_REQUEST_S = 5.0


class Needs(msgspec.Struct, frozen=True):
    """The conditions of a shell's mesh besides its environment, which a zygote has to fit.

    Attributes:
        conditions: properties that a process inherits -> their values, as text.
        sys_path: the mesh's search path of modules.
        list_path: list of the project (`preload`); "" without one.
        ignored: signals that the mesh's processes ignore.
    """

    conditions: Mapping[str, str]
    sys_path: tuple[str, ...]
    list_path: str
    ignored: tuple[int, ...]


class WaitingSocket(msgspec.Struct, frozen=True):
    """The socket of a waiting zygote.

    Attributes:
        name: its name in the directory.
        num_modules: number of modules that the zygote has learned; -1 while it imports torch.
        process: the zygote.
        used_at: time stamp of its last use.
    """

    name: str
    num_modules: int
    process: Process
    used_at: float


def open_directory(makes: bool = True) -> int:
    """Open the directory of sockets.

    Args:
        makes: whether to make the directory if there is none.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    root = runtime_root()
    return open_own_directory(root.with_name(f"{root.name}-waiting"), makes)


def address(directory: int, name: str) -> str:
    """Return the address of a socket in an open directory: short, whatever the directory's path."""
    return f"/proc/self/fd/{directory}/{name}"


def name_socket(pid: int, num_modules: int = -1) -> str:
    """Return the name of a zygote's socket (`WaitingSocket`)."""
    return f"{_place()}.{num_modules}.{pid}.{started_ticks(pid)}"


def find_sockets(directory: int) -> list[WaitingSocket]:
    """Return the sockets of living zygotes, those with the most modules first, and of these the one
    that was used last; remove those of killed ones.
    """
    found = []
    for name in os.listdir(directory):
        place, *numbers = name.split(".")
        if place != _place() or len(numbers) != 3:  # of another host or container
            continue
        num_modules, pid, ticks = map(int, numbers)
        try:
            if is_process(pid, ticks):
                used_at = os.stat(name, dir_fd=directory).st_mtime
                found.append(WaitingSocket(name, num_modules, Process(pid, ticks), used_at))
            else:
                os.unlink(name, dir_fd=directory)
        except FileNotFoundError:  # another process has removed or renamed it
            continue
    return sorted(found, key=lambda each: (-each.num_modules, -each.used_at))


def sweep() -> None:
    """Remove the sockets of zygotes that were killed."""
    with contextlib.suppress(OSError):
        directory = open_directory(makes=False)
        try:
            find_sockets(directory)
        finally:
            os.close(directory)


def listen(directory: int, name: str) -> socket.socket:
    """Return a socket of this user's alone that listens in an open directory.

    Raises:
        OSError: the disk is full, or no descriptor is free.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.bind(address(directory, name))
        os.chmod(name, 0o600, dir_fd=directory)
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def greet(server: socket.socket) -> socket.socket:
    """Return a connection to a process of this user, which may send a request.

    Raises:
        OSError: the process is another user's, or has ended.
    """
    connection, _ = server.accept()
    try:
        if not is_own_peer(connection):
            raise PermissionError
        connection.send(READY)
    except OSError:
        connection.close()
        raise
    return connection


def accept(server: socket.socket) -> socket.socket:
    """Return a connection to a process of this user that has sent a request, or has closed it.

    Raises:
        OSError: the process is another user's, or sends nothing.
    """
    connection = greet(server)
    if not wait_readable([connection.fileno()], _REQUEST_S):
        connection.close()
        raise TimeoutError
    return connection


def connect(directory: int, name: str, timeout_s: float) -> socket.socket | None:
    """Return a connection to a zygote that listens in an open directory; None if it is another
    user's, or does not accept it in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    with contextlib.suppress(OSError):
        connection.connect(address(directory, name))
        if is_own_peer(connection) and connection.recv(len(READY)) == READY:
            return connection
    connection.close()
    return None


def is_own_peer(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a unix socket is this user's."""
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", facts)[1] == os.getuid())


def _place() -> str:
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{host_name()} {namespace}'.encode()):08x}"
