"""Requests of the core to the control threads of ranks, and a time limit for their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ...wire.codec import Parcel, encode
from ...wire.groups import Heal
from ...wire.messages import Control, Relay, Resume
from .effects import Effect, Send

# How long a request waits: user code may keep a rank's control thread from running.
ANSWER_S = 1.0

OnAnswers = Callable[[dict[int, Any], float], list[Effect]]


class _Question(msgspec.Struct):
    ranks: set[int]  # ranks that have not answered
    deadline: float
    on_answers: OnAnswers
    answers: dict[int, Any] = msgspec.field(default_factory=dict)


class Questions:
    """The core's requests to ranks that are not fully answered.

    Args:
        last_request: numbers begin above this one, so that a late answer to an earlier controller
            is not taken for an answer to this one.

    Attributes:
        open: the requests by their numbers.
    """

    def __init__(self, last_request: int = 0) -> None:
        self.open: dict[int, _Question] = {}
        self._last_request = last_request

    def new_request(self) -> int:
        """Return a new number for a request to ranks or to the agent."""
        self._last_request += 1
        return self._last_request

    def ask(
        self,
        ranks: Iterable[int],
        verb: Callable[[int], Control],
        now: float,
        on_answers: OnAnswers,
        request: int = 0,
    ) -> list[Effect]:
        """Send a request to the control threads of ranks, and call a handler with their answers.

        Args:
            ranks: ranks to ask; if there are none, the handler is called at once.
            verb: makes the request's message from its number.
            now: current time in seconds.
            on_answers: handler of rank -> answer, called once all ranks have answered or the time
                is over.
            request: the request's number; 0 for a new one.
        """
        wanted = set(ranks)
        if not wanted:
            return on_answers({}, now)
        request = request or self.new_request()
        self.open[request] = _Question(wanted, now + ANSWER_S, on_answers)
        return [control(wanted, verb(request))]

    def answer(self, request: int, ranks: Iterable[int], value: Any, now: float) -> list[Effect]:
        """Record the answer of ranks to a request; call its handler once all have answered."""
        question = self.open.get(request)
        if question is None:
            return []
        question.answers.update(dict.fromkeys(ranks, value))
        question.ranks.difference_update(ranks)
        return [] if question.ranks else self._close([request], now)

    def forget_rank(self, rank: int, now: float) -> list[Effect]:
        """Stop waiting for answers of a rank that has died."""
        for question in self.open.values():
            question.ranks.discard(rank)
        return self._close([number for number, one in self.open.items() if not one.ranks], now)

    def tick(self, now: float) -> list[Effect]:
        """Call the handlers of requests whose time is over with the answers so far."""
        return self._close([n for n, one in self.open.items() if now >= one.deadline], now)

    def deadline(self) -> float | None:
        """Return when to call `tick` at the latest, in seconds; None if no request is open."""
        return min((question.deadline for question in self.open.values()), default=None)

    def close_all(self, now: float) -> list[Effect]:
        """Call the handlers of all open requests with the answers so far: no more will follow."""
        return self._close(list(self.open), now)

    def _close(self, requests: Iterable[int], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request in requests:  # a handler may close another request
            if (question := self.open.pop(request, None)) is not None:
                effects += question.on_answers(question.answers, now)
        return effects


def control(ranks: Iterable[int], *verbs: Control) -> Send:
    """Return the effect that sends messages to the control threads of ranks."""
    frames = encode([*map(Parcel, verbs)])
    return Send(Parcel(Relay(tuple(sorted(ranks)), "control", -1, len(frames)), tuple(frames)))


def work(ranks: Iterable[int], verb: Heal | Resume, run: int) -> Send:
    """Return the effect that sends work of the core itself to the main threads of ranks."""
    frames = encode([Parcel(verb)])
    title = "heal" if run >= 0 else ""
    return Send(Parcel(Relay(tuple(sorted(ranks)), "work", run, len(frames), title), tuple(frames)))
