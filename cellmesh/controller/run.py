"""One cell or call on some ranks: its outcome as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from ..errors import MeshUsageError, RankDied, RankFailure, RanksInterrupted, RemoteError
from ..wire import payload
from ..wire.framing import Parcel
from ..wire.messages import Died, Done, Failed, RankState
from ..wire.ranks import describe_ranks
from .printer import Printer
from .results import Results

T = TypeVar("T")


_MAX_LINE = 300


class Run(Generic[T]):
    """A cell or call in flight, or done.

    Wait for it with `result`, ``await`` it, or iterate over ``(rank, value)`` as ranks finish. Made by
    `Mesh`.

    Args:
        number: its number.
        ranks: who runs it.
        single: its result is the value of the one rank, not `Results`.
        printer: shows its output.
        interrupt: interrupts it.
        title: what to call it in errors.
        is_cell: it is a cell, not a call.
    """

    def __init__(
        self,
        number: int,
        ranks: Sequence[int],
        single: bool,
        printer: Printer,
        interrupt: Callable[[], None],
        title: str,
        is_cell: bool = False,
    ) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self.title = title
        self.is_cell = is_cell
        self.started_at = time.monotonic()
        self._single = single
        self.printer = printer
        self._interrupt = interrupt
        self._outcomes: dict[int, Parcel[Any]] = {}
        self._values: dict[int, Any] = {}
        self._arrived: list[int] = []  # ranks, as they ended it
        self._ended = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._wakers: list[Callable[[], None]] = []  # of who awaits the next rank
        self._lock = threading.Condition()
        self._interrupted = False

    # ---- for users

    def done(self) -> bool:
        """Whether every rank has ended it."""
        return self._ended.is_set()

    def waiting_ranks(self) -> list[int]:
        """The ranks that have not ended it."""
        return [rank for rank in self.ranks if rank not in self._outcomes]

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back once every rank has ended it, on the link's thread, or now if that is so."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank has ended it; raises nothing that happened on ranks.

        Args:
            timeout_s: seconds; None waits as long as it takes.

        Returns:
            Whether it ended in time.
        """
        return self._ended.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait, and give what the ranks returned. Blocks.

        Ctrl-C or the notebook's stop button, while this waits, interrupts the run on its ranks.

        Args:
            timeout_s: seconds; None waits as long as it takes. The run goes on after a time-out.

        Returns:
            `Results`, or the value itself if the run is on one rank of ``mesh[i]``.

        Raises:
            RankFailure: some ranks raised or died.
            RanksInterrupted: the run was interrupted.
            TimeoutError: it has not ended in time.
        """
        try:
            ended = self._ended.wait(timeout_s)
        except KeyboardInterrupt:
            self._stop_and_wait()
            ended = True
        if not ended:
            raise TimeoutError(
                f"{self.title} has not ended on {describe_ranks(self.waiting_ranks())} after {timeout_s} s"
            )
        self.raise_failure()
        values = {rank: self._value(rank) for rank in self.ranks}
        return values[self.ranks[0]] if self._single else Results(values)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in it, on all ranks that have not ended it. Does not wait."""
        self._interrupted = True
        self._interrupt()

    def raise_failure(self) -> None:
        """Raise what happened on ranks that ended it with an exception; returns if none did."""
        failed = {rank: outcome for rank, outcome in self._outcomes.items() if type(outcome.verb) is not Done}
        if not failed:
            return
        exceptions = {rank: _exception(rank, outcome) for rank, outcome in sorted(failed.items())}
        stopped = [r for r, exc in exceptions.items() if isinstance(exc, KeyboardInterrupt)]
        summary = self._summarize(exceptions)
        if self._interrupted and stopped:
            raise RanksInterrupted(summary)
        tracebacks = {
            rank: outcome.verb.traceback for rank, outcome in failed.items() if type(outcome.verb) is Failed
        }
        raise RankFailure(summary, exceptions, tracebacks)

    def __iter__(self) -> Iterator[tuple[int, T]]:
        """(rank, value) as ranks end it; raises `RankFailure` at the first that failed.

        Ctrl-C or the stop button, while this waits, interrupts the run, as with `result`.
        """
        for position in range(len(self.ranks)):
            try:
                rank = self._wait_for_arrival(position)
            except KeyboardInterrupt:
                self._stop_and_wait()
                self.raise_failure()
                rank = self._arrived[position]
            yield self._next_value(rank)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    async def __aiter__(self) -> AsyncIterator[tuple[int, T]]:
        for position in range(len(self.ranks)):
            while len(self._arrived) <= position:
                await self._wait_for_news(position)
            yield self._next_value(self._arrived[position])

    def __repr__(self) -> str:
        waiting = self.waiting_ranks()
        state = f"waits for {describe_ranks(waiting)}" if waiting else "done"
        return f"<{self.title} on {describe_ranks(self.ranks)}: {state}>"

    # ---- for the link, on its thread

    def settle(self, ranks: tuple[int, ...], parcel: Parcel[Any], now: float) -> None:
        """Some of its ranks have ended it, or died."""
        with self._lock:
            self._outcomes.update(dict.fromkeys(ranks, parcel))
            self._arrived += ranks
            self._lock.notify_all()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()
        self.printer.settle(ranks, parcel.verb, now)

    def report_waiting(self, states: dict[int, RankState]) -> None:
        """Some ranks have failed, and these have not ended yet."""
        spots: dict[str, list[int]] = {}
        for rank, state in states.items():
            spots.setdefault(describe_state(state), []).append(rank)
        waits = "; ".join(f"{describe_ranks(ranks)} {spot}" for spot, ranks in sorted(spots.items()))
        gone = [rank for rank in self.ranks if rank in self._outcomes and rank not in states]
        verb = "has" if len(gone) == 1 else "have"
        self.printer.note(
            f"{describe_ranks(gone)} {verb} ended; {waits}. The stop button (or %dist_interrupt) gets "
            "them out."
        )

    def finish(self, now: float) -> None:
        """Every rank has ended it."""
        try:
            self.printer.show(now, everything=True)
        finally:
            self._call_back()

    def _call_back(self) -> None:
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        with contextlib.ExitStack() as stack:  # each is called, whichever fails
            for callback in reversed(callbacks):
                stack.callback(callback)

    # ---- inside

    def _stop_and_wait(self) -> None:
        self.interrupt()
        try:
            self._ended.wait()
        except KeyboardInterrupt:
            raise RanksInterrupted(
                f"{describe_ranks(self.waiting_ranks())} did not stop: `%dist_restart` replaces the ranks"
            ) from None

    async def _wait_async(self) -> Any:
        waiter, wake = _make_waker()
        self.on_end(wake)
        await self._await_or_interrupt(waiter)
        return self.result()

    async def _wait_for_news(self, position: int) -> None:
        """Until more ranks than `position` have ended it, or for a while."""
        waiter, wake = _make_waker()
        with self._lock:
            if len(self._arrived) > position:
                return
            self._wakers.append(wake)
        await self._await_or_interrupt(waiter)

    async def _await_or_interrupt(self, waiter: asyncio.Future[None]) -> None:
        try:
            await waiter
        except asyncio.CancelledError:
            self.interrupt()
            raise

    def _wait_for_arrival(self, position: int) -> int:
        with self._lock:
            self._lock.wait_for(lambda: len(self._arrived) > position)
            return self._arrived[position]

    def _next_value(self, rank: int) -> tuple[int, Any]:
        outcome = self._outcomes[rank]
        if type(outcome.verb) is not Done:
            exceptions = {rank: _exception(rank, outcome)}
            raise RankFailure(self._summarize(exceptions), exceptions)
        return rank, self._value(rank)

    def _value(self, rank: int) -> Any:
        if rank not in self._values:
            verb, buffers = self._outcomes[rank]
            if verb.payload is None:
                return None
            try:
                self._values[rank] = payload.loads(verb.payload, buffers)
            except Exception as e:
                raise MeshUsageError(
                    f"the value of rank {rank} cannot be loaded in the notebook: {type(e).__name__}: {e}"
                ) from e
        return self._values[rank]

    def _summarize(self, exceptions: dict[int, BaseException]) -> str:
        groups: dict[str, list[int]] = {}
        for rank, exc in exceptions.items():
            verb = self._outcomes[rank].verb
            if isinstance(exc, RankDied):
                text = exc.reason
            else:
                line = getattr(verb, "line", 0)
                first_line = verb.text.partition("\n")[0][:_MAX_LINE]
                text = f"raised {verb.type_name}" + (f": {first_line}" if first_line else "")
                text += f" (line {line})" if line else ""
            groups.setdefault(text, []).append(rank)
        parts = [f"{describe_ranks(ranks)} {text}" for text, ranks in groups.items()]
        rest = [
            rank for rank in self.ranks if rank in self._outcomes and type(self._outcomes[rank].verb) is Done
        ]
        if rest:
            parts.append(f"{describe_ranks(rest)} finished")
        return "; ".join(parts)


def _make_waker() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running loop, and what resolves it from another thread."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(_resolve, waiter)

    return waiter, wake


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def describe_state(state: RankState) -> str:
    """What a rank is doing, in words."""
    if state.run < 0:
        return "idle"
    line = f" at line {state.line}" if state.line else ""
    if state.collective:
        return f"in {state.collective}{line}"
    where = "" if state.where.endswith("<module>") else f" {state.where}"
    return f"running{where}{line}"


def _exception(rank: int, outcome: Parcel[Any]) -> BaseException:
    verb = outcome.verb
    if type(verb) is Died:
        return RankDied(rank, verb.reason, verb.last_output)
    if verb.payload is None:
        return RemoteError(verb.type_name, verb.text, verb.why_no_payload)
    try:
        exc = payload.loads(verb.payload, outcome.buffers)
    except Exception as e:
        return RemoteError(verb.type_name, verb.text, f"it cannot be loaded here: {e}")
    if not isinstance(exc, BaseException):
        return RemoteError(verb.type_name, verb.text)
    return exc
