"""Waits for a run: asks the user what ranks ask, and handles the stop button."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ..errors import RanksInterrupted
from ..stdlib import time
from ..wire.ranks import describe_ranks
from ..wire.user_code import InputRequest
from .core.runs import ESCALATE_S, STOP_S
from .kernel import is_leaving
from .news import LOOK_UP_S, News
from .stdin import Prompt, Prompts, ask_user

# How long a question may stand open before it is told that nobody waits who could answer it.
_UNATTENDED_S = 1.0


class RunControl(Protocol):
    """Protocol of what a run's waiter may do through the session: interrupt the run, answer
    questions.
    """

    def check_may_wait(self) -> None:
        """Raise an error if the caller is a callback in the link's loop, or in a forked process."""

    def interrupt_run(self, number: int, ranks: Sequence[int]) -> None:
        """Interrupt a run on its ranks; a second call soon after kills ranks that do not stop."""

    def begin_wait(self, number: int, ranks: Sequence[int]) -> None:
        """Note that the user waits for a run's end on these ranks, and submits nothing else."""

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool = False) -> None:
        """Send ranks (rank -> request) the user's input that they asked for, or end of file."""

    def condemned(self) -> Collection[int]:
        """Return the ranks that the agent will kill unless they react to an interrupt before."""


class RunWaiter:
    """Waits for one run on behalf of the user.

    Questions are put to the user by the main thread, while it waits here.

    Args:
        running: gives the ranks that have not ended the run.
        interrupt: interrupts the run; again soon after kills what has not stopped.
        note: shows a remark.
        advise: shows a remark until the run has ended.
        title: what to call the run.
        control: the session.
    """

    def __init__(
        self,
        running: Callable[[], Sequence[int]],
        interrupt: Callable[[], None],
        note: Callable[[str], None],
        advise: Callable[[str], None],
        title: str,
        control: RunControl,
    ) -> None:
        self._running = running
        self._interrupt = interrupt
        self._note = note
        self._advise = advise
        self._title = title
        self._control = control
        self._news = News()
        self._lock = threading.RLock()  # of the prompts
        self._prompts = Prompts()
        self._num_attending = 0  # who wait and can answer
        self._box: Prompt | None = None  # the question that the user sees
        self._is_box_withdrawn = False

    # ---- from the link's loop

    @property
    def has_questions(self) -> bool:
        """Whether a rank waits for the user to answer a request for input."""
        return bool(self._prompts.open)

    def end(self) -> None:
        """Note that the run has ended. The waiter holds no reference to the run, so that its values
        go when the user drops it.
        """
        self._running, self._interrupt, self._advise = list, _do_nothing, _say_nothing
        self._news.report()

    def add(
        self,
        ranks: Sequence[int],
        ask: InputRequest,
        now: float,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Add a request for input of these ranks, to be put to the user.

        Args:
            ranks: the ranks.
            ask: what they ask.
            now: seconds.
            before: called before the question is put to the user, if that is at once, as all ranks
                that run now ask the same; a thread that waits sees no question until it has
                returned.
        """
        with self._lock:
            self._prompts.add(ranks, ask, now)
            if self._prompts.due_at(self._running()) == float("-inf"):
                before()
            is_attended = self._num_attending > 0
        if not is_attended:
            timer = threading.Timer(_UNATTENDED_S, self._note_unattended)
            timer.daemon = True
            timer.start()
        self._news.report()

    def withdraw(self, ranks: Sequence[int], request: int | None = None) -> None:
        """Drop the requests for input of these ranks, or one of them; close an input box that no
        rank waits for.
        """
        if not self._prompts.open and self._box is None:
            self._news.report()
            return
        with self._lock:
            self._prompts.withdraw(ranks, request)
            if self._box is not None and not self._prompts.waits(self._box):
                self._is_box_withdrawn = True
                self._box = None
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
        self._news.report()

    # ---- from any thread

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait, and put requests for input to the user. The stop button interrupts the run; pressed
        again, it kills ranks that did not stop.

        Args:
            is_over: what is waited for; each change of it is reported to this waiter.
            timeout_s: how long, in seconds, unless the button is pressed; None as long as it takes.

        Returns:
            Whether it is over, rather than the time.

        Raises:
            RanksInterrupted: the user gave up.
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
                    f"{describe_ranks(self._running())} did not stop: press again within "
                    f"{ESCALATE_S:.0f} s to kill and replace what still runs"
                )
            except KeyboardInterrupt:
                if has_escalated:
                    raise RanksInterrupted(self._describe_rest()) from None
                self._drop_questions()
                if is_leaving():
                    raise RanksInterrupted(
                        f"the kernel ends; {self._title} runs on, and `%dist_attach` finds it"
                    ) from None
                now = time.monotonic()
                has_escalated = pressed_at is not None and now - pressed_at <= ESCALATE_S
                pressed_at = now
                deadline = None if has_escalated else now + STOP_S
                self._interrupt()

    def wait_beside(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait; ask the user nothing, and let the stop button end only this wait.

        Returns:
            Whether it is over, rather than the time.
        """
        if is_over() or timeout_s == 0:
            return is_over()
        self._control.check_may_wait()
        return self._news.wait_for(is_over, timeout_s)

    async def await_until(self, is_over: Callable[[], bool]) -> None:
        """Wait in an asyncio loop; a request for input blocks the loop, as ``input()`` would.
        Cancelling interrupts the run.
        """
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
                        self._drop_questions()
                        self._interrupt()
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
                    self._interrupt()
                    raise
        finally:
            self._num_attending -= can_answer

    # ---- inside

    def _attend(self, is_over: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until the run is over or the time is up, and put requests for input to the user."""
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
                if can_answer and self._prompts.open:
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

    def _next_prompt(self, now: float) -> tuple[Prompt | None, float | None]:
        """Return the prompt to put to the user now, and when to look for the next."""
        with self._lock:
            running = self._running()
            return self._prompts.take_due(running, now), self._prompts.due_at(running)

    def _put(self, prompt: Prompt) -> None:
        """Put a prompt to the user, and send the answer to the ranks that ask for it."""
        try:
            try:
                with self._lock:
                    self._is_box_withdrawn = False
                    self._box = prompt
                text, is_end = ask_user(prompt)
            finally:
                with self._lock:
                    self._box = None
        except KeyboardInterrupt:
            if self._is_box_withdrawn:
                return
            raise
        with self._lock:
            waiting = self._prompts.close(prompt, time.monotonic())
        if waiting:
            self._control.reply(waiting, text, is_end)

    def _describe_rest(self) -> str:
        """Describe what happens to the ranks that have not stopped, once the user stops waiting for
        them.
        """
        running, condemned = self._running(), set(self._control.condemned())
        parts = [
            f"{describe_ranks(ranks)} did not stop, and {what}"
            for ranks, what in (
                ([rank for rank in running if rank in condemned], "will be killed and replaced"),
                (
                    [rank for rank in running if rank not in condemned],
                    "nobody waits for it any longer",
                ),
            )
            if ranks
        ]
        return "; ".join(parts) or f"{self._title} was interrupted"

    def _drop_questions(self) -> None:
        """Drop the requests for input of ranks that are being interrupted."""
        with self._lock:
            self._prompts.withdraw(self._running())

    def _note_unattended(self) -> None:
        with self._lock:
            prompt = self._prompts.first() if not self._num_attending else None
        if prompt is not None:
            self._note(
                f"{prompt.labelled.rstrip()} (asked by {self._title}, and nobody waits for it: "
                "call `.result()` on the run to answer)"
            )


def _do_nothing() -> None:
    """Stand in for `Run.interrupt` after the run has ended."""


def _say_nothing(text: str) -> None:
    """Stand in for the run's advice on how to stop ranks, after the run has ended."""


def _make_waker() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """Return a future of the running asyncio loop, and a function that resolves it from another
    thread.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            loop.call_soon_threadsafe(_resolve, waiter)

    return waiter, wake


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
