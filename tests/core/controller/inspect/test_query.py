"""For how long a look waits: for ranks that run something no longer than an answer takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller.inspect import query as look_module
from cellmesh.controller.inspect.query import look
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.rank_set import RankSet
from cellmesh.controller.ranks import Ranks
from cellmesh.controller.run import Run
from cellmesh.magics.render.who import names_table
from cellmesh.wire import payload
from cellmesh.wire.codec import Parcel
from cellmesh.wire.inspect import Bound, Element
from cellmesh.wire.messages import Done

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
        catalog = SimpleNamespace(busy_ranks=lambda: {0})
        session: Any = SimpleNamespace(dead_ranks=set(), catalog=catalog)
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


def test_a_busy_rank_that_does_not_answer_is_told_of_and_the_others_are_shown(
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
