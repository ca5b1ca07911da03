"""The open requests for input of one run's ranks; equal requests are answered together."""

from __future__ import annotations

import builtins
import signal
import threading
from collections.abc import Callable, Collection, Mapping

import msgspec

from ..stdlib import time
from ..wire.verbs import InputRequest
from .output.mime_bundle import label

# How long to wait for more ranks to send an equal request.
GATHER_S = 0.2


class Prompt(msgspec.Struct, frozen=True):
    """A prompt for input that the user sees once for all ranks with equal requests.

    Attributes:
        requests: rank -> the number of its request.
        text: prompt text of the ranks.
        is_password: whether the input is hidden.
    """

    requests: Mapping[int, int]
    text: str
    is_password: bool

    @property
    def labelled(self) -> str:
        """The prompt text with a label of the requesting ranks, such as ``[0-3] name? ``."""
        return f"{label(tuple(sorted(self.requests)))} {self.text}"


class Questions:
    """The open requests for input of a run's ranks, at most one per rank; the main thread shows
    them to the user while it waits for the run.

    Attributes:
        open: rank -> its request, and when it was received.
    """

    def __init__(self) -> None:
        self.open: dict[int, tuple[InputRequest, float]] = {}
        self._lock = threading.RLock()
        self._answered_at = float("-inf")
        self._box: Prompt | None = None  # the prompt that the user sees
        self._is_box_withdrawn = False

    def add(
        self,
        ranks: Collection[int],
        ask: InputRequest,
        now: float,
        running: Collection[int],
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Add a request for input that these ranks have sent.

        Args:
            ranks: the requesting ranks.
            ask: their request.
            now: current time, in seconds.
            running: the ranks that have not ended the run.
            before: called first if the request is due at once; a waiting thread sees the request
                only after the function has returned.
        """
        with self._lock:
            self.open.update(dict.fromkeys(ranks, (ask, now)))
            if self._due_at(running) == float("-inf"):
                before()

    def withdraw(self, ranks: Collection[int], request: int | None = None) -> None:
        """Drop these ranks' requests for input, or only those with the number `request` if it is
        given; close the input box if no rank waits for it any longer.
        """
        with self._lock:
            for rank in ranks:
                if rank in self.open and request in (None, self.open[rank][0].request):
                    del self.open[rank]
            if self._box is not None and not self._waiting(self._box):
                self._is_box_withdrawn = True
                self._box = None
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)

    def take_due(self, running: Collection[int], now: float) -> tuple[Prompt | None, float | None]:
        """Return the prompt to show to the user now, if any, and the time at which the next is due.

        Args:
            running: the ranks that have not ended the run; once all of them have equal requests,
                the prompt is due at once.
            now: current time, in seconds.
        """
        with self._lock:
            due_at = self._due_at(running)
            return self.first() if due_at is not None and now >= due_at else None, due_at

    def put(self, prompt: Prompt) -> tuple[Mapping[int, int], str, bool] | None:
        """Show a prompt to the user and wait for the input. Blocks.

        Returns:
            The requests to answer (rank -> request), the text, and whether the user ended the input
            instead; None if no rank waits for it any longer.

        Raises:
            KeyboardInterrupt: the user pressed the stop button.
        """
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
                return None
            raise
        waiting = self.close(prompt, time.monotonic())
        return (waiting, text, is_end) if waiting else None

    def close(self, prompt: Prompt, now: float) -> Mapping[int, int]:
        """Close a prompt that the user has answered; return the requests (rank -> request) to
        which the answer must be sent.
        """
        with self._lock:
            waiting = self._waiting(prompt)
            for rank in waiting:
                del self.open[rank]
            self._answered_at = now
            return waiting

    def first(self) -> Prompt | None:
        """Return the prompt to show to the user next, if any."""
        with self._lock:
            if not self.open:
                return None
            oldest, _ = min(self.open.values(), key=lambda question: question[1])
            alike = {
                rank: ask.request
                for rank, (ask, _) in sorted(self.open.items())
                if (ask.prompt, ask.is_password) == (oldest.prompt, oldest.is_password)
            }
            return Prompt(alike, oldest.prompt, oldest.is_password)

    def _due_at(self, running: Collection[int]) -> float | None:
        first = self.first()
        if first is None:
            return None
        if set(first.requests) >= set(running):
            return float("-inf")
        asked_at = min(self.open[rank][1] for rank in first.requests)
        # Ranks that were just answered may be about to ask again, as in a debugger.
        return max(asked_at, self._answered_at) + GATHER_S

    def _waiting(self, prompt: Prompt) -> dict[int, int]:
        return {
            rank: request
            for rank, request in prompt.requests.items()
            if rank in self.open and self.open[rank][0].request == request
        }


def ask_user(prompt: Prompt) -> tuple[str, bool]:
    """Show a prompt to the user, in the notebook's input box or on the console. Blocks.

    Returns:
        The typed text, and whether the input was ended instead; in that case the text is the
        reason, or "".

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C or the stop button.
    """
    try:
        # ipykernel replaces both functions by its own while a cell runs.
        if prompt.is_password:
            import getpass

            return getpass.getpass(prompt.labelled), False
        return builtins.input(prompt.labelled), False
    except EOFError:
        return "", True
    except (RuntimeError, OSError) as error:  # IPython's StdinNotImplementedError among them
        return f"nobody can answer {prompt.text!r} here: {error}", True
