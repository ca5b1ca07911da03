"""Values that ranks keep for an inspector: until it stands still."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cellmesh.controller.inspect import pinned
from cellmesh.controller.inspect import source as answers_module
from cellmesh.controller.inspect.inspection import Inspection
from cellmesh.controller.inspect.pinned import PinnedValue
from cellmesh.controller.inspect.query import QueryResult
from cellmesh.controller.inspect.source import InspectionSource
from cellmesh.controller.rank_set import RankSet
from cellmesh.magics.widgets.inspector.inspector import Inspector
from cellmesh.wire.inspect import Forget, ValueSummary

from ....support.inspected_ranks import LocalAnswers


class Keeping:
    """Ranks that keep values.

    Attributes:
        ranks: these.
        forgotten: the tokens that they were told to forget.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forgotten: list[str] = []
        beside = SimpleNamespace(gone_holds=deque())
        self._session: Any = SimpleNamespace(beside=beside)
        self.ranks = RankSet(self._session, [0, 1])
        monkeypatch.setattr(pinned, "look", self._look)

    def inspection(self) -> Inspection:
        return Inspection(
            "f()", {0: ValueSummary("int", "1", ())}, pinned=PinnedValue(self._session, [0, 1])
        )

    def _look(self, ranks: RankSet, subject: Forget, **_: object) -> QueryResult:
        assert ranks.ranks == (0, 1)
        self.forgotten += subject.tokens
        return QueryResult()


def token(inspection: Inspection) -> str:
    assert inspection.pinned is not None
    return inspection.pinned.token


def test_ranks_forget_what_an_inspector_showed_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeping = Keeping(monkeypatch)
    seen = keeping.inspection()
    answers = InspectionSource(keeping.ranks, "f()", seen)
    answers.close()
    answers.close()
    assert keeping.forgotten == [token(seen)]


def test_what_was_on_its_way_when_it_came_to_stand_still_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeping = Keeping(monkeypatch)
    first, second = keeping.inspection(), keeping.inspection()
    answers = InspectionSource(keeping.ranks, "f()", first)

    def inspect(*_: object, **__: object) -> Inspection:
        answers.close()
        return second

    monkeypatch.setattr(answers_module, "inspect", inspect)
    answers.inspect(False)
    assert keeping.forgotten == [token(first), token(second)]


def test_an_inspector_that_stands_still_is_done_with_its_ranks() -> None:
    answers = LocalAnswers("w + 1", {0: {"w": torch.ones(3)}})
    inspector = Inspector(answers)
    assert not answers.is_closed
    inspector.view.freeze("newer inspectors are")
    assert answers.is_closed
    assert inspector.static().text
