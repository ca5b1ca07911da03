"""Actors of other ranks as user code on a rank has them: `RankActor`, its methods, and `PeerRun`, a
call in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from ...errors import HostError, RankDied, RankFailure, RemoteError
from ...stdlib import os
from ...wire import payload
from ...wire.codec import Parcel
from ...wire.handles import Address, Link, PeerCancel
from ...wire.messages import Done
from ...wire.nests import check_rows, indices_in, join_parts, map_rows, split_rows
from ...wire.ranks import Results, choose_ranks, describe_ranks
from ...wire.value_stream import ValueStream
from .peer_connections import Connection, Future

# How long a rank waits before it looks for a cycle.
_CHASE_S = 0.05
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Handles(Protocol):
    """The handles of this rank (`handles.Handles`)."""

    def call(
        self, address: Address, method: str, operation: str, *shares: tuple[Any, Any],
        index_of: Mapping[int, int] | None = None,
    ) -> PeerRun: ...  # fmt: skip

    def in_flight(self, address: Address, rank: int) -> int: ...

    def check(self, address: Address, rank: int) -> None: ...

    def end_stream(self, address: Address, method: str, number: int) -> None: ...

    def dims_of(self, address: Address, rank: int) -> dict[str, int]: ...

    def wait_for(self, run: PeerRun) -> AbstractContextManager[None]: ...

    def await_answer(self, future: Future, limit_s: float) -> None: ...

    def await_in_call(self, run: PeerRun) -> AbstractContextManager[bool]: ...

    def chase(self, run: PeerRun) -> None: ...

    def chase_awaited(self, run: PeerRun) -> None: ...


class PeerRun(Awaitable[Any]):
    """A call of other ranks, in flight or ended: await it, or call `result`.

    Args:
        handles: the handles of this rank.
        title: name of the call.
        calls: rank -> its connection, the call and its answer.
        since_s: a time before it was sent, by `time.monotonic`.

    Attributes:
        is_endless: whether the wait for it has no time-out.
        combine: returns the value of values by rank; None for that of one rank, or `Results`.
    """

    combine: Callable[[dict[int, Any]], Any] | None = None

    def __init__(
        self,
        handles: Handles,
        title: str,
        calls: dict[int, tuple[Connection, Link, Future]],
        since_s: float,
    ) -> None:
        self._handles, self._title, self._calls = handles, title, calls
        self.since_s, self.is_endless = since_s, True

    def open_calls(self) -> list[tuple[Connection, Link]]:
        """Return the calls that have not ended."""
        return [(to, link) for to, link, future in self._calls.values() if not future.done()]

    def done(self) -> bool:
        """Return whether every rank has answered."""
        return not self.open_calls()

    def cancel(self) -> None:
        """Interrupt the call on its ranks; return without waiting."""
        for connection, link in self.open_calls():
            connection.send(Parcel(PeerCancel(link.run)))

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answers, and return the value, or `Results` of several ranks. Blocks.

        Args:
            timeout_s: how long to wait, in seconds; None for no limit. The call goes on after a
                time-out.

        Raises:
            RankDied: a rank has ended.
            MeshUsageError: ranks wait for each other in a cycle, which this call has closed.
            TimeoutError: there is no answer in time.
        """
        self.is_endless = timeout_s is None
        until = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        step = _CHASE_S
        with self._handles.wait_for(self):
            for _, link, future in self._calls.values():
                while not future.done():
                    left = until - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(f"{link.title} has not ended after {timeout_s} s")
                    try:
                        self._handles.await_answer(future, min(step, left))
                    except BaseException:  # the interrupt of this rank
                        self.cancel()
                        raise
                    if self.is_endless and not future.done():
                        self._handles.chase(self)
                        step = 1.0
        return self._values()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Any:
        try:
            with self._handles.await_in_call(self) as may_close:
                step = _CHASE_S if may_close else None
                for _, _, future in self._calls.values():
                    wrapped = asyncio.wrap_future(future)
                    wrapped.add_done_callback(lambda end: end.cancelled() or end.exception())
                    while not (await asyncio.wait((wrapped,), timeout=step))[0]:
                        self._handles.chase_awaited(self)
                        step = 1.0  # without one, it is done
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._values()

    def _values(self) -> Any:
        values: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        for rank, (_, link, future) in self._calls.items():
            try:
                values[rank] = _value_of(future.result(), link.title)
            except Exception as error:
                errors[rank] = error
        first = next(iter(errors.values()), None)
        if first is not None and len(self._calls) == 1:
            raise first
        if first is not None:
            summary = f"{self._title} failed on {describe_ranks(errors)}: {first}"
            raise RankFailure(summary, errors)
        if self.combine is not None:
            return self.combine(values)
        return Results(values) if len(self._calls) > 1 else next(iter(values.values()))

    def __repr__(self) -> str:
        return f"<{self._title} on {describe_ranks(self._calls)}{': done' if self.done() else ''}>"


