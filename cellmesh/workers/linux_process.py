"""Functions that Python lacks for supervising Linux processes: prctl, facts from /proc, and threads
that start even if user code has patched `threading`.
"""

from __future__ import annotations

import _thread
import array
import contextlib
import ctypes
import fcntl
import resource
import signal
import socket
import struct
import sys
import termios
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..stdlib import open, os, time
from ..wire.host import process_stat
from ..wire.marks import is_apart
from ..wire.process import wait_readable

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # a flag in /proc/PID/stat
_libc = ctypes.CDLL(None, use_errno=True)

# `sys.argv[0]` for user code, as torchrun sets it to a script's name.
PROGRAM = "cell"
# Address of the c10d store if all processes of a mesh are on one host.
LOOPBACK = "127.0.0.1"


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper(is_one: bool = True) -> None:
    """Make orphaned descendants this process's children (prctl(2), PR_SET_CHILD_SUBREAPER), or no
    longer.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, is_one)


def name_process(name: str) -> None:
    """Set the name of this process in ``ps`` and ``top``; the kernel truncates it to 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def name_command(text: str) -> None:
    """Replace the command in ``/proc/PID/cmdline``, which a fork inherits, by a text."""
    fields = process_stat("self")
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5))
    if begin < end:
        # If the last byte is not NUL, the kernel stops reading at the first NUL.
        ctypes.memmove(
            begin,
            os.fsencode(text)[: end - begin - 2].ljust(end - begin - 1, b"\0") + b" ",
            end - begin,
        )


def name_arguments(arguments: Sequence[str]) -> None:
    """Replace this process's arguments in ``/proc/PID/cmdline``, if the new ones fit there."""
    fields = process_stat("self")
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5))
    data = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    if len(data) <= end - begin:
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def die_with(parent_pid: int, patience_s: float = 60.0) -> None:
    """Make the kernel kill this process when `parent_pid` ends.

    The caller was forked twice: it waits until the intermediate process has exited and
    `parent_pid`, a subreaper, is its parent, as PR_SET_PDEATHSIG refers to the current parent.

    Raises:
        ProcessLookupError: `parent_pid` has ended, or is not the parent within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while (parent := os.getppid()) != parent_pid:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise ProcessLookupError(f"process {parent_pid} is not the parent")
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            pidfd = os.pidfd_open(parent)
            if os.getppid() == parent:  # else its number may be another process's
                wait_readable([pidfd], left_s)
            os.close(pidfd)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the prctl
        raise ProcessLookupError(f"process {parent_pid} ended")


def live_on() -> None:
    """Undo `die_with`: the kernel no longer kills this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def write_stderr(text: str) -> None:
    """Write text to descriptor 2; on a rank, the agent reads it and adds the rank's number."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]


def flush_c_stdio() -> None:
    """Flush libc's buffers, in which C code may have left output."""
    _libc.fflush(None)


def renew_resolver() -> None:
    """Make libc read its name resolver's options (RES_OPTIONS) again, for this thread."""
    _libc.__res_init()


def describe_end(wait_status: int) -> str:
    """Return a description of a process's end from `os.waitpid`'s status."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def main_thread_sleeps() -> bool:
    """Return whether this process's main thread sleeps in the kernel; True if unknown."""
    try:
        return process_stat(f"self/task/{os.getpid()}")[0] in (b"S", b"D")
    except OSError:
        return True


def is_ending(pid: int) -> bool:
    """Return whether a process has ended or begun to end, even with descriptors still open."""
    fields = process_stat(pid)
    return not fields or bool(int(fields[6]) & _PF_EXITING)


def signal_own_group(number: int) -> None:
    """Send a signal to this process and all others in its process group."""
    try:
        os.killpg(os.getpgrp(), number)
    except ProcessLookupError:
        return


def ignore_from_any_thread(number: int) -> None:
    """Ignore a signal; unlike `signal.signal`, this works on any thread."""
    _libc.signal(number, ctypes.c_void_p(int(signal.SIG_IGN)))


def num_unsent(descriptor: int) -> int:
    """Return the number of bytes in a socket that its peer has not received; for a unix socket,
    which counts them with its buffers, a greater one than 0 until the peer has read all.
    """
    unsent: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    return unsent


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := process_stat(entry)):
            yield int(entry), int(fields[1])


def reap_children_except(ours: Collection[int]) -> None:
    """Reap ended children of this process, except those in `ours`, which other code waits for."""
    for pid, parent in _parents():
        if parent == os.getpid() and pid not in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the descendants of `pid`, parents first, except `spared` ones and those below them."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        below = [child for child in children.get(todo.pop(), []) if child not in spared]
        found += below
        todo += below
    return found


def end_descendants(mark: str, spared: Collection[int] = ()) -> None:
    """Kill and reap all processes of a mesh below this one, except `spared` ones and their
    descendants.

    Args:
        mark: mark of the mesh; children that are guardians of others are left alone.
        spared: process numbers.
    """
    for _ in range(50):  # a process may have forked before it was killed
        own = os.getpid()
        apart = [pid for pid, parent in _parents() if parent == own and is_apart(pid, mark)]
        below = descendants(own, {*spared, *apart})
        if not below:
            break
        kill(below)
        for pid in below:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:  # a grandchild, which becomes a child by the next round
                time.sleep(0.001)


def kill(pids: Iterable[int], signal_number: int = signal.SIGKILL) -> None:
    """Send processes a signal; ignore those that have ended."""
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue


def allow_many_descriptors() -> None:
    """Raise the soft limit of descriptors to the hard one: 1,024 do not suffice for 160 ranks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_threads_for(num_local_ranks: int, environment: Mapping[str, str]) -> int:
    """Return OMP_NUM_THREADS for a rank: the user's value if set, else the number of cores if the
    host has one rank only, else 1.
    """
    told = environment.get("OMP_NUM_THREADS", "")
    default = 1 if num_local_ranks > 1 else len(os.sched_getaffinity(0))
    return int(told) if told.isdecimal() else default


def run_and_exit(function: Callable[[], int | None]) -> NoReturn:
    """Run a function in a forked process, and exit with the returned status."""
    status = 1
    try:
        status = function() or 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with contextlib.suppress(Exception):  # user code may have closed it, or set it to None
            sys.stderr.flush()
        os._exit(status)


def receive_descriptors(
    connection: socket.socket, max_bytes: int, max_descriptors: int
) -> tuple[bytes, list[int]]:
    """Receive a packet and the file descriptors sent with it, which are closed on exec."""
    numbers = array.array("i")
    space = socket.CMSG_LEN(max_descriptors * numbers.itemsize)
    # `socket.recv_fds` ignores its flags.
    data, ancillary, _, _ = connection.recvmsg(max_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return data, list(numbers)


def start_thread(function: Callable[..., object], *args: Any) -> int:
    """Run a function in a daemon thread; return its identity, or 0 at the limit of processes and
    threads.

    This bypasses `threading`: user code may have replaced its Thread, and its hooks
    (``threading.settrace``, ``setprofile``) run in every new thread before the function, and may
    raise.
    """
    try:
        return _thread.start_new_thread(function, args)
    except RuntimeError:
        return 0
