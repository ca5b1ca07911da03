"""The open requests for input of one run's ranks; equal requests are answered together. Pure but
for `ask_user`.
"""

from __future__ import annotations

import builtins
import getpass
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..wire.user_code import InputRequest
from .output.mime_bundle import label

# How long ranks that ask alike may take to come together.
GATHER_S = 0.2


@dataclass(frozen=True)
class Prompt:
    """One request for input as it is put to the user, for all ranks that ask the same.

    Attributes:
        requests: rank -> the number of its question.
        text: what the ranks ask.
        is_password: what is typed is not shown.
    """

    requests: Mapping[int, int]
    text: str
    is_password: bool

    @property
    def labelled(self) -> str:
        """The prompt after the label of the ranks that ask: ``[0-3] name? ``."""
        return f"{label(tuple(sorted(self.requests)))} {self.text}"


@dataclass(frozen=True)
class _Open:
    request: int
    text: str
    is_password: bool
    asked_at: float


class Prompts:
    """The open requests for input of a run's ranks: one at most for each rank.

    Attributes:
        open: the requests, by rank.
    """

    def __init__(self) -> None:
        self.open: dict[int, _Open] = {}
        self._answered_at = float("-inf")

    def add(self, ranks: Collection[int], ask: InputRequest, now: float) -> None:
        """Add a request for input that these ranks have sent."""
        question = _Open(ask.request, ask.prompt, ask.is_password, now)
        self.open.update(dict.fromkeys(ranks, question))

    def withdraw(self, ranks: Collection[int], request: int | None = None) -> None:
        """Drop the requests for input of these ranks, or the one of this number."""
        for rank in ranks:
            if rank in self.open and request in (None, self.open[rank].request):
                del self.open[rank]

    def waits(self, prompt: Prompt) -> bool:
        """Return whether a rank still waits for the answer to a prompt."""
        return any(
            rank in self.open and self.open[rank].request == request
            for rank, request in prompt.requests.items()
        )

    def close(self, prompt: Prompt, now: float) -> Mapping[int, int]:
        """Close a prompt that was answered; return the ranks, with their requests, that still wait
        for it.
        """
        waiting = {
            rank: request
            for rank, request in prompt.requests.items()
            if rank in self.open and self.open[rank].request == request
        }
        for rank in waiting:
            del self.open[rank]
        self._answered_at = now
        return waiting

    def due_at(self, running: Collection[int]) -> float | None:
        """Return when the next prompt is to be put to the user; None if there is none.

        Args:
            running: the ranks that have not ended the run: if all of them ask alike, no more is
                waited for.
        """
        if not self.open:
            return None
        first = self._first()
        if set(first.requests) >= set(running):
            return float("-inf")
        asked_at = min(self.open[rank].asked_at for rank in first.requests)
        # Those that were just answered may be about to ask again, as in a debugger.
        return max(asked_at, self._answered_at) + GATHER_S

    def take_due(self, running: Collection[int], now: float) -> Prompt | None:
        """Return the prompt to put to the user now, if any; it stays open until `close`."""
        due_at = self.due_at(running)
        return self._first() if due_at is not None and now >= due_at else None

    def first(self) -> Prompt | None:
        """Return the prompt that is put to the user next."""
        return self._first() if self.open else None

    def _first(self) -> Prompt:
        oldest = min(self.open.values(), key=lambda question: question.asked_at)
        alike = {
            rank: question.request
            for rank, question in self.open.items()
            if (question.text, question.is_password) == (oldest.text, oldest.is_password)
        }
        return Prompt(dict(sorted(alike.items())), oldest.text, oldest.is_password)


def ask_user(prompt: Prompt) -> tuple[str, bool]:
    """Put a prompt to the user, in the notebook's input box or on the console. Blocks.

    Returns:
        What was typed, and whether the input was ended instead; then the text says why, if there is
        a reason.

    Raises:
        KeyboardInterrupt: Ctrl-C, or the stop button.
    """
    try:
        # In a kernel, these are the kernel's while a cell runs.
        if prompt.is_password:
            return getpass.getpass(prompt.labelled), False
        return builtins.input(prompt.labelled), False
    except EOFError:
        return "", True
    except (RuntimeError, OSError) as error:  # IPython's StdinNotImplementedError among them
        return f"nobody can answer {prompt.text!r} here: {error}", True
