"""Closes connections of process groups, so that a collective raises if it waits for ranks that will
not take part.

``ProcessGroupGloo.abort()`` ends no wait in torch 2.13. But when a receive times out, gloo closes
all connections of the group and fails all operations on it, with one exception: an operation that
is in the middle of sending waits forever, as does, since its connection is reset, its receiver.
Therefore (`cut_gloo`)

- a group is cut when no data is in flight; data in flight arrives soon, as gloo reads all of it,
  whether an operation waits for it or not;
- the group's connections stay open, and are read, until all ranks have cut theirs: the operation of
  a peer that writes to a closed connection waits forever, too.

Connections of a group are those that appeared while the group was made. NCCL's communicators are
aborted.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import c10d_logger

from ...stdlib import os, select, socket, threading, time
from ..linux_process import num_unsent, start_thread
from ..static_lookup import args_of

# Descriptor -> inode; the inode shows whether the descriptor has been reused.
Sockets = Mapping[int, int]

_TCP_ESTABLISHED = 1
_LISTENS = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
# In the kernel's struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received.
_TCP_INFO_BYTES, _TCP_COUNTERS = 136, slice(120, 136)
# How long connections must be quiet: without unsent bytes, and with some.
_QUIET_S, _STALLED_S = 0.05, 0.5
_LONGEST_S, _LOOK_S = 3.0, 0.005
# How long a cut connection is kept if its peer does not close it, and how often that is looked for;
# a peer may be out of reach for some time, and write again then.
_HOLD_S, _DRAIN_STEP_S = 600.0, 0.05
_AT_ONCE = timedelta(milliseconds=1)
_NO_TAG = 2**31 - 7  # a tag that no sender uses
# Texts of gloo and NCCL when a connection ends during an operation, and of the mesh's store when a
# wait is ended. The monitored barrier precedes each operation under TORCH_DISTRIBUTED_DEBUG=DETAIL;
# no barrier has waited for the months that the text claims.
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|not connected|Socket closed|pair closure|"
    r"communicator was aborted|failed to pass monitoredBarrier in \d{11,} ms|"
    r"wait for keys: .* was ended"  # raised after `Waits.end`
)
# How long a rank that has lost a connection waits for an interrupt or a release: after a death, the
# controller sends the release when the settle time is over. It sends none if a peer has closed the
# connection because of the peer's own time-out.
_AWAIT_STOP_S = 3.0
_STOP_LOOK_S = 0.02


def open_sockets() -> dict[int, int]:
    """Return the sockets of this process: descriptor -> inode."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{entry}").partition(":")
            if kind == "socket":
                found[int(entry)] = int(inode[1:-1])
    return found


def new_sockets(before: Sockets) -> dict[int, int]:
    """Return the sockets of this process that were opened after `before` was recorded; duplicates
    of earlier ones, which another thread may keep in between, do not count.
    """
    earlier = {*before.values()}
    return {fd: inode for fd, inode in open_sockets().items() if inode not in earlier}


def connected(sockets: Sockets) -> dict[int, int]:
    """Return those of the given sockets that are connected TCP sockets."""
    return {fd: inode for fd, inode in sockets.items() if _is_connected(fd, inode)}


def shut_down(sockets: Sockets) -> int:
    """Shut down the connections of the given sockets, so that operations that use them raise;
    return the number of connections.
    """
    return _on_each(sockets, lambda connection: connection.shutdown(socket.SHUT_RDWR))


def cut_gloo(groups: Iterable[Any], sockets: Sockets, kept: KeptConnections) -> int:
    """Close the connections of ``ProcessGroupGloo`` objects, so that operations on them raise;
    return the number of connections.
    """
    # If no descriptor is left for the duplicate, peers that send get an error.
    num_cut = _on_each(sockets, lambda connection: kept.keep(os.dup(connection.fileno())))
    if num_cut:
        _time_out(groups)
    return num_cut


def _on_each(sockets: Sockets, act: Callable[[socket.socket], object]) -> int:
    """Call `act` with each of the given sockets that is open, of TCP, and does not listen; return
    the number of these sockets.
    """
    num_found = 0
    for descriptor, inode in sockets.items():
        with _opened(descriptor, inode) as connection:
            if connection is None or connection.proto != socket.IPPROTO_TCP:
                continue
            if not connection.getsockopt(*_LISTENS):
                num_found += 1
                with contextlib.suppress(OSError):  # not connected yet, or no longer
                    act(connection)
    return num_found