def _value_of(parcel: Parcel[Any], title: str) -> Any:
    """Return the value of an answer, or raise the exception in it."""
    verb = parcel.verb
    if type(verb) is Done:
        return None if verb.payload is None else payload.loads(verb.payload, parcel.buffers)
    raised: Any = None
    if verb.type_name in ("KeyboardInterrupt", "Released"):
        raise RemoteError(verb.type_name, f"{title} was interrupted there: {verb.text}")
    if verb.payload is not None:
        with contextlib.suppress(Exception):
            raised = payload.loads(verb.payload, parcel.buffers)
    if not isinstance(raised, Exception):  # an interrupt there is none here
        raised = RemoteError(verb.type_name, verb.text, verb.why_no_payload)
    if "\n" in verb.traceback:
        raised.add_note(f"raised by {title}:\n{_COLOURS.sub('', verb.traceback)}")
    raise raised


class RankActor:
    """A handle of an actor of other ranks, on a rank: its attributes are the actor's methods."""

    __slots__ = ("_address", "_handles")

    def __init__(self, handles: Handles, address: Address) -> None:
        self._handles, self._address = handles, address

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python asks for such by itself
            raise AttributeError(f"{name} is private, and a handle calls public methods only")
        return RankMethod(self._handles, self._address, name)

    def __getitem__(self, index: int | slice | Sequence[int]) -> RankActor:
        chosen = choose_ranks(self._address.ranks, index, self._address.actor)
        return RankActor(self._handles, msgspec.structs.replace(self._address, ranks=chosen))

    def __len__(self) -> int:
        return len(self._address.ranks)

    def __reduce__(self) -> Any:
        return self._address.reduce()

    def __repr__(self) -> str:
        return f"<{self._address}>"


class RankMethod:
    """A method of an actor of other ranks, to be called from a rank."""

    def __init__(self, handles: Handles, address: Address, name: str) -> None:
        self._handles, self._address, self._name = handles, address, name

    def _call(self, operation: str, args: Any, kwargs: Any) -> PeerRun:
        return self._handles.call(self._address, self._name, operation, (args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its value; in an asyncio task, a `PeerRun` to be awaited."""
        run = self._call("call", args, kwargs)
        return run if asyncio._get_running_loop() is not None else run.result()

    def submit(self, *args: Any, **kwargs: Any) -> PeerRun:
        """Call the method, and return a `PeerRun` without waiting."""
        return self._call("call", args, kwargs)

    def send(self, *args: Any, **kwargs: Any) -> None:
        """Call the method without a result; an exception is printed on this rank."""
        run = self._call("send", args, kwargs)
        for _, link, future in run._calls.values():
            context = contextvars.copy_context()
            future.add_done_callback(functools.partial(_report, link.title, context))

    def any(self, *args: Any, **kwargs: Any) -> PeerRun:
        """Call the method on the rank with the fewest calls of this rank in flight, of those that
        live and have the actor.
        """
        address = self._address
        dead: Exception = RankDied(-1, "")
        for rank in sorted(address.ranks, key=lambda rank: self._handles.in_flight(address, rank)):
            one = msgspec.structs.replace(address, ranks=(rank,))
            try:
                self._handles.check(one, rank)
                return self._handles.call(one, self._name, "call", (args, kwargs))
            except (RankDied, HostError) as error:
                dead = error
        raise dead

    def sharded(self, *args: Any, dim: str = "", **kwargs: Any) -> PeerRun:
        """Call the method with a part of the arguments' rows on each rank, and return a `PeerRun`
        of the joined results without waiting; as in the notebook (`Method.sharded`).
        """
        address, name = self._address, f"{self._address.actor}.{self._name}"
        dims = self._handles.dims_of(address, address.ranks[0]) if dim else {}
        index_of = indices_in(dims, dim, address.ranks)
        num_parts = max(index_of.values()) + 1
        check_rows((args, kwargs), num_parts, name)
        parts = [
            map_rows(split_rows((args, kwargs), index, num_parts), _alone)
            for index in range(num_parts)
        ]
        address = msgspec.structs.replace(address, ranks=(*index_of,))
        run = self._handles.call(address, self._name, "call", *parts, index_of=index_of)
        run.combine = functools.partial(join_parts, index_of)
        return run

    def stream(self, *args: Any, ahead: int = 4, **kwargs: Any) -> ValueStream:
        """Iterate over the values that the method yields, in a ``for`` or ``async for`` loop; as in
        the notebook (`Method.stream`).
        """
        number = int.from_bytes(os.urandom(8))  # those of the notebook are small

        def start(operation: str, args: Any = (), kwargs: Any = None) -> PeerRun:
            return self._call(operation, (number, *args), kwargs or {})

        end = functools.partial(self._handles.end_stream, self._address, self._name, number)
        return ValueStream(start, end, ahead, args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (RankActor(self._handles, self._address), self._name)

    def __repr__(self) -> str:
        return f"<method {self._address.actor}.{self._name}>"


def _alone(rows: Any) -> Any:
    """Return rows of a tensor without the others of its storage, which would be sent as well."""
    is_part = hasattr(rows, "untyped_storage") and rows.nbytes < rows.untyped_storage().nbytes()
    return rows.detach().clone().requires_grad_(rows.requires_grad) if is_part else rows


def _report(title: str, context: contextvars.Context, future: Future) -> None:
    try:
        _value_of(future.result(), title)
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        text = f"{title}: {type(error).__name__}: {error}\n{notes}"
        context.run(print, text, file=sys.stderr)  # of the run that has sent it
