"""Clients of c10d stores that reconnect, and whose waits signals and other threads can end.

torch's ``TCPStore`` blocks in C++ until its time-out, whatever signals arrive or other threads do.
Here Python polls the store in short steps, so that a signal ends the wait of the main thread, and
`Waits.end` ends all waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError

from ...stdlib import os, socket, threading
from ..linux_process import renew_resolver
from .waits import Waits

_CONNECT_S = 10.0
# Time-out of waits without one of their own. A rank may be late by any time, as while its user sits
# in a debugger, and signals and `Waits.end` end the wait.
_DEFAULT_TIMEOUT = timedelta(days=365)
_WORKERS = "init/"  # torch's key of the number of connected clients


def _forwarded(method: str) -> Any:
    """Return a method for `InterruptibleStore` that only forwards to the inner store."""
    return lambda self, *args: self._ask(lambda client: getattr(client, method)(*args))


class InterruptibleStore(Store):
    """A c10d store that forwards to another store, and whose waits signals and `Waits.end` can end.

    Keep a Python reference for as long as a process group uses it: references of C++ do not keep
    the Python object alive.
    """

    def __init__(self, store: Any, waits: Waits) -> None:
        super().__init__()
        self._inner, self.waits = store, waits
        self._timeout = _DEFAULT_TIMEOUT
        self._noted: list[str] | None = None  # keys set since `note_keys`

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        return question(self._inner)

    def note_keys(self) -> None:
        """Record the keys that this process sets from now on."""
        self._noted = []

    def forget_keys(self) -> None:
        """Delete the recorded keys, which no rank needs any more; stop recording."""
        noted, self._noted = self._noted or (), None
        for key in noted:
            self.delete_key(key)

    # The interface of torch's Store, which C++ calls, too.

    def set(self, key: str, value: str | bytes) -> None:
        if self._noted is not None:
            self._noted.append(key)
        self._ask(lambda client: client.set(key, value))

    def get(self, key: str) -> bytes:
        self.wait([key], self._timeout)
        return bytes(self._ask(lambda client: client.get(key)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s, awaited = (timeout or self._timeout).total_seconds(), keys

        def are_there() -> bool:
            # Look for one missing key until it is there: hundreds of ranks that each look for the
            # keys of all others would slow each other.
            nonlocal awaited
            while self.check(awaited):
                if len(awaited) == len(keys):
                    return True
                awaited = keys
            while len(awaited) > 1:
                half = awaited[: len(awaited) // 2]
                awaited = awaited[len(half) :] if self.check(half) else half
            return False

        self.waits.until(are_there, limit_s, f"keys: {', '.join(keys)}")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys, self._timeout)
        return list(self._ask(lambda client: client.multi_get(keys)))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        if self._noted is not None:
            self._noted += keys
        self._ask(lambda client: client.multi_set(keys, values))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if block:
            self.wait([key], self._timeout)
        return bytes(self._ask(lambda client: client.queue_pop(key, False)))

    add, check, append = _forwarded("add"), _forwarded("check"), _forwarded("append")
    compare_set, list_keys = _forwarded("compare_set"), _forwarded("list_keys")
    queue_push, queue_len = _forwarded("queue_push"), _forwarded("queue_len")
    has_extended_api = _forwarded("has_extended_api")
    delete_key, num_keys = _forwarded("delete_key"), _forwarded("num_keys")
    deleteKey, getNumKeys = delete_key, num_keys  # the names that C++ calls

    def clone(self) -> InterruptibleStore:
        # torch clones a store for concurrent waits; here a wait does not block the store.
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


class MeshStore(InterruptibleStore):
    """A client of the mesh's c10d store or another ``TCPStore``; any thread may use it."""

    def __init__(self, host: str, port: int, waits: Waits | None = None) -> None:
        super().__init__(None, waits or Waits())
        self.host, self.port = host, port
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Connect to the store now, if there is no connection yet."""
        with self._lock:
            if self._inner is None:
                self._inner = self._connect()

    def move(self, port: int, host: str = "") -> None:
        """Use the new, empty store process that listens on `port`, on another host if one is
        given.
        """
        with self._lock:
            self.host, self.port = host or self.host, port
            self._inner = None

    def has_extended_api(self) -> bool:
        return True

    def gather(self, key: str, number: int) -> None:
        """Wait until `number` ranks have called this method with this key, or the store is lost;
        nothing else ends the wait.

        The store wakes the ranks. If each polled it, they would slow the start of the last ones.
        """
        with contextlib.suppress(DistNetworkError):
            if self.add(key, 1) == number:
                self.set(f"{key}/all", b"")
            self._ask(lambda client: client.wait([f"{key}/all"], _DEFAULT_TIMEOUT))

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Send the store a request, over a new connection if the old one was lost."""
        with self._lock:
            if self._inner is not None:
                try:
                    return question(self._inner)
                except DistNetworkError:
                    self._inner = None
            self._inner = self._connect()
            return question(self._inner)

    def _connect(self) -> TCPStore:
        try:  # torch's client would try for long, and write a stack trace each time
            # Not `socket.create_connection`, as the function that it calls may be patched.
            with socket.socket() as connection:
                connection.settimeout(_CONNECT_S)
                connection.connect((self.host, self.port))
        except OSError as error:
            raise DistNetworkError(
                f"the c10d store at {self.host}:{self.port} cannot be reached: {error}"
            ) from error
        with _no_name_lookups():
            return TCPStore(
                self.host, self.port, None, is_master=False, timeout=timedelta(seconds=_CONNECT_S)
            )


class ProgramsTCPStore(TCPStore):
    """Replaces ``dist.TCPStore`` for user programs on a rank; signals and `Waits.end` can end its
    waits.
    """

    waits: Waits  # the waits of the rank

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        limit_s, place = timeout.total_seconds(), f"a TCPStore at {host_name}:{port}"
        if not is_master:
            self.waits.until(lambda: _is_served(host_name, port), limit_s, place)
        super().__init__(host_name, port, world_size, is_master, timeout, False, *args, **kwargs)
        if wait_for_workers and world_size:
            self.add(_WORKERS, 1)
            if is_master:
                self.waits.until(
                    lambda: self.add(_WORKERS, 0) >= world_size, limit_s, f"clients of {place}"
                )

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        self.waits.until(
            lambda: self.check(keys), limit.total_seconds(), f"keys: {', '.join(keys)}"
        )


def _is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _no_name_lookups() -> Iterator[None]:
    """Enter a context in which host name lookups on this thread fail at once.

    When torch connects, it looks up the name of ``::ffff:127.0.0.1`` for its log, which no hosts
    file contains: a DNS query by each rank. Sixty-four at once lose packets and wait 5 s for them;
    without an answering server, eight do.
    """
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = "attempts:0"
    renew_resolver()
    try:
        yield
    finally:
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before
        renew_resolver()