def await_quiet(sockets: Sockets) -> None:
    """Wait until no data is in flight on the given connections, for `_LONGEST_S` at most."""
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
    """Return a connection's number of unsent bytes, and its raw counters of traffic in bytes."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return num_unsent(connection.fileno()), info[_TCP_COUNTERS]
    return 0, b""


def _time_out(groups: Iterable[Any]) -> None:
    """Begin a gloo receive that times out at once, so that gloo closes all connections of the given
    groups and fails all operations on them.
    """
    nothing = torch.zeros(1, device="cpu")  # whatever the default device
    for group in groups:
        for peer in set(range(group.size())) - {group.rank()}:
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, _NO_TAG).wait(_AT_ONCE)


class KeptConnections:
    """Keeps duplicates of connections that gloo has closed, and reads them until the peers close
    theirs: closing a connection with unread data would reset it.

    Its thread starts at once, as there may be no thread left when one is needed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[int, float] = {}  # descriptor -> time at which to close it
        self._holds = threading.Event()
        start_thread(self._serve)

    def __len__(self) -> int:
        return len(self._descriptors)

    def keep(self, descriptor: int) -> None:
        """Take over a connection's descriptor; close it after `_HOLD_S`, upon `let_go`, or once the
        peer has closed the connection.
        """
        with self._lock:
            self._descriptors[descriptor] = time.monotonic() + _HOLD_S
            self._holds.set()

    def let_go(self) -> None:
        """Close all kept connections; called once the peers have closed theirs."""
        with self._lock:
            self._close(list(self._descriptors))

    def _serve(self) -> None:
        while True:
            self._holds.wait()
            poll = select.poll()
            with self._lock:
                now = time.monotonic()
                self._close([one for one, until in self._descriptors.items() if until < now])
                if not self._descriptors:
                    self._holds.clear()
                for descriptor in self._descriptors:
                    poll.register(descriptor, select.POLLIN)
            ready = poll.poll(1000 * _DRAIN_STEP_S)
            with self._lock:
                for descriptor, _ in ready:
                    if descriptor in self._descriptors:
                        self._read(descriptor)

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
        self._close([descriptor])  # the peer has closed it

    def _close(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            del self._descriptors[descriptor]
            os.close(descriptor)


def all_stand(sockets: Sockets) -> bool:
    """Return whether the connections of all these sockets are still open at both ends."""
    return all(_is_connected(fd, inode) for fd, inode in sockets.items())


def abort_nccl(group: Any) -> bool:
    """Abort a ``ProcessGroup``'s NCCL communicators and operations; return whether the group uses
    NCCL.
    """
    backends = [one for one in backends_of(group) if name_of_backend(one) == "nccl"]
    for backend in backends:
        backend.abort()
    return bool(backends)


def backends_of(group: Any) -> list[Any]:
    """Return the distinct backends of a ``ProcessGroup``; an empty list for a Python subclass that
    a user's program defines.

    With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch wraps each backend; the wrapped ones are returned.
    """
    found = [group._get_backend(device) for device in group._device_types]
    unwrapped = [getattr(one, "wrapped_pg", one) for one in found]
    return list({id(one): one for one in unwrapped}.values())


def name_of_backend(backend: Any) -> str:
    """Return the name of a backend; the name of its class if it has none."""
    try:
        return str(backend.name())
    except Exception:  # the C++ method knows only torch's own backends
        return type(backend).__name__


def prepare_nccl(environment: MutableMapping[str, str], device: torch.device) -> None:
    """Set NCCL's environment variables, before the first group is made, so that an abort ends the
    operation and not the process.

    NCCL's watchdog ends the process when an operation fails (modes 1 and 3), or when the process
    has not reported for some minutes, as while a user sits in a debugger. Variables that the user
    has set are kept.
    """
    if device.type == "cuda":
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        environment.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        environment.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


@contextlib.contextmanager
def _opened(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield a socket object for a descriptor, on a duplicate if possible; None if the descriptor is
    closed or belongs to another inode now.
    """
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise OSError
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            connection = socket.socket(fileno=descriptor)  # no descriptor is left for a duplicate
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
        if connection is None or connection.proto != socket.IPPROTO_TCP:
            return False
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED


def lost_its_peers(error: BaseException) -> bool:
    """Return whether an error says that a torch operation failed only because a connection was
    closed.
    """
    if not issubclass(type(error), RuntimeError):
        return False
    # Not by the error's `__str__`, which may run user code.
    texts = [part for part in args_of(error) if type(part) is str]
    return _LOST.search(" ".join(texts)) is not None


def raise_as_stops(
    kind: Callable[[], type[KeyboardInterrupt] | None], note_wait: Callable[[bool], None]
) -> None:
    """Patch torch so that a collective that fails on the main thread because a connection was
    closed raises the kind of KeyboardInterrupt that `kind` returns, unless that is None.
    `note_wait` is called as it begins to wait for that, and as it stops.

    gloo and NCCL raise a RuntimeError, which ``except Exception`` in a training loop would take for
    an error of the step. When Python waits for a collective, torch passes each error through one
    function that logs it, and the patch replaces the error there. When C++ waits (DDP's backward
    pass, ``wait()`` of an asynchronous operation), the rank's executor reports the interrupt or
    release.
    """
    describe = c10d_logger._get_msg_dict

    def describe_or_stop(*args: Any, **kwargs: Any) -> dict[str, Any]:
        error = sys.exc_info()[1]
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and error is not None and lost_its_peers(error):
            deadline = time.monotonic() + _AWAIT_STOP_S
            note_wait(True)
            try:
                while (stop := kind()) is None and time.monotonic() < deadline:
                    # Other ranks may cut the connection before this rank receives the message.
                    time.sleep(_STOP_LOOK_S)
            finally:
                note_wait(False)
            if stop is not None:
                raise stop() from error
        return describe(*args, **kwargs)

    c10d_logger._get_msg_dict = describe_or_stop
