"""Requests of the core to ranks' control threads; handled with the answers of the ranks that reply
in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...wire.codec import Parcel, encode
from ...wire.groups import Heal
from ...wire.messages import Control, Relay, Resume
from .effects import Effect, Send

# A rank whose control thread cannot get a word in is reported without its answer.
ANSWER_S = 1.0

OnAnswers = Callable[[dict[int, Any], float], list[Effect]]


@dataclass
class _Question:
    ranks: set[int]  # that have not answered
    deadline: float
    on_answers: OnAnswers
    answers: dict[int, Any] = field(default_factory=dict)


class Questions:
    """The core's requests to ranks that still wait for answers.

    Args:
        last_request: numbers begin above this. A late answer to a controller that has gone must not
            be taken for one to its successor.

    Attributes:
        open: the questions by their numbers.
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
        """Send a request to some ranks' control threads, and have the answers handled.

        Args:
            ranks: who; if there is none, the answer is empty and comes at once.
            verb: the question, given its number.
            now: seconds.
            on_answers: what to do with rank -> answer, when all have answered or none more is
                waited for.
            request: the question's number, if it has one already.
        """
        wanted = set(ranks)
        if not wanted:
            return on_answers({}, now)
        request = request or self.new_request()
        self.open[request] = _Question(wanted, now + ANSWER_S, on_answers)
        return [control(wanted, verb(request))]

    def answer(self, request: int, ranks: Iterable[int], value: Any, now: float) -> list[Effect]:
        """Note that these ranks answered a request with a value; handle it once all have."""
        question = self.open.get(request)
        if question is None:
            return []
        question.answers.update(dict.fromkeys(ranks, value))
        question.ranks.difference_update(ranks)
        return [] if question.ranks else self._close([request], now)

    def forget_rank(self, rank: int, now: float) -> list[Effect]:
        """Note that a rank will not answer any request any more."""
        for question in self.open.values():
            question.ranks.discard(rank)
        return self._close([number for number, one in self.open.items() if not one.ranks], now)

    def tick(self, now: float) -> list[Effect]:
        """Handle requests whose time is up, with the answers that there are."""
        return self._close([n for n, one in self.open.items() if now >= one.deadline], now)

    def deadline(self) -> float | None:
        """Return when to call `tick` at the latest."""
        return min((question.deadline for question in self.open.values()), default=None)

    def close_all(self, now: float) -> list[Effect]:
        """Handle all open requests, with the answers there are: no rank will answer any more."""
        return self._close(list(self.open), now)

    def _close(self, requests: Iterable[int], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request in requests:  # one that closes may close another
            if (question := self.open.pop(request, None)) is not None:
                effects += question.on_answers(question.answers, now)
        return effects


def control(ranks: Iterable[int], *verbs: Control) -> Send:
    """Return the effect that sends verbs to ranks' control threads."""
    frames = encode([*map(Parcel, verbs)])
    return Send(Parcel(Relay(tuple(sorted(ranks)), "control", -1, len(frames)), tuple(frames)))


def work(ranks: Iterable[int], verb: Heal | Resume, run: int) -> Send:
    """Return the effect that sends work of the core, no user's run, to ranks' main threads."""
    frames = encode([Parcel(verb)])
    title = "heal" if run >= 0 else ""
    return Send(Parcel(Relay(tuple(sorted(ranks)), "work", run, len(frames), title), tuple(frames)))
