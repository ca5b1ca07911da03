"""What supervising Linux processes needs and Python does not wrap: prctl, facts from /proc, and
threads that start whatever user code has patched.
"""

from __future__ import annotations

import _thread
import array
import contextlib
import ctypes
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..stdlib import open, os, time
from ..wire.host import process_stat

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # in the flags that /proc/PID/stat shows
_libc = ctypes.CDLL(None, use_errno=True)

# What user code finds in `sys.argv`, as torchrun gives a script its name.
PROGRAM = "cell"
# Where the c10d store listens: all processes of a mesh are on one host.
LOOPBACK = "127.0.0.1"


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Make orphaned descendants this process's children (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name of this process that ``ps`` and ``top`` show; the kernel cuts it to 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def name_command(text: str) -> None:
    """Have ``/proc/PID/cmdline`` show a text in place of the command of this process's parent."""
    fields = process_stat("self")
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5))
    if begin < end:
        # A last byte that is not NUL has the kernel read no further than to the first NUL.
        ctypes.memmove(
            begin,
            os.fsencode(text)[: end - begin - 2].ljust(end - begin - 1, b"\0") + b" ",
            end - begin,
        )


def name_arguments(arguments: Sequence[str]) -> None:
    """Replace the arguments that ``/proc/PID/cmdline`` shows of this process, if they fit there."""
    fields = process_stat("self")
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end (proc(5))
    data = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    if len(data) <= end - begin:
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def die_with(parent_pid: int, patience_s: float = 60.0) -> None:
    """Have this process killed when `parent_pid` ends; ProcessLookupError if that has ended.

    The caller was forked twice: it waits until the middle process has gone and `parent_pid`, a
    subreaper, is its parent; only then does PR_SET_PDEATHSIG speak of the right process.
    """
    deadline = time.monotonic() + patience_s
    while os.getppid() != parent_pid:
        if time.monotonic() > deadline:
            raise ProcessLookupError(f"process {parent_pid} is not the parent")
        time.sleep(0.001)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went in between
        raise ProcessLookupError(f"process {parent_pid} ended")


def live_on() -> None:
    """Undo `die_with`: this process outlives its parent."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def write_stderr(text: str) -> None:
    """Write text to descriptor 2; on a rank, the agent reads it and shows the rank's number."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(2, data) :]


def flush_c_stdio() -> None:
    """Write out what C code has printed and libc still buffers."""
    _libc.fflush(None)


def renew_resolver() -> None:
    """Have libc read its name resolver's options (RES_OPTIONS) again, for this thread."""
    _libc.__res_init()


def describe_end(wait_status: int) -> str:
    """Describe how a process ended, from `os.waitpid`'s status."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def main_thread_sleeps() -> bool:
    """Return whether this process's main thread waits in the kernel; True if that is unknown."""
    try:
        return process_stat(f"self/task/{os.getpid()}")[0] in (b"S", b"D")
    except OSError:
        return True


def is_ending(pid: int) -> bool:
    """Return whether a process has begun to end, before it closes descriptors, or is gone."""
    fields = process_stat(pid)
    return not fields or bool(int(fields[6]) & _PF_EXITING)


def signal_own_group(number: int) -> None:
    """Signal this process and all others in its process group."""
    try:
        os.killpg(os.getpgrp(), number)
    except ProcessLookupError:
        return


def ignore_from_any_thread(number: int) -> None:
    """Ignore a signal; Python's own function for this works on the main thread only."""
    _libc.signal(number, ctypes.c_void_p(int(signal.SIG_IGN)))


def read_limits(pid: int) -> str:
    """Return the text of ``/proc/PID/limits``; "" if the process is gone."""
    try:
        with open(f"/proc/{pid}/limits") as file:
            return file.read()
    except OSError:
        return ""


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := process_stat(entry)):
            yield int(entry), int(fields[1])


def children(pid: int) -> list[int]:
    """Return the processes whose parent `pid` is, zombies included."""
    return [child for child, parent in _parents() if parent == pid]


def reap_children_except(ours: Collection[int]) -> None:
    """Reap ended children of this process, but for those that other code waits for."""
    for pid in children(os.getpid()):
        if pid not in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return the processes below `pid`, parents first, without `spared` ones and those below."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        below = [child for child in children.get(todo.pop(), []) if child not in spared]
        found += below
        todo += below
    return found


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill and reap every process below this one, but for those `spared` and what is below them."""
    for _ in range(50):  # what is killed may have forked in between
        below = descendants(os.getpid(), spared)
        if not below:
            break
        kill(below)
        for pid in below:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:  # a grandchild; it becomes ours in the next round
                time.sleep(0.001)


def kill(pids: Iterable[int], signal_number: int = signal.SIGKILL) -> None:
    """Send processes a signal; those already gone are passed over."""
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue


def allow_many_descriptors() -> None:
    """Raise the soft limit of descriptors to the hard one: 1024 are too few for 160 ranks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_threads_for(num_local_ranks: int, environment: Mapping[str, str]) -> int:
    """Return a rank's OMP_NUM_THREADS: the user's, else one, or all cores for a rank alone."""
    told = environment.get("OMP_NUM_THREADS", "")
    default = 1 if num_local_ranks > 1 else len(os.sched_getaffinity(0))
    return int(told) if told.isdecimal() else default


def run_and_exit(function: Callable[[], int | None]) -> NoReturn:
    """Run a function in a process that was forked, and end the process with the returned status."""
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
    """Receive a packet and its descriptors, which programs started later do not inherit."""
    numbers = array.array("i")
    space = socket.CMSG_LEN(max_descriptors * numbers.itemsize)
    # `socket.recv_fds` passes over the flag that it is given.
    data, ancillary, _, _ = connection.recvmsg(max_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    return data, list(numbers)


def start_thread(function: Callable[..., object], *args: Any) -> int:
    """Run a function in a daemon thread; return its identity, 0 at the limit of processes and
    threads.

    Below `threading`, whose Thread user code may have replaced, and whose hooks
    (``threading.settrace``, ``setprofile``) run in every new thread before its function and may
    raise there.
    """
    try:
        return _thread.start_new_thread(function, args)
    except RuntimeError:
        return 0
