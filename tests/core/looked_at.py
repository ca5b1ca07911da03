"""Ranks to be looked at that are namespaces of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from cellmesh.controller.looking.comparing import Comparison, compare
from cellmesh.controller.looking.inspecting import Inspection, Spread
from cellmesh.controller.looking.look import Looked
from cellmesh.wire.looks import AnySubject, Histogram, Overview, Refusal
from cellmesh.workers.looking.answering import Looker


class LocalAnswers:
    """Answers as a mesh's ranks would, which run nothing.

    Args:
        expression: what is looked at.
        namespaces: rank -> its names.
        change: given rank, subject and answer: another answer.
    """

    def __init__(
        self,
        expression: str,
        namespaces: Mapping[int, dict[str, Any]],
        change: Callable[[int, AnySubject, Any], Any] = lambda rank, subject, answer: answer,
    ) -> None:
        self.expression = expression
        self.ranks = tuple(namespaces)
        self.namespaces = namespaces
        self.asked: list[tuple[AnySubject, tuple[int, ...], bool]] = []
        self.busy = False
        self._change = change

    def look(
        self, subject: AnySubject, ranks: Sequence[int] | None = None, is_beside: bool = False
    ) -> Looked:
        asked = self.ranks if ranks is None else tuple(ranks)
        self.asked.append((subject, asked, is_beside))
        looked = Looked({}, {})
        for rank in asked:
            shell: Any = SimpleNamespace(user_ns=self.namespaces[rank])
            spans: Any = None
            answer = self._change(rank, subject, Looker(shell, spans).answer(subject, is_beside or self.busy))
            (looked.refusals if isinstance(answer, Refusal) else looked.answers)[rank] = answer
        return looked

    def inspect(self, is_beside: bool) -> Inspection:
        looked = self.look(Overview(self.expression, 20_000), None, is_beside)
        found = dict(looked.answers)
        return Inspection(self.expression, found, dict(looked.refusals))

    def compare(self, inspection: Inspection, path: str, is_beside: bool) -> Comparison:
        return compare(inspection.facts_of(path))

    def spread(self, inspection: Inspection, path: str, is_beside: bool) -> Spread | None:
        facts = inspection.facts_of(path)
        known = [
            (fact.min, fact.max) for fact in facts.values() if fact.min is not None and fact.max is not None
        ]
        if not known:
            return None
        low, high = min(one for one, _ in known), max(one for _, one in known)
        looked = self.look(Histogram(self.expression, path, low, high, 40), tuple(facts), is_beside)
        return Spread(low, high, {rank: counts.counts for rank, counts in looked.answers.items()})

    def is_busy(self) -> bool:
        return self.busy
