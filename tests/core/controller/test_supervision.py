"""The thread that makes actors again, without ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller.core.effects import Change
from cellmesh.controller.news import News
from cellmesh.controller.supervision import Supervisor
from cellmesh.wire.messages import RespawnFailed


def raising(error: BaseException) -> Any:
    def act(*args: Any, **kwargs: Any) -> Any:
        raise error

    return act


def test_an_interrupted_heal_names_the_function_for_which_it_waited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    displays = SimpleNamespace(heading=lambda is_first: "generators:")
    session: Any = SimpleNamespace(displays=displays)
    supervisor: Any = Supervisor(session)
    function = threading.Thread()
    supervisor._called[function] = "give, the on_death of model"
    supervisor._ends = SimpleNamespace(wait_for=raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), supervisor.around_heal():
        pass
    text = "generators: no heal waits any longer for give, the on_death of model, which runs on"
    assert text in capsys.readouterr().err
    supervisor._ends = News()
    with supervisor.around_heal():
        assert supervisor._turn.locked()
    supervisor._called[threading.current_thread()] = "another, which heals"
    with supervisor.around_heal():
        assert not supervisor._turn.locked()


class Remade:
    """An actor that is made again without ranks."""

    def __init__(self, session: Any, name: str, rank: int, on_death: Any) -> None:
        self.rank_set = SimpleNamespace(session=session, ranks=(rank,), part=lambda ranks: ranks)
        self.name, self.on_death, self.lost = name, on_death, {rank}
        self.restarted_at: list[float] = []
        self.restarter, self.why_ended = 0, ""
        session.actors[name] = self

    def make(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(result=lambda: {0: False})

    def handle(self) -> str:
        return f"handle of {self.name}"


def test_a_function_that_does_not_end_holds_up_no_other_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cellmesh.controller.supervision.keep", lambda spawned: None)
    session: Any = SimpleNamespace(
        actors={}, dead_ranks=set(), recovery=lambda: None,
        core=SimpleNamespace(state="ready"), displays=SimpleNamespace(heading=None),
    )  # fmt: skip
    supervisor: Any = Supervisor(session)
    has_begun, may_end, seen = threading.Event(), threading.Event(), list[Any]()

    def give(actor: Any, ranks: tuple[int, ...]) -> None:
        seen.append((actor, ranks, hanging.restarter == threading.get_ident()))
        has_begun.set()
        may_end.wait(60.0)

    def is_over(*actors: Remade) -> bool:
        return not any(each.lost for each in actors)

    hanging: Any = Remade(session, "hanging", 1, give)
    beside, later = Remade(session, "beside", 1, "restart"), Remade(session, "later", 2, "restart")
    for rank in (1, 2):
        supervisor._begin({rank})
        assert has_begun.wait(60.0)
    supervisor._ends.wait_for(lambda: supervisor._thread is None, 60.0)
    assert (is_over(beside, later), hanging.lost) == (True, {1})
    assert list(supervisor._called.values()) == [
        "test_a_function_that_does_not_end_holds_up_no_other_restart.<locals>.give, the on_death "
        "of hanging"
    ]
    may_end.set()
    with supervisor.around_heal():  # which waits for it
        assert (is_over(hanging), seen) == (True, [("handle of hanging", (1,), True)])
    assert (supervisor._called, hanging.restarter) == ({}, 0)


def test_a_thread_that_fails_leaves_its_place_to_the_next_one() -> None:
    session: Any = SimpleNamespace(recovery=raising(RuntimeError("no")))
    supervisor: Any = Supervisor(session)
    supervisor._thread = threading.current_thread()
    with pytest.raises(RuntimeError, match="no"):
        supervisor._serve()
    assert supervisor._thread is None


def test_actors_whose_ranks_could_not_be_replaced_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session: Any = SimpleNamespace(actors={}, displays=SimpleNamespace(heading=None))
    supervisor = Supervisor(session)
    for name, rank, on_death in (
        ("one", 1, "restart"),
        ("two", 2, "restart"),
        ("three", 1, "fail"),
    ):
        Remade(session, name, rank, on_death)
    supervisor.note(Change("ready", RespawnFailed((1,), "no descriptors")))
    text = "rank 1 of one could not be replaced: no descriptors. `%dist_heal` tries again"
    assert capsys.readouterr().err.strip() == text
