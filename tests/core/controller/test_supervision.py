"""The thread that makes actors again, without ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller.supervision import Supervisor


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
    supervisor._called = "give, the on_death of model"
    supervisor._turn = SimpleNamespace(acquire=raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), supervisor.around_heal():
        pass
    text = "generators: no heal waits any longer for give, the on_death of model, which runs on"
    assert text in capsys.readouterr().err
    supervisor._thread = threading.Thread()
    with supervisor.around_heal():
        supervisor._called = ""  # it has ended, and the thread has
        supervisor._thread = None


def test_a_thread_that_fails_leaves_its_place_to_the_next_one() -> None:
    session: Any = SimpleNamespace(recovery=raising(RuntimeError("no")))
    supervisor: Any = Supervisor(session)
    supervisor._thread = threading.current_thread()
    with pytest.raises(RuntimeError, match="no"):
        supervisor._serve()
    assert supervisor._thread is None
