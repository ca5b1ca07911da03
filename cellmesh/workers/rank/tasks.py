"""Lets asynchronous cells and calls wait on a rank beside other work.

All asyncio tasks of a rank run in one event loop, on the main thread: those of calls that wait, and
those of an asynchronous cell for whose end the rank waits. While any task lives, the main thread
waits for its socket and for that loop's; else it never enters the loop. A task continues until it
ends, also after the end of the call that has made it, as in a notebook.

While a task executes, the rank executes the run (cell or call) that has made it: output is found by
the task's context (`RunTracker.current`), and an interrupt strikes only there. A call that waits is
cancelled in place of that (`asyncio.Task.cancel`).
"""

from __future__ import annotations

import collections
import math
import select
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...errors import MeshUsageError
from ...stdlib import os, threading
from ...wire.codec import Parcel
from ...wire.status import WaitingCall
from ..groups.ledger import Ledger
from ..run_tracker import IN_LOOP, RunTracker
from .interrupts import Cancellable, Interrupts
from .stack_inspection import (
    Cells,
    call_of,
    collector_off,
    format_stack,
    is_user_code,
    line_before,
    shorten_path,
)

if TYPE_CHECKING:
    import asyncio

    from ...wire.stream import Channel

_MAX_WAIT_S = 86_400.0  # as asyncio: `poll` takes no time that is much longer


class Steps(Coroutine[Any, Any, Any]):
    """The coroutine of a task; while it executes, the main thread is in the task's run.

    torch keeps grad mode and inference mode for each thread; here, each task has its own, as it may
    wait within ``torch.no_grad()`` while its rank trains.
    """

    def __init__(
        self, coroutine: Any, run: int, interrupts: Interrupts, note: Callable[..., None]
    ) -> None:
        self._coroutine, self._run = coroutine, run
        self._interrupts, self._note = interrupts, note
        self._has_grad = self._had_grad = torch.is_grad_enabled()
        self._without: torch.inference_mode | None = None  # while it waits in inference mode
        self.__name__ = getattr(coroutine, "__name__", type(coroutine).__name__)
        self.__qualname__ = getattr(coroutine, "__qualname__", self.__name__)

    def __getattr__(self, name: str) -> Any:  # such as `cr_frame`
        return getattr(self._coroutine, name)

    def __repr__(self) -> str:
        return repr(self._coroutine)

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def _step(self, act: Callable[..., Any], *args: Any) -> Any:
        interrupts, has_ended, had_grad = self._interrupts, True, torch.is_grad_enabled()
        torch.set_grad_enabled(self._has_grad)
        if self._without is not None:
            self._without.__exit__(None, None, None)
            self._without = None
        before = interrupts.enter(self._run)
        try:
            value = act(*args)
            has_ended = False
            return value
        except (KeyboardInterrupt, SystemExit) as error:  # they also end the loop
            self._note(error, self._run)
            raise
        finally:
            interrupts.leave(before)
            self._has_grad = torch.is_grad_enabled()
            if torch.is_inference_mode_enabled():
                self._without = torch.inference_mode(False)
                self._without.__enter__()
            # A task that ends in another mode has set it for what comes.
            if not has_ended or self._has_grad is self._had_grad:
                torch.set_grad_enabled(had_grad)


@dataclass(frozen=True)
class Call:
    """A call that waits on this rank; `num_before`: collectives that had begun before it did."""

    title: str
    awaited: Any
    num_before: int


