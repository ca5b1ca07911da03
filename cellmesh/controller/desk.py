"""Where a run's user waits: news come in, questions are answered, and the stop button is heard."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ..errors import RanksInterrupted
from ..stdlib import time
from ..wire.messages import Ask
from ..wire.ranks import describe_ranks
from .asking import Prompt, Prompts, ask_user
from .flight import ESCALATE_S, STOP_S
from .kernel import is_leaving

# How long a question may stand open before it is told that nobody waits who could answer it.
_UNATTENDED_S = 1.0
# A signal that comes just before a thread begins to wait does not end the wait: its handler runs at the next
# look around.
_LOOK_UP_S = 0.5

Reply = Callable[[Mapping[int, int], str, bool], None]


class Desk:
    """Where the user waits for one run.

    Questions are put to the user by the main thread, while it waits here.

    Args:
        running: gives the ranks that have not ended the run.
        interrupt: interrupts the run; again soon after kills what has not stopped.
        reply: answers ranks, given rank -> request, the text, and whether it is the end of input.
        note: shows a remark.
        title: what to call the run.
        condemned: gives the ranks that are about to be killed; None for all that run.
    """

    def __init__(
        self,
        running: Callable[[], Sequence[int]],
        interrupt: Callable[[], None],
        reply: Reply,
        note: Callable[[str], None],
        title: str,
        condemned: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self._running = running
        self._interrupt = interrupt
        self._reply = reply
        self._note = note
        self._title = title
        self._condemned = condemned or running
        self._news = threading.Condition()
        self._wakers: list[Callable[[], None]] = []  # of who awaits news
        self._prompts = Prompts()
        self._num_attending = 0  # who wait and can answer
        self._box: Prompt | None = None  # the question that the user sees
        self._is_box_withdrawn = False

    # ---- from the link's thread

    @property
    def has_questions(self) -> bool:
        """Whether a rank waits for the user."""
        return bool(self._prompts)

    def tell_news(self) -> None:
        """Something has happened that somebody may wait for."""
        with self._news:
            self._news.notify_all()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def add(
        self, ranks: Sequence[int], ask: Ask, now: float, before: Callable[[], None] = lambda: None
    ) -> None:
        """These ranks ask the user.

        Args:
            ranks: the ranks.
            ask: what they ask.
            now: seconds.
            before: called before the question is put to the user, if that is at once, as all ranks that run
                now ask the same; a thread that waits sees no question until it has returned.
        """
        with self._news:
            self._prompts.add(ranks, ask, now)
            if self._prompts.due_at(self._running()) == float("-inf"):
                before()
            is_attended = self._num_attending > 0
        if not is_attended:
            timer = threading.Timer(_UNATTENDED_S, self._note_unattended)
            timer.daemon = True
            timer.start()
        self.tell_news()

    def withdraw(self, ranks: Sequence[int], request: int | None = None) -> None:
        """These ranks no longer ask (this, where it is named); an empty box is taken from the user."""
        with self._news:
            self._prompts.withdraw(ranks, request)
            if self._box is not None and not self._prompts.waits(self._box):
                self._is_box_withdrawn = True
                self._box = None
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
        self.tell_news()

    # ---- from any thread

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait, answering questions. The stop button interrupts the run, and then kills what did not stop.

        Args:
            is_over: what is waited for; news that change it are told with `tell_news`.
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
                self._note(
                    f"{describe_ranks(self._running())} did not stop: press again within {ESCALATE_S:.0f} s "
                    "to kill and replace what still runs"
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

    async def await_until(self, is_over: Callable[[], bool]) -> None:
        """Wait while the loop runs on; a question stops it, as ``input()`` would. Giving up interrupts."""
        with self._attending() as can_answer:
            while True:
                with self._news:
                    if is_over():
                        return
                    now = time.monotonic()
                    prompt, due_at = self._next_prompt(now) if can_answer else (None, None)
                    waiter, wake = _make_waker()
                    self._wakers.append(wake)
                if prompt is not None:
                    try:
                        self._put(prompt)
                    except KeyboardInterrupt:
                        self._drop_questions()
                        self._interrupt()
                    continue
                try:
                    async with asyncio.timeout(None if due_at is None else max(0.0, due_at - now)):
                        await waiter
                except TimeoutError:
                    continue
                except asyncio.CancelledError:
                    self._interrupt()
                    raise

    # ---- inside

    def _attend(self, is_over: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until it is over or the time has come, and put questions to the user meanwhile."""
        with self._attending() as can_answer:
            while True:
                prompt = None
                with self._news:
                    while prompt is None:
                        if is_over():
                            return True
                        now = time.monotonic()
                        if deadline is not None and now >= deadline:
                            return False
                        prompt, due_at = self._next_prompt(now) if can_answer else (None, None)
                        if prompt is None:
                            times = [at for at in (deadline, due_at) if at is not None]
                            self._news.wait(max(0.0, min([*times, now + _LOOK_UP_S]) - now))
                self._put(prompt)

    @contextlib.contextmanager
    def _attending(self) -> Iterator[bool]:
        can_answer = threading.current_thread() is threading.main_thread()
        self._num_attending += can_answer
        try:
            yield can_answer
        finally:
            self._num_attending -= can_answer

    def _next_prompt(self, now: float) -> tuple[Prompt | None, float | None]:
        """The question to put to the user now, and when there will be one, if there is none."""
        running = self._running()
        return self._prompts.take_due(running, now), self._prompts.due_at(running)

    def _put(self, prompt: Prompt) -> None:
        """Put a question to the user, and answer the ranks that ask it."""
        try:
            try:
                with self._news:
                    self._is_box_withdrawn = False
                    self._box = prompt
                text, is_end = ask_user(prompt)
            finally:
                with self._news:
                    self._box = None
        except KeyboardInterrupt:
            if self._is_box_withdrawn:
                return
            raise
        with self._news:
            waiting = self._prompts.close(prompt, time.monotonic())
        if waiting:
            self._reply(waiting, text, is_end)

    def _describe_rest(self) -> str:
        """What becomes of the ranks that have not stopped when the user no longer waits for them."""
        running, condemned = self._running(), set(self._condemned())
        parts = [
            f"{describe_ranks(ranks)} did not stop, and {what}"
            for ranks, what in (
                ([rank for rank in running if rank in condemned], "will be killed and replaced"),
                ([rank for rank in running if rank not in condemned], "nobody waits for it any longer"),
            )
            if ranks
        ]
        return "; ".join(parts) or f"{self._title} was interrupted"

    def _drop_questions(self) -> None:
        """What asks is being interrupted: do not ask it again meanwhile."""
        with self._news:
            self._prompts.withdraw(self._running())

    def _note_unattended(self) -> None:
        with self._news:
            prompt = self._prompts.first() if not self._num_attending else None
        if prompt is not None:
            self._note(
                f"{prompt.labelled.rstrip()} (asked by {self._title}, and nobody waits for it: call "
                "`.result()` on the run to answer)"
            )


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
