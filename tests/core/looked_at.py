"""Ranks to be looked at that are namespaces of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from cellmesh.controller.looking import Looked
from cellmesh.wire.looks import AnySubject, Refusal
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

    def is_busy(self) -> bool:
        return self.busy
