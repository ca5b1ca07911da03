"""The mesh's c10d store as a rank uses it: waits that can be ended, and a connection that is made again.

torch's ``TCPStore`` blocks in C++ until its time-out, deaf to signals and to other threads. Here every wait
asks again in short steps, from Python; so a signal gets the main thread out, and `MeshStore.cut` all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from ..processes import renew_resolver

_CONNECT_S = 10.0
# Time-out of waits for which the caller names none.
_DEFAULT_TIMEOUT = timedelta(minutes=30)
# One question costs 20 us there and back; the first waits are short, as peers usually come at once.
_FIRST_STEP_S, _LONGEST_STEP_S = 0.0005, 0.02


class MeshStore(Store):
    """A client of the mesh's store; any thread may use it.

    Keep a reference for as long as a process group uses it: what C++ holds of it does not count for Python.

    Args:
        host: where the store's process listens.
        port: its port.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._client: TCPStore | None = None
        self._timeout = _DEFAULT_TIMEOUT
        self._num_cuts = 0
        self._num_waiting = 0
        self._stopped_threads: set[int] = set()
        self._noted: list[str] | None = None

    def connect(self) -> None:
        """Connect now, if it is not yet."""
        with self._lock:
            if self._client is None:
                self._client = self._connect()

    def move(self, port: int) -> None:
        """The store's process was replaced; its successor, empty, listens on `port`."""
        with self._lock:
            self._port = port
            self._client = None

    def cut(self) -> int:
        """End every wait of this process with an error, from any thread.

        Returns:
            How many there were.
        """
        self._num_cuts += 1
        return self._num_waiting

    def stop_thread(self, ident: int) -> None:
        """End the waits of one thread, also those that it is yet to begin."""
        self._stopped_threads.add(ident)

    def forget_thread(self, ident: int) -> None:
        """The thread has ended, and its identity may come to mean another."""
        self._stopped_threads.discard(ident)

    @contextlib.contextmanager
    def note_keys(self, keys: list[str]) -> Iterator[None]:
        """Append to `keys` those that this process sets meanwhile."""
        self._noted = keys
        try:
            yield
        finally:
            self._noted = None

    def forget_keys(self, keys: Iterable[str]) -> None:
        """Delete keys that nobody needs any more."""
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

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda client: client.add(key, amount)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda client: client.check(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: they were not in time, or `cut` was called.
        """
        limit_s = (timeout or self._timeout).total_seconds()
        num_cuts, deadline, step_s = self._num_cuts, time.monotonic() + limit_s, _FIRST_STEP_S
        ident = threading.get_ident()
        self._num_waiting += 1
        try:
            while not self.check(keys):
                if self._num_cuts != num_cuts or ident in self._stopped_threads:
                    raise DistStoreError(f"the wait for {keys} was ended")
                if time.monotonic() > deadline:
                    raise DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(keys)}")
                time.sleep(step_s)
                step_s = min(1.5 * step_s, _LONGEST_STEP_S)
        finally:
            self._num_waiting -= 1

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._ask(lambda client: client.compare_set(key, expected, desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda client: client.delete_key(key)))

    def num_keys(self) -> int:
        return int(self._ask(lambda client: client.num_keys()))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(lambda client: client.append(key, value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys, self._timeout)
        return list(self._ask(lambda client: client.multi_get(keys)))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        if self._noted is not None:
            self._noted += keys
        self._ask(lambda client: client.multi_set(keys, values))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(lambda client: client.queue_push(key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if block:
            self.wait([key], self._timeout)
        return bytes(self._ask(lambda client: client.queue_pop(key, False)))

    def queue_len(self, key: str) -> int:
        return int(self._ask(lambda client: client.queue_len(key)))

    def list_keys(self) -> list[str]:
        return list(self._ask(lambda client: client.list_keys()))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> MeshStore:
        # A copy is for whoever must not be held up by another's wait; no wait holds this one.
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Put a question, over a new connection if the old one is gone."""
        with self._lock:
            if self._client is not None:
                try:
                    return question(self._client)
                except DistNetworkError:
                    self._client = None
            self._client = self._connect()
            return question(self._client)

    def _connect(self) -> TCPStore:
        try:  # torch's client would try for long, and write a stack a time
            socket.create_connection((self._host, self._port), timeout=_CONNECT_S).close()
        except OSError as error:
            raise DistNetworkError(
                f"the c10d store at {self._host}:{self._port} cannot be reached: {error}"
            ) from error
        with _no_name_lookups():
            return TCPStore(
                self._host, self._port, None, is_master=False, timeout=timedelta(seconds=_CONNECT_S)
            )


@contextlib.contextmanager
def _no_name_lookups() -> Iterator[None]:
    """Let the resolver give up at once, on this thread.

    When it connects, torch looks up the name of ``::ffff:127.0.0.1`` for its log, which no hosts file has: a
    DNS query for each rank. Sixty-four at once lose packets and wait 5 s for them; without an answering
    server, eight do.
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
