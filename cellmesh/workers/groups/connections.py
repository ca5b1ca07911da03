"""Ends the collectives of this process whose peers will not join, by cutting connections.

``ProcessGroupGloo.abort()`` ends no wait in torch 2.13. What ends all is a receive that runs into
its time-out: gloo then closes all connections of the group and fails all operations on it, but
for one: an operation that is in the middle of sending waits on without end, there and, as its
connection is reset, at the other end. Therefore (`cut_gloo`)

- a group is cut when no data is in flight; data in flight arrives soon, as gloo reads all of it,
  whether an operation waits for it or not;
- the group's connections stay open for a while, and are read, so that peers who send get no error.

Connections of a group are those that appeared while the group was made. NCCL's communicators are
aborted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import c10d_logger

from ...stdlib import os, select, socket, threading, time
from ..linux_process import start_thread
from ..static_lookup import args_of

# A descriptor and the inode behind it: the number alone may be in use again.
Sockets = Mapping[int, int]

_TCP_ESTABLISHED = 1
_LISTENS = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
# In the kernel's struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received.
_TCP_INFO_BYTES, _TCP_COUNTERS = 136, slice(120, 136)
# How long nothing must have moved on connections: with nothing left to send, and with something.
_QUIET_S, _STALLED_S = 0.05, 0.5
_LONGEST_S, _LOOK_S = 3.0, 0.005
_HOLD_S, _DRAIN_STEP_S = 5.0, 0.002
_AT_ONCE = timedelta(milliseconds=1)
_NO_TAG = 2**31 - 7  # no sender uses it
# Texts of gloo and NCCL when a connection ends under an operation, and of our store when a wait is
# cut; the barrier is that before each operation with TORCH_DISTRIBUTED_DEBUG=DETAIL, of which none
# has waited for months.
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|not connected|Socket closed|pair closure|"
    r"communicator was aborted|failed to pass monitoredBarrier in \d{11,} ms|"
    r"wait for keys: .* was ended"  # by `Waits.end`
)
# How long a rank that has lost a connection waits for an interrupt or a release: after a death, the
# controller sends the release when the settle time is over. No message follows where a peer has
# closed the connection because its own time-out for the group was over.
_AWAIT_STOP_S = 3.0
_STOP_LOOK_S = 0.02


def open_sockets() -> dict[int, int]:
    """Return the TCP sockets of this process: descriptor -> inode."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                descriptor = int(entry)
                with socket.socket(fileno=os.dup(descriptor)) as candidate:
                    if candidate.family in (socket.AF_INET, socket.AF_INET6):
                        found[descriptor] = os.fstat(descriptor).st_ino
        except OSError:
            continue
    return found


def new_sockets(before: Sockets) -> dict[int, int]:
    """Return the TCP sockets of this process that were opened after `before` was recorded."""
    return {fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode}


def connected(sockets: Sockets) -> dict[int, int]:
    """Return those of these sockets that are connected or connecting, without listening ones."""
    return {fd: inode for fd, inode in sockets.items() if _is_connected(fd, inode)}