class CollectiveOrder:
    """Refuses the collectives of asynchronous calls whose order could differ between ranks.

    Ranks begin their runs in the same order, and so the collectives of work that does not wait. A
    call that has waited goes on when its rank is told to by a timer, a socket or another task, and
    so sooner on one rank than on another. Two runs X and Y of which at least one waits may begin
    collectives in the order X, Y on one rank, and Y, X on another; on gloo these would be joined
    though they do not belong together. So a waiting call may begin a collective only if, on its
    rank, (1) no other call waits, and (2) no other run has begun a collective since the call
    began. If two runs begin collectives in different orders on two ranks, then on one of the two a
    waiting call begins its own after the other run's, and (2) refuses it; (1) refuses it already
    where that is only possible. Work that does not wait is never refused, nor are messages
    (``send``, ``recv``), nor groups of one rank.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        # The last run that has begun a collective and the last one before it that is another, each
        # with its collective's number.
        self._last = self._last_other = (-1, 0)

    def begin(self, name: str, run: int, calls: dict[int, Call]) -> None:
        """Record that a run begins a collective.

        Args:
            name: name of the collective.
            run: the run.
            calls: the calls that wait on this rank, by run.

        Raises:
            MeshUsageError: the run waits, and its collective may be out of order.
        """
        if (call := calls.get(run)) is not None:
            other = next((each.title for number, each in calls.items() if number != run), "")
            since = self._last if self._last[0] != run else self._last_other
            why = f"{other} waits on this rank, too" if other else ""
            if not why and since[1] > call.num_before:
                why = "other work has begun collectives since this call began"
            if why:
                raise MeshUsageError(
                    f"{call.title} may not begin {name}: {why}, and on another rank these could "
                    "go on in another order, so that their collectives would not match. Begin "
                    "collectives in a call that does not wait (`mesh.run`, a cell without "
                    "--nowait), or while nothing else waits"
                )
        self.num_begun += 1
        if run != self._last[0]:
            self._last_other = self._last
        self._last = run, self.num_begun


class Peers(Protocol):
    """The sockets of other ranks, which the main thread reads while it waits (`Handles`)."""

    def fileno(self) -> int: ...

    def poll(self, poll: select.poll, timeout_ms: float | None) -> list[tuple[int, int]]: ...

    def hear(self) -> None: ...


@dataclass(eq=False)
class Tasks:
    """The asyncio tasks of a rank, and the calls that wait beside its other work.

    Attributes:
        alive: tasks that have not ended; strong references, of which asyncio keeps none.
        calls: the calls that wait, by run.
        awaits_heal: whether work is held back until the rank is healed or resumed, as that of
            another rank has failed where others may wait for this one.
    """

    interrupts: Interrupts
    tracker: RunTracker
    ledger: Ledger
    alive: set[asyncio.Task[Any]] = field(default_factory=set)
    calls: dict[int, Call] = field(default_factory=dict)
    awaits_heal: bool = False
    wake: int = -1  # an eventfd that is readable once other ranks have called; -1 before the first
    _peers: Peers | None = None
    _arrived: collections.deque[Parcel[Any]] = field(default_factory=collections.deque)
    _order: CollectiveOrder = field(default_factory=CollectiveOrder)
    _loop: Any = None
    _poll: Any = None  # of the rank's socket and the loop's
    _poll_idle: Any = None  # of the rank's socket and `wake`
    # The last KeyboardInterrupt or SystemExit that has left a task, and so the loop; its run.
    _passed: tuple[BaseException | None, int] = (None, -1)

    # ---- calls

    def begin(self, run: int, title: str, awaited: Any, end: Callable[..., Any]) -> None:
        """Begin a call that waits: it executes up to its first wait in the next `turn`.

        Args:
            run: its run.
            title: its name for users.
            awaited: its coroutine, for descriptions.
            end: called with it, returns the coroutine that awaits it and sends the answer, without
                raising; it calls `forget` at its end.
        """
        with self.interrupts:
            self._let_cancel(run, self._get_loop().create_task(end(awaited)), interleaves=True)
            self.calls[run] = Call(title, awaited, self._order.num_begun)
            self.ledger.may_begin = self._may_begin

    def has_begun(self, run: int, outcome: object) -> bool:
        """Return whether a call waits; cancel it if it was interrupted just as it began.

        Args:
            run: its run.
            outcome: the exception that was raised since it was begun, if any.
        """
        if run in self.calls and isinstance(outcome, KeyboardInterrupt):
            self.interrupts.cancel(run, type(outcome))
        return run in self.calls

    def forget(self, run: int) -> None:
        """Record that a call no longer waits, as its answer is about to be sent."""
        self.calls.pop(run, None)
        self.interrupts.tasks.pop(run, None)
        if not self.calls:
            self.ledger.may_begin = None

    def _may_begin(self, name: str) -> None:
        """Check that this thread may begin a collective now (`CollectiveOrder`)."""
        is_of_main = self.ledger.gate.is_main()
        run = self.interrupts.running if is_of_main else self.tracker.current()
        self._order.begin(name, run, self.calls)

    # ---- the loop

    def let_wake(self, peers: Peers) -> None:
        """Let work of other ranks arrive (`add`)."""
        self._peers, self._poll = peers, None
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, parcel: Parcel[Any]) -> None:
        """Add work of another rank; usable on any thread."""
        self._arrived.append(parcel)
        if threading.current_thread() is not threading.main_thread():
            os.eventfd_write(self.wake, 1)

    def go_on(self) -> None:
        """Let work go on without a heal; usable on any thread."""
        self.awaits_heal = False
        os.eventfd_write(self.wake, 1)

    def take(self) -> Iterator[Parcel[Any]]:
        """Remove and yield the work of other ranks that has arrived."""
        while self._arrived:
            yield self._arrived.popleft()

    def wait(self, channel: Channel) -> bool:
        """Wait for work while no task lives; return whether the channel has a message."""
        assert self._peers is not None
        if self._poll_idle is None:
            self._poll_idle = select.poll()
            for descriptor in (channel.fileno(), self.wake, self._peers.fileno()):
                self._poll_idle.register(descriptor, select.POLLIN)
        while not (channel.has_message or self._arrived):
            ready = dict(self._peers.poll(self._poll_idle, None))
            if self.wake in ready:
                os.eventfd_read(self.wake)
            if self._peers.fileno() in ready:
                self.tracker.main_run = IN_LOOP  # else this would print nothing
                self._peers.hear()
                self.tracker.main_run = -1
            if not ready.keys().isdisjoint((channel.fileno(), self.wake)):
                return channel.fileno() in ready
        return channel.has_message

    def turn(self, channel: Channel, is_short: bool) -> bool:
        """Let tasks execute until work arrives; if there is work, those that can go on now.

        The loop is entered only for these: a call beside tasks that wait costs one `poll` more.

        Args:
            channel: the channel of the rank's work.
            is_short: whether there is work.

        Returns:
            Whether the channel has a message.
        """
        loop = self._get_loop()
        if self._poll is None:
            self._poll = select.poll()
            peers = () if self._peers is None else (self.wake, self._peers.fileno())
            for descriptor in (channel.fileno(), loop._selector.fileno(), *peers):
                self._poll.register(descriptor, select.POLLIN)
        is_short = is_short or channel.has_message or bool(self._arrived)
        self.tracker.main_run = IN_LOOP
        try:
            while True:
                due_ms = self._due_ms()
                if is_short or due_ms == 0 or self._peers is None:
                    ready = dict(self._poll.poll(0 if is_short else due_ms))
                else:
                    ready = dict(self._peers.poll(self._poll, due_ms))
                if due_ms == 0 or loop._selector.fileno() in ready:
                    loop.stop()  # after one pass
                    self._execute(loop.run_forever, -1)
                if self.wake in ready:
                    os.eventfd_read(self.wake)
                if self._peers is not None and self._peers.fileno() in ready:
                    self._peers.hear()
                is_short = is_short or bool(self._arrived)
                if is_short or not ready.keys().isdisjoint((channel.fileno(), self.wake)):
                    return channel.has_message or channel.fileno() in ready
        finally:
            self.tracker.main_run = -1

    def _due_ms(self) -> int | None:
        """Return when a task can go on without a message; None if none can."""
        if self._loop._ready:
            return 0
        if not (timers := self._loop._scheduled):
            return None
        left_s: float = timers[0].when() - self._loop.time()
        return math.ceil(1e3 * min(_MAX_WAIT_S, max(0.0, left_s)))

    def run(self, coroutine: Any) -> Any:
        """Execute a coroutine of the current run to its end, and return its result; waiting calls
        go on at the same time. An interrupt cancels it.
        """
        loop, run = self._get_loop(), self.interrupts.running
        if loop.is_running():
            return loop.run_until_complete(coroutine)  # raises, as in a notebook
        task = loop.create_task(coroutine)
        self._let_cancel(run, task)
        error: BaseException | None = None
        try:
            while not task.done():
                try:
                    self._execute(lambda: loop.run_until_complete(task), run)
                except BaseException as raised:
                    if not task.done():  # raised by a signal handler of user code, or `loop.stop`
                        error = raised
                        task.cancel()
        finally:
            self.interrupts.tasks.pop(run, None)
        if error is not None:
            raise error
        return task.result()

    def _execute(self, act: Callable[[], object], run: int) -> None:
        """Execute the loop for a run (-1: for none), until `act` returns or an interrupt or exit
        has left it that a task has got as well.
        """
        self.interrupts.wait_in(run)
        try:
            act()
        except (KeyboardInterrupt, SystemExit) as error:
            passed, of = self._passed
            if error is not passed:
                raise
            if (call := self.interrupts.tasks.get(of)) is not None:
                call.cancel()  # a task that it may not await has been interrupted
        finally:
            self._passed = None, -1
            self.interrupts.wait_in(run, is_over=True)

    def _let_cancel(self, run: int, task: asyncio.Task[Any], interleaves: bool = False) -> None:
        loop = self._get_loop()
        schedule = loop.call_soon_threadsafe
        # Not now: before its first step, a call would end without an answer.
        cancel = Cancellable(lambda: schedule(task.cancel), schedule, interleaves)
        self.interrupts.tasks[run] = cancel

    def _note_passed(self, error: BaseException, run: int) -> None:
        self._passed = error, run

    def _get_loop(self) -> Any:
        if self._loop is None or self._loop.is_closed():
            import asyncio

            self._loop, self._poll = asyncio.SelectorEventLoop(), None
            self._loop.set_task_factory(self._make_task)
        return self._loop

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        import asyncio

        steps = Steps(coroutine, self.tracker.current(), self.interrupts, self._note_passed)
        task = asyncio.Task(steps, loop=loop, **options)
        self.alive.add(task)
        task.add_done_callback(self.alive.discard)
        return task


async def awaiting(value: Awaitable[Any]) -> Any:
    """Await any awaitable, of which a task takes only coroutines."""
    return await value


def _frames_of(awaited: Any) -> list[types.FrameType]:
    """Return the frames of a coroutine and of those that it awaits, innermost first."""
    frames: list[types.FrameType] = []
    with collector_off():
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            frames.insert(0, frame)
            awaited = awaited.cr_await
    return frames


def describe_waiting(calls: dict[int, Call], shell: Cells) -> tuple[WaitingCall, ...]:
    """Return which calls wait, and where. Usable on any thread."""
    found = [  # not by `tuple()`, which fails if the main thread calls `gc.get_objects` as it reads
        WaitingCall(run, call.title, _where(_frames_of(call.awaited), shell))
        for run, call in calls.copy().items()
    ]
    return (*found,)


def _where(frames: Sequence[types.FrameType], shell: Cells) -> str:
    frame = next(filter(is_user_code, frames), None)
    if frame is None:
        return ""
    name, call = frame.f_code.co_filename, call_of(frame.f_code, frame.f_lasti)
    call = call.removeprefix("await ").partition("(")[0]
    place = f"In[{cell}]" if (cell := shell.cell_of(name)) else shorten_path(name)
    line = frame.f_lineno or line_before(frame.f_code, frame.f_lasti)
    return f"{f'in {call} ' if call else ''}at {place} line {line}"


def format_waiting(calls: dict[int, Call], shell: Cells) -> str:
    """Return text with the stack of each call that waits. Usable on any thread."""
    return "".join(
        f"{call.title}, which waits:\n{format_stack(_frames_of(call.awaited), shell)}"
        for call in calls.copy().values()
    )
