"""Ranks to be looked at that are namespaces of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from cellmesh.controller.inspect import Inspection, QueryResult, Spread
from cellmesh.wire.inspect import (
    Histogram,
    Overview,
    Pixels,
    Refusal,
    TensorSummary,
    ValueQuery,
    ValueSummary,
)
from cellmesh.workers.inspect.handler import InspectHandler


class LocalAnswers:
    """InspectionSource as a mesh's ranks would, which run nothing.

    Args:
        expression: what is looked at.
        namespaces: rank -> its names.
        change: given rank, subject and answer: another answer.
        grads: gradients are inspected.
    """

    def __init__(
        self,
        expression: str,
        namespaces: Mapping[int, dict[str, Any]],
        change: Callable[[int, ValueQuery, Any], Any] = lambda rank, subject, answer: answer,
        grads: bool = False,
    ) -> None:
        self.expression = expression
        self.ranks = tuple(namespaces)
        self.namespaces = namespaces
        self.asked: list[ValueQuery] = []
        self.busy = False
        self._change = change
        self._grads = grads
        self._lookers = {rank: looker(names) for rank, names in namespaces.items()}
        self._token = ""  # of the value that was inspected last

    def look(self, subject: ValueQuery, ranks: Sequence[int] | None = None) -> QueryResult:
        asked = self.ranks if ranks is None else tuple(ranks)
        self.asked.append(subject)
        subject = msgspec.structs.replace(subject, token=self._token)
        looked = QueryResult({}, {})
        for rank in asked:
            answer = self._lookers[rank].answer(subject, self.busy)
            if not self.busy and isinstance(answer, ValueSummary | Pixels):
                answer = msgspec.structs.replace(answer, is_torn=False)
            answer = self._change(rank, subject, answer)
            (looked.refusals if isinstance(answer, Refusal) else looked.answers)[rank] = answer
        return looked

    def inspect(self) -> Inspection:
        former, self._token = self._token, str(len(self.asked))
        subject = Overview(self.expression, max_items=20_000, runs=True, grads=self._grads)
        looked = self.look(subject)
        if not looked.answers:
            self._token = former
        return Inspection(self.expression, dict(looked.answers), dict(looked.refusals))

    def spread(self, path: str, summaries: Mapping[int, TensorSummary]) -> Spread | None:
        known = [
            (summary.min, summary.max)
            for summary in summaries.values()
            if summary.min is not None and summary.max is not None
        ]
        if not known:
            return None
        low, high = min(one for one, _ in known), max(one for _, one in known)
        subject = Histogram(self.expression, path, low=low, high=high, num_bins=40)
        looked = self.look(subject, tuple(summaries))
        return Spread(low, high, looked.answers)


def ask(value: Any, subject: ValueQuery) -> Any:
    """What an idle rank answers about a value of the name ``x``."""
    return looker({"x": value}).answer(subject, is_beside=False)


def looker(namespace: dict[str, Any]) -> InspectHandler:
    """What answers on a rank that has these names."""
    shell: Any = SimpleNamespace(user_ns=namespace, user_ns_hidden={})
    return InspectHandler(SimpleNamespace(shell=shell))  # type: ignore[arg-type]
