"""A run: one cell or call on some ranks, with its results as they arrive. While the user waits for
a run, requests for input are answered, and the stop button interrupts it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from ..errors import MeshUsageError, RanksInterrupted
from ..stdlib import time
from ..wire.codec import Frame, Parcel, encode
from ..wire.messages import Channel, Done, Failed, Pickled, Relay, Work, WorkVerb
from ..wire.ranks import Results as Results
from ..wire.ranks import describe_ranks
from ..wire.segments import SegmentFrame
from ..wire.status import RankState
from ..wire.verbs import InputCancelled, InputRequest, Timing
from .core.runs import ESCALATE_S, STOP_S
from .failure_summary import describe_live, exception_of, failure_of
from .kernel import is_leaving
from .news import LOOK_UP_S, News
from .output.printer import Printer
from .stdin import Prompt, Questions

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class WorkItem(msgspec.Struct, frozen=True):
    """The work of one run, its ranks, and its name.

    Attributes:
        verb: message with the work of each rank; its `run` is set when the run gets its number.
        kind: class of the verb or, for a feature's request, of the request; its class attributes
            have the properties of the work (`WorkVerb`).
        ranks: ranks that do the work.
        buffers: frames that the verb's payload announces.
        title: name of the run in errors.
        channel: ``control`` for work of a rank's control thread, beside the run that the rank
            executes.
        num_bytes: size of the arguments, in bytes.
        is_single: whether the result is the value of the only rank, not `Results`.
        interleaves: whether it may wait beside other work of the ranks.
    """

    verb: Work
    kind: type[WorkVerb]
    ranks: tuple[int, ...]
    buffers: Sequence[Frame] = ()
    title: str = "the call"
    channel: Channel = "work"
    num_bytes: int = 0
    is_single: bool = False
    interleaves: bool = False

    def relay(self, run: int) -> Parcel[Relay]:
        """Return the message by which the agent relays the work to its ranks as run `run`."""
        verb: Any = msgspec.structs.replace(self.verb, run=run)
        frames = encode([Parcel(verb, tuple(self.buffers))])
        execution_count = verb.execution_count if self.kind.is_cell else 0
        lends = isinstance(frames[-1], SegmentFrame)
        relay = Relay(
            self.ranks,
            self.channel,
            run,
            len(frames),
            self.title,
            execution_count,
            self.kind.fills,
            lends,
            self.kind.is_whole,
            self.interleaves,
        )
        return Parcel(relay, tuple(frames))


class RunControl(Protocol):
    """Protocol of the session's operations that each run uses."""

    def check_may_wait(self) -> None:
        """Raise an error if the caller must not wait, because it is in the event loop of the
        connection to the agent or in a forked process.
        """

    def interrupt_run(self, number: int, ranks: Sequence[int]) -> None:
        """Interrupt a run on its ranks; a second call soon after kills ranks that do not stop."""

    def begin_wait(self, number: int, ranks: Sequence[int]) -> None:
        """Record that the user waits for a run's end on these ranks, and submits no other run."""

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool = False) -> None:
        """Send the user's input, or end of file, to the ranks that requested it.

        Args:
            requests: rank -> the number of its request.
            text: the input.
            is_end: whether the user has ended the input.
        """


