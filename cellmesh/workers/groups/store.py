"""Clients of c10d stores whose waits can be ended, and which reconnect.

torch's ``TCPStore`` blocks in C++ until its time-out, deaf to signals and to other threads. Here
every wait asks again in short steps, from Python; so a signal gets the main thread out, and
`StoreWaits.cut` all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from ...stdlib import os, socket, threading, time
from ..linux_process import renew_resolver

_CONNECT_S = 10.0
# Time-out of waits for which the caller names none.
_DEFAULT_TIMEOUT = timedelta(minutes=30)
# One question costs 20 us there and back; the first waits are short, as peers usually call at once.
_WORKERS = "init/"  # torch's key for how many have connected
_FIRST_STEP_S, _LONGEST_STEP_S = 0.0005, 0.02


class StoreWaits:
    """The waits of this process for keys of its c10d stores; any thread may end them."""

    def __init__(self) -> None:
        self._num_cuts = 0
        self._num_waiting = 0
        self._stopped_threads: set[int] = set()

    def cut(self) -> int:
        """End every current wait with an error; return how many there were."""
        self._num_cuts += 1
        return self._num_waiting

    def stop_thread(self, ident: int) -> None:
        """End the current and future waits of one thread."""
        self._stopped_threads.add(ident)

    def forget_thread(self, ident: int) -> None:
        """Forget a thread that has ended, as its identity may be used again."""
        self._stopped_threads.discard(ident)

    def until(self, is_over: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll until a condition holds; raise DistStoreError at the limit, or upon `cut`."""
        num_cuts, deadline, step_s = self._num_cuts, time.monotonic() + limit_s, _FIRST_STEP_S
        ident = threading.get_ident()
        self._num_waiting += 1
        try:
            while not is_over():
                if self._num_cuts != num_cuts or ident in self._stopped_threads:
                    raise DistStoreError(f"the wait for {what} was ended")
                if time.monotonic() > deadline:
                    raise DistStoreError(f"wait timeout after {limit_s:g} s, {what}")
                time.sleep(step_s)
                step_s = min(1.5 * step_s, _LONGEST_STEP_S)
        finally:
            self._num_waiting -= 1


def _forwarded(method: str) -> Any:
    """Return a method for `InterruptibleStore` that only forwards to the store inside."""
    return lambda self, *args: self._ask(lambda client: getattr(client, method)(*args))


class InterruptibleStore(Store):
    """A c10d store that forwards to another one, with waits that `waits` can end.

    Keep a reference for as long as a process group uses it: what C++ holds of it does not count for
    Python.
    """

    def __init__(self, store: Any, waits: StoreWaits) -> None:
        super().__init__()
        self._inner, self.waits = store, waits
        self._timeout = _DEFAULT_TIMEOUT
        self._noted: list[str] | None = None

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        return question(self._inner)

    def note_keys(self, keys: list[str] | None) -> None:
        """Append the keys that this process sets from now on to `keys`."""
        self._noted = keys

    def forget_keys(self, keys: Iterable[str]) -> None:
        """Delete keys from the store that no rank needs any more."""
        for key in keys:
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
        limit_s = (timeout or self._timeout).total_seconds()
        self.waits.until(lambda: self.check(keys), limit_s, f"keys: {', '.join(keys)}")

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
    deleteKey, getNumKeys = delete_key, num_keys  # as C++ calls them

    def clone(self) -> InterruptibleStore:
        # A copy is for callers that another's wait must not delay; no wait holds this one.
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout


class MeshStore(InterruptibleStore):
    """A client of the mesh's c10d store or another ``TCPStore``'s; any thread may use it."""

    def __init__(self, host: str, port: int, waits: StoreWaits | None = None) -> None:
        super().__init__(None, waits or StoreWaits())
        self._host, self._port = host, port
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
            self._host, self._port = host or self._host, port
            self._inner = None

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Send the store a request, over a new connection if the old one is gone."""
        with self._lock:
            if self._inner is not None:
                try:
                    return question(self._inner)
                except DistNetworkError:
                    self._inner = None
            self._inner = self._connect()
            return question(self._inner)

    def _connect(self) -> TCPStore:
        try:  # torch's client would try for long, and write a stack a time
            # What `socket.create_connection` calls may be patched.
            with socket.socket() as connection:
                connection.settimeout(_CONNECT_S)
                connection.connect((self._host, self._port))
        except OSError as error:
            raise DistNetworkError(
                f"the c10d store at {self._host}:{self._port} cannot be reached: {error}"
            ) from error
        with _no_name_lookups():
            return TCPStore(
                self._host, self._port, None, is_master=False, timeout=timedelta(seconds=_CONNECT_S)
            )


class ProgramsTCPStore(TCPStore):
    """``dist.TCPStore`` for programs on a rank: its waits can be ended."""

    waits: StoreWaits  # the rank's

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

    When it connects, torch looks up the name of ``::ffff:127.0.0.1`` for its log, which no hosts
    file has: a DNS query for each rank. Sixty-four at once lose packets and wait 5 s for them;
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
