"""For how long a look waits: for ranks that run something no longer than an answer takes."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cellmesh.controller.inspect import query as look_module
from cellmesh.controller.inspect import source as answers_module
from cellmesh.controller.inspect.query import Inspection, PinnedValue, QueryResult, look
from cellmesh.controller.inspect.source import InspectionSource
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.rank_set import RankSet
from cellmesh.controller.ranks import Ranks
from cellmesh.controller.run import Run
from cellmesh.magics.render.who import names_table
from cellmesh.magics.widgets.inspector.inspector import Inspector
from cellmesh.wire import payload
from cellmesh.wire.codec import Parcel
from cellmesh.wire.inspect import Bound, Element, Forget, ValueSummary
from cellmesh.wire.messages import Done

from ....support.inspected_ranks import LocalAnswers
from ....support.run_cases import Sink
from ....support.runs import FakeControl, work_item


class Asking:
    """Rank 0 runs something and does not answer; rank 1 is idle, and does.

    Attributes:
        ranks: both.
        interrupted: rank 0 was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
        self.interrupted = threading.Event()
        self._answer = answer
        runs = SimpleNamespace(busy_ranks=lambda: {0})
        session: Any = SimpleNamespace(dead_ranks=set(), runs=runs)
        self.ranks = RankSet(session, [0, 1])
        monkeypatch.setattr(
            RankSet, "start", lambda part, verb, title, channel: self._start(part.ranks, channel)
        )

    def _start(self, ranks: tuple[int, ...], channel: str) -> Run[Any]:
        assert (ranks, channel) in [((0,), "control"), ((1,), "work")]
        run: Run[Any] = Run(
            1, work_item(ranks), Printer(ranks, Sink()), FakeControl(self.interrupted.set)
        )
        if channel == "work":
            pickled, buffers = payload.dumps(self._answer, "value")
            run.settle(ranks, Parcel(Done(1, pickled), tuple(map(bytearray, buffers))), 0.0)
            run.finish(0.0)
        return run


def test_busy_rank_without_an_answer_is_named_and_the_others_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(look_module, "ANSWER_S", 0.1)
    asking = Asking(monkeypatch, "1.0")
    looked = look(asking.ranks, Element("x", "", (0,)))
    assert looked.answers == {1: "1.0"}
    assert str(looked.refusals[0]) == "TimeoutError: no answer within 0.1 s"
    assert not asking.interrupted.is_set()

    table = names_table(Ranks(Asking(monkeypatch, Bound(())).ranks), "*")
    assert table.notes == ["rank 0: TimeoutError: no answer within 0.1 s"]


# ---- values that ranks keep for an inspector


class Keeping:
    """Ranks that keep values.

    Attributes:
        ranks: these.
        forgotten: the tokens that they were told to forget.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forgotten: list[str] = []
        self._session: Any = SimpleNamespace(gone_holds=deque())
        self.ranks = RankSet(self._session, [0, 1])
        monkeypatch.setattr(look_module, "look", self._look)

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


def test_ranks_forget_the_values_of_a_frozen_inspector(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = Keeping(monkeypatch)
    seen = keeping.inspection()
    answers = InspectionSource(keeping.ranks, "f()", seen)
    answers.close()
    answers.close()
    assert keeping.forgotten == [token(seen)]


def test_answer_on_its_way_to_a_frozen_inspector_is_forgotten(
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


def test_frozen_inspector_asks_its_ranks_no_more() -> None:
    answers = LocalAnswers("w + 1", {0: {"w": torch.ones(3)}})
    inspector = Inspector(answers)
    assert not answers.is_closed
    inspector.view.freeze("newer inspectors are")
    assert answers.is_closed
    assert inspector.static().text