class Run(Generic[T]):
    """A cell or call on some ranks, in flight or ended.

    Wait for it with `result`, ``await`` it, or iterate over ``(rank, value)`` as ranks finish. Made
    by `Mesh`.

    Args:
        number: number of the run.
        item: work of the run.
        printer: shows the run's output.
        control: the session's runs.

    Attributes:
        combine: makes the result from the values of several ranks.
    """

    combine: Callable[[dict[int, Any]], Any] = Results

    def __init__(self, number: int, item: WorkItem, printer: Printer, control: RunControl) -> None:
        self.number = number
        self.ranks = item.ranks
        self.title = item.title
        self.is_cell = item.kind.is_cell
        self.is_query, self.interleaves = item.kind.is_query, item.interleaves
        self._is_of_actor = bool(getattr(item.verb, "of_actor", ""))
        self.started_at = time.monotonic()
        self._single = item.is_single
        self.printer = printer
        self._control = control
        self._outcomes: dict[int, Parcel[Any]] = {}
        self._values: dict[int, Any] = {}
        self._arrived: list[int] = []  # ranks, in the order in which they ended the run
        self._has_failed = False  # whether any rank has failed
        self._has_ended = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._interrupted = False
        self._is_cancelled = False
        self._callers: set[object] = set()  # waiting callers that will get the failure raised
        self._news = News()
        self._is_iterated = False  # so that threads wait for single ranks as well
        self._num_attending = 0  # waiting threads and tasks that can answer requests for input
        self._questions: Questions | None = None  # made on demand, as most runs need no input
        self._is_live = False
        self._verdict = self._no_input = ""

    # ---- for users

    def done(self) -> bool:
        """Return whether every rank has ended the run."""
        return self._has_ended

    def waiting_ranks(self) -> list[int]:
        """Return the ranks that have not ended the run."""
        return [rank for rank in self.ranks if rank not in self._outcomes]

    def failed_ranks(self) -> list[int]:
        """Return the ranks that ended the run with an exception, or died."""
        ended = list(self._outcomes.items())
        return sorted(rank for rank, outcome in ended if type(outcome.verb) is not Done)

    def outcomes(self) -> dict[int, Any]:
        """Return how each rank has ended the run (its ``Done``, ``Failed`` or ``Died`` message), in
        the order of arrival.
        """
        return {rank: self._outcomes[rank].verb for rank in tuple(self._arrived)}

    def refuse_input(self, why: str) -> None:
        """Answer requests for input with end of file, and the reason `why`, from now on."""
        self._no_input = why

    def timings(self) -> dict[int, Timing]:
        """Return each rank's timing, for a run with ``timed`` (see `Ranks.submit_cell`)."""
        ended = sorted(self.outcomes().items())
        times = {rank: getattr(verb, "timing", None) for rank, verb in ended}
        return {rank: timing for rank, timing in times.items() if timing is not None}

    def on_end(self, callback: Callable[[], None]) -> None:
        """Register a function to call once every rank has ended the run, in the event loop of the
        connection to the agent; if all have ended it, call the function now.
        """
        with self._lock:
            if not self._has_ended:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every rank has ended the run, without raising the exceptions of ranks. Blocks.

        Args:
            timeout_s: how long to wait, in seconds; None for no limit.

        Returns:
            Whether the run ended in time.
        """
        if self._has_ended or timeout_s == 0:
            return self._has_ended
        self._control.check_may_wait()
        if timeout_s is None:
            self._control.begin_wait(self.number, self.ranks)
        return self._news.wait_for(self.done, timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the run's end, and return the values that the ranks returned. Blocks.

        Ctrl-C or the notebook's stop button during the wait interrupts the run on its ranks; a
        second press within 5 s kills and replaces ranks that did not stop; a third ends the wait.
        Requests of ranks for input (``input()``, the debugger) are shown here if the main thread
        waits.

        Args:
            timeout_s: how long to wait, in seconds; None for no limit. The run continues after a
                time-out.

        Returns:
            `Results`, or the value itself if the run is on one rank of ``mesh[i]``.

        Raises:
            RankFailure: at least one rank raised or died.
            RanksInterrupted: the run was interrupted.
            TimeoutError: the run has not ended in time.
        """
        ended = self._wait_for_end(timeout_s, raises=True)
        if not ended:
            raise TimeoutError(
                f"{self.title} has not ended on {describe_ranks(self.waiting_ranks())} after "
                f"{timeout_s} s"
            )
        if self._has_failed:  # checked here to save a call for most runs
            self.raise_failure()
        outcomes = self._outcomes
        values = {
            rank: None if outcomes[rank].verb.payload is None else self._value(rank)
            for rank in sorted(self.ranks)
        }
        return values[self.ranks[0]] if self._single else self.combine(values)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt on all ranks that have not ended the run, without waiting."""
        self.note_interrupted()
        self._control.interrupt_run(self.number, self.ranks)

    def note_interrupted(self) -> None:
        """Record that the user has interrupted the run."""
        self._interrupted = True

    def cancel(self) -> bool:
        """Interrupt this run only, or remove it from the queue; return without waiting. That a call
        was interrupted is not shown then.

        Returns:
            Whether the run had not ended before.
        """
        if self._has_ended:
            return False
        self._is_cancelled = True
        self.interrupt()
        return True

    def gather(
        self, timeout_s: float | None = None
    ) -> tuple[dict[int, T], dict[int, BaseException]]:
        """Wait, and return the values of ranks that succeeded and the exceptions of ranks that
        failed. Blocks.

        Args:
            timeout_s: how long to wait, in seconds; ranks that have not ended the run by then are
                in neither mapping. None for no limit.

        Raises:
            RanksInterrupted: the run was interrupted.
        """
        self._wait_for_end(timeout_s)
        if self._interrupted:
            self.raise_failure()
        ended = sorted(self._outcomes.items())
        values = {rank: self._value(rank) for rank, outcome in ended if type(outcome.verb) is Done}
        failed = {rank: outcome for rank, outcome in ended if type(outcome.verb) is not Done}
        return values, {rank: exception_of(rank, outcome) for rank, outcome in failed.items()}

    def payload_of(self, rank: int) -> tuple[Pickled, tuple[Frame, ...]]:
        """Wait, and return a rank's value, still pickled, with its buffers. Blocks.

        Raises:
            MeshUsageError: the rank returned no value.
            RankFailure, RanksInterrupted: as in `result`.
        """
        self._wait_for_end(raises=True)
        self.raise_failure()
        verb, buffers = self._outcomes[rank]
        if verb.payload is None:
            raise MeshUsageError(f"{self.title} has no value on rank {rank}")
        return verb.payload, buffers

    def raise_failure(self) -> None:
        """Raise the exceptions of the ranks that failed, if any."""
        if self._has_failed:
            outcomes = self._outcomes.copy()
            raise failure_of(outcomes.keys(), outcomes, self._verdict, self._interrupted)

    def __iter__(self) -> Iterator[tuple[int, T]]:
        """Yield (rank, value) as ranks end the run; raise `RankFailure` at the first rank that
        failed.

        Ctrl-C or the stop button during the wait interrupts the run, as in `result`.
        """
        self._is_iterated = True
        for position in range(len(self.ranks)):
            was_interrupted = self._interrupted
            self._wait_until(self._has_arrived(position))
            if self._interrupted and not was_interrupted:
                self._wait_for_end()
                self.raise_failure()
            yield self._next_value(self._arrived[position])

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    async def __aiter__(self) -> AsyncIterator[tuple[int, T]]:
        self._is_iterated = True
        for position in range(len(self.ranks)):
            await self._await_until(self._has_arrived(position))
            yield self._next_value(self._arrived[position])

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        waiting = self.waiting_ranks()
        state = f"waits for {describe_ranks(waiting)}" if waiting else "done"
        return f"{self.title} on {describe_ranks(self.ranks)}: {state}"

    # ---- for the link, on its thread

    def settle(
        self, ranks: tuple[int, ...], parcel: Parcel[Any], now: float, has_begun: bool = True
    ) -> None:
        """Record that these ranks have ended the run or died.

        Args:
            ranks: the ranks.
            parcel: their outcome.
            now: current time, in seconds.
            has_begun: whether they had begun the run.
        """
        with self._lock:
            self._outcomes.update(dict.fromkeys(ranks, parcel))
            self._arrived += ranks
            self._has_failed |= type(verb := parcel.verb) is not Done
        if self._questions is not None:
            self._questions.withdraw(ranks)
        if self._is_iterated:
            self._news.report()
        is_shown = has_begun or self.is_cell
        if self._is_cancelled and type(verb) is Failed and not self.is_cell:
            is_shown = verb.type_name not in ("KeyboardInterrupt", "CancelledError")
        if self._is_of_actor and type(verb) is Failed and verb.traceback:
            text = f"{verb.traceback.rstrip()}\nraised by {self.title}"  # several may have a class
            verb = msgspec.structs.replace(verb, traceback=text)
        self.printer.settle(ranks, verb, now, is_shown)

    def ask(self, ranks: tuple[int, ...], verb: InputRequest | InputCancelled, now: float) -> None:
        """Record that these ranks wait for the user's input, or no longer wait for it."""
        if type(verb) is InputCancelled:
            if self._questions is not None:
                self._questions.withdraw(ranks, verb.request)
        elif type(verb) is InputRequest and self._no_input:
            self._control.reply(dict.fromkeys(ranks, verb.request), self._no_input, True)
        elif type(verb) is InputRequest:
            self.clear_live()
            self.printer.feed(ranks, verb, now)
            if self._questions is None:
                self._questions = Questions()
            # Earlier output must be shown above the prompt.
            show = functools.partial(self.printer.show, now, everything=True)
            self._questions.add(ranks, verb, now, self.waiting_ranks(), show)
        self._news.report()

    def show_live(self, states: Mapping[int, RankState], now: float) -> None:
        """Show the activity of the ranks in a status line."""
        waiting = self.waiting_ranks()
        is_asked = self._questions is not None and self._questions.open and self._num_attending
        if waiting and not is_asked:
            self._is_live = True
            self.printer.status(describe_live(self.number, waiting, states), now)

    def note_verdict(self, verdict: str) -> None:
        """Record the reason for which ranks can never finish the run, for the report of its
        failure.
        """
        self._verdict = verdict

    def clear_live(self) -> None:
        """Remove the status line that `show_live` has shown."""
        with self._lock:
            if self._is_live:
                self._is_live = False
                self.printer.status("")

    def finish(self, now: float) -> None:
        """Record that every rank has ended the run; wake waiting threads and call the callbacks."""
        try:
            if self._is_live:
                self.clear_live()
            self.printer.finish(now, is_raised=bool(self._callers))
        finally:
            with self._lock:
                self._has_ended = True
                callbacks, self._callbacks = self._callbacks, []
            self._news.report()
            _call_all(callbacks)

    # ---- inside

    def _advise(self, text: str) -> None:
        """Show a remark above the status line until the run's end; may be called on any thread."""
        with self._lock:
            if self.waiting_ranks():  # else `finish` may have removed status lines already
                self._is_live = True
                self.printer.advise(text)

    def _wait_for_end(self, timeout_s: float | None = None, raises: bool = False) -> bool:
        """Wait for the run's end, or for `timeout_s` seconds; return whether the run has ended.

        Args:
            timeout_s: how long to wait, in seconds; None for no limit.
            raises: whether the caller will raise the failure of the ranks.
        """
        caller = object()
        if raises:
            self._callers.add(caller)
        try:
            if timeout_s is None and not self._has_ended:
                self._control.begin_wait(self.number, self.ranks)
            return self._wait_until(self.done, timeout_s)
        finally:
            self._callers.discard(caller)

    def _has_arrived(self, position: int) -> Callable[[], bool]:
        return lambda: len(self._arrived) > position

    async def _wait_async(self) -> Any:
        caller = object()
        self._callers.add(caller)
        try:
            await self._await_until(self.done)
        finally:
            self._callers.discard(caller)
        try:
            return self.result()
        except RanksInterrupted as error:
            raise _as_cancelled(error) from None

    def _next_value(self, rank: int) -> tuple[int, Any]:
        outcome = self._outcomes[rank]
        if type(outcome.verb) is not Done:
            raise failure_of((rank,), self._outcomes.copy())
        return rank, self._value(rank)

    def _value(self, rank: int) -> Any:
        if rank not in self._values:
            verb, buffers = self._outcomes[rank]
            if verb.payload is None:
                return None
            from ..wire.payload import loads

            try:
                self._values[rank] = loads(verb.payload, buffers)
            except Exception as e:
                raise MeshUsageError(
                    f"the value of rank {rank} cannot be loaded in the notebook: "
                    f"{type(e).__name__}: {e}"
                ) from e
            self._outcomes[rank] = Parcel(
                verb
            )  # frees the segments' descriptors; the value keeps the buffers that it needs
        return self._values[rank]

    # ---- waiting

    def _wait_until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a condition, and show requests for input to the user. The stop button interrupts
        the run; pressed again, it kills ranks that did not stop.

        Args:
            is_over: returns whether the condition holds; each change is reported to `_news`.
            timeout_s: how long to wait, in seconds, unless the button is pressed; None for no
                limit.

        Returns:
            Whether the condition holds; otherwise the time is up.

        Raises:
            RanksInterrupted: the user has pressed the button once more, to end the wait.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pressed_at: float | None = None
        has_escalated = False
        while True:
            try:
                if self._attend(is_over, deadline):
                    return True
                if pressed_at is None:
                    return False
                deadline = None
                self._advise(
                    f"{describe_ranks(self.waiting_ranks())} did not stop: press again within "
                    f"{ESCALATE_S:.0f} s to kill and replace what still runs"
                )
            except KeyboardInterrupt:
                if has_escalated:
                    raise RanksInterrupted(
                        f"{describe_ranks(self.waiting_ranks())} did not stop: those that still "
                        f"run {self.title} are killed and replaced"
                    ) from None
                if is_leaving():
                    raise RanksInterrupted(
                        f"the kernel ends; {self.title} runs on, and `%dist_attach` finds it"
                    ) from None
                if not (self.waiting_ranks() or self._has_failed):  # as in a loop of short calls
                    raise RanksInterrupted(f"{self.title} ended as it was interrupted") from None
                now = time.monotonic()
                has_escalated = pressed_at is not None and now - pressed_at <= ESCALATE_S
                pressed_at = now
                deadline = None if has_escalated else now + STOP_S
                self._stop()

    def _attend(self, is_over: Callable[[], bool], deadline: float | None) -> bool:
        """Wait for a condition or the deadline, and show requests for input to the user; return
        whether the condition holds.
        """
        can_answer = threading.get_ident() == threading.main_thread().ident
        self._num_attending += can_answer
        try:
            while True:
                seen = self._news.last
                if is_over():
                    return True
                now, prompt = time.monotonic(), None
                if deadline is not None and now >= deadline:
                    return False
                until = now + LOOK_UP_S
                if can_answer and self._questions is not None:
                    prompt, due_at = self._next_prompt(now)
                    until = until if due_at is None else min(until, due_at)
                if prompt is not None:
                    self._put(prompt)
                    continue
                until = until if deadline is None else min(until, deadline)
                self._control.check_may_wait()
                self._news.wait(seen, until - now)
        finally:
            self._num_attending -= can_answer

    async def _await_until(self, is_over: Callable[[], bool]) -> None:
        """Wait for a condition in an asyncio loop; a request for input blocks the loop, as
        ``input()`` would. A cancelled task interrupts the run.
        """
        import asyncio  # takes 15 ms, and its caller has it

        if not is_over():
            self._control.check_may_wait()
        can_answer = threading.get_ident() == threading.main_thread().ident
        self._num_attending += can_answer
        try:
            while True:
                seen = self._news.last
                if is_over():
                    return
                now = time.monotonic()
                prompt, due_at = self._next_prompt(now) if can_answer else (None, None)
                if prompt is not None:
                    try:
                        self._put(prompt)
                    except KeyboardInterrupt:
                        self._stop()
                    continue
                waiter, wake = _make_waker()
                self._news.add(wake)
                if self._news.last is not seen:
                    continue
                try:
                    async with asyncio.timeout(None if due_at is None else max(0.0, due_at - now)):
                        await waiter
                except TimeoutError:
                    continue
                except asyncio.CancelledError:
                    self._stop()
                    raise
        finally:
            self._num_attending -= can_answer

    def _next_prompt(self, now: float) -> tuple[Prompt | None, float | None]:
        if self._questions is None:
            return None, None
        return self._questions.take_due(self.waiting_ranks(), now)

    def _put(self, prompt: Prompt) -> None:
        """Show a prompt to the user, and send the input to the ranks that requested it."""
        assert self._questions is not None
        answer = self._questions.put(prompt)
        if answer is not None:
            self._control.reply(*answer)

    def _stop(self) -> None:
        """Interrupt the run, and drop its requests for input."""
        if self._questions is not None:
            self._questions.withdraw(self.waiting_ranks())
        if not self._has_ended:
            self.interrupt()


def _as_cancelled(error: RanksInterrupted) -> RanksInterrupted:
    """Return an interrupt that is a cancellation, too: a KeyboardInterrupt that is raised in a task
    leaves the event loop, and so would end the kernel.
    """
    import asyncio

    bases = (RanksInterrupted, asyncio.CancelledError)
    kind: type[RanksInterrupted] = type(
        "RanksInterrupted", bases, {"__module__": RanksInterrupted.__module__}
    )
    return kind(*error.args)


def _call_all(calls: list[Callable[[], None]]) -> None:
    """Call functions in their order, all of them even if one raises."""
    try:
        while calls:
            calls.pop(0)()
    finally:
        if calls:
            _call_all(calls)


def _make_waker() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """Return a future of the running asyncio loop, and a function that resolves it from another
    thread.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            loop.call_soon_threadsafe(_resolve, waiter)

    return waiter, wake


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