def shut_down(sockets: Sockets) -> int:
    """Shut these sockets' connections down, so that operations raise; return their number."""
    return _on_each(sockets, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def cut_gloo(groups: Iterable[Any], sockets: Sockets, kept: KeptConnections) -> int:
    """Close the connections of some ``ProcessGroupGloo``, so that operations raise; return how many
    there were.
    """
    # Without a descriptor left for the duplicate, peers that send meet an error.
    num_cut = _on_each(sockets, lambda connection: kept.keep(os.dup(connection.fileno())))
    if num_cut:
        _time_out(groups)
    return num_cut


def _on_each(sockets: Sockets, act: Callable[[socket.socket], object]) -> int:
    """Do something with each of these sockets that does not listen; return their number."""
    num_found = 0
    for descriptor, inode in sockets.items():
        with _opened(descriptor, inode) as connection:
            if connection is not None and not connection.getsockopt(*_LISTENS):
                num_found += 1
                with contextlib.suppress(OSError):  # not connected yet, or not any more
                    act(connection)
    return num_found


def await_quiet(sockets: Sockets) -> None:
    """Wait, for a short time, until these connections have no data in flight."""
    start = last_change = time.monotonic()
    before: list[tuple[int, bytes]] = []
    while (now := time.monotonic()) - start < _LONGEST_S:
        traffic = [_traffic(fd) for fd, inode in sockets.items() if _is_connected(fd, inode)]
        if traffic != before:
            before, last_change = traffic, now
        is_sent = not any(unsent for unsent, _ in traffic)
        if now - last_change > (_QUIET_S if is_sent else _STALLED_S):
            return
        time.sleep(_LOOK_S)


def _traffic(descriptor: int) -> tuple[int, bytes]:
    """Return a connection's number of unsent bytes, and its counters of sent and received bytes."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        unsent = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
        return unsent, info[_TCP_COUNTERS]
    return 0, b""


def _time_out(groups: Iterable[Any]) -> None:
    """Let a receive of gloo time out: gloo then closes all connections and fails all operations."""
    nothing = torch.zeros(1, device="cpu")  # whatever the default device is
    for group in groups:
        for peer in set(range(group.size())) - {group.rank()}:
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, _NO_TAG).wait(_AT_ONCE)


class KeptConnections:
    """Connections that gloo has closed and that are kept open, and read until the peers close them
    too, as unread data would reset them.

    Its thread is there from the beginning: when it is needed there may be none left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[int, float] = {}  # -> until when
        self._holds = threading.Event()
        start_thread(self._serve)

    def __len__(self) -> int:
        return len(self._descriptors)

    def keep(self, descriptor: int) -> None:
        """Take over an open connection, and keep it for `_HOLD_S` or until `let_go`."""
        with self._lock:
            self._descriptors[descriptor] = time.monotonic() + _HOLD_S
            self._holds.set()

    def let_go(self) -> None:
        """Close all kept connections, because their peers have closed them."""
        with self._lock:
            self._close(list(self._descriptors))

    def _serve(self) -> None:
        while True:
            self._holds.wait()
            with self._lock:
                now = time.monotonic()
                self._close([one for one, until in self._descriptors.items() if until < now])
                if not self._descriptors:
                    self._holds.clear()
                    continue
                poll = select.poll()
                for descriptor in self._descriptors:
                    poll.register(descriptor, select.POLLIN)
                for descriptor, _ in poll.poll(0):
                    self._read(descriptor)
            time.sleep(_DRAIN_STEP_S)

    def _read(self, descriptor: int) -> None:
        connection = socket.socket(fileno=descriptor)
        try:
            while connection.recv(1 << 20, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        finally:
            connection.detach()
        self._close([descriptor])  # the other side has ended it

    def _close(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            del self._descriptors[descriptor]
            os.close(descriptor)


def all_stand(sockets: Sockets) -> bool:
    """Return whether the connections of all these sockets are still open on both sides."""
    return all(_is_connected(fd, inode) for fd, inode in sockets.items())


def abort_nccl(group: Any) -> bool:
    """Abort a ``ProcessGroup``'s NCCL communicators and operations; return whether it had any."""
    backends = [one for one in backends_of(group) if name_of_backend(one) == "nccl"]
    for backend in backends:
        backend.abort()
    return bool(backends)


def backends_of(group: Any) -> list[Any]:
    """Return the backends of a ``ProcessGroup``, each once; none of a class that a program has
    derived from ``ProcessGroup``.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch wraps each backend in another one.
    """
    found = [group._get_backend(device) for device in group._device_types]
    unwrapped = [getattr(one, "wrapped_pg", one) for one in found]
    return list({id(one): one for one in unwrapped}.values())


def name_of_backend(backend: Any) -> str:
    """Return the name of a backend, its class's if it has none."""
    try:
        return str(backend.name())
    except Exception:  # C++ has one for torch's own, and raises for others
        return type(backend).__name__


def prepare_nccl(environment: MutableMapping[str, str], device: torch.device) -> None:
    """Set in ``os.environ``, before the first group is made, what NCCL needs so that an abort ends
    an operation and not the process.

    Its watchdog ends the process when an operation fails (mode 3 and 1), or when it has not been
    heard of for some minutes, as while a user sits in a debugger. What the user has set stays.
    """
    if device.type == "cuda":
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        environment.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        environment.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


@contextlib.contextmanager
def _opened(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield a socket object for a descriptor, on a duplicate if possible; None if the descriptor
    is closed or belongs to another inode now.
    """
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise OSError
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            connection = socket.socket(fileno=descriptor)  # there is none left for a second one
    except OSError:
        yield None
        return
    try:
        yield connection if os.fstat(connection.fileno()).st_ino == inode else None
    finally:
        if connection.fileno() == descriptor:
            connection.detach()
        connection.close()


def _is_connected(descriptor: int, inode: int) -> bool:
    with _opened(descriptor, inode) as connection:
        if connection is None:
            return False
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED


def lost_its_peers(error: BaseException) -> bool:
    """Return whether a torch operation failed only because a connection was closed."""
    if not issubclass(type(error), RuntimeError):
        return False
    # Not by its own `__str__`, which may do anything.
    texts = [part for part in args_of(error) if type(part) is str]
    return _LOST.search(" ".join(texts)) is not None


def raise_as_stops(kind: Callable[[], type[KeyboardInterrupt] | None]) -> None:
    """Patch torch so that a collective that fails on the main thread by a closed connection
    raises the interrupt or release that `kind` returns, if there is one.

    gloo and NCCL raise a RuntimeError then, which ``except Exception`` in a training loop would
    take for an error of the step. torch passes every error of a collective for which Python waits
    through one function, to log it: there it is exchanged. Where C++ waits (DDP's backward pass,
    ``wait()`` of an asynchronous operation), the rank's executor reports it as what it was.
    """
    describe = c10d_logger._get_msg_dict

    def describe_or_stop(*args: Any, **kwargs: Any) -> dict[str, Any]:
        error = sys.exc_info()[1]
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and error is not None and lost_its_peers(error):
            deadline = time.monotonic() + _AWAIT_STOP_S
            while (stop := kind()) is None and time.monotonic() < deadline:
                # Others may have cut the connection before this rank's message arrives.
                time.sleep(_STOP_LOOK_S)
            if stop is not None:
                raise stop() from error
        return describe(*args, **kwargs)

    c10d_logger._get_msg_dict = describe_or_stop
