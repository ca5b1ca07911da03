"""A call in the link's loop gives its result, its exception, or says that it was not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from cellmesh.controller.core.core import Core
from cellmesh.controller.session.hosts import loop_call
from cellmesh.controller.session.hosts.loop_call import call_in_loop
from cellmesh.errors import HostError

CORE = cast(Core, None)


def test_call_returns_its_result_or_raises_its_exception() -> None:
    assert call_in_loop(at_once, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="its own"):
        call_in_loop(at_once, fail)


def at_once(command: Callable[[Core, float], Any]) -> None:
    command(CORE, 0.0)


def fail() -> None:
    raise TimeoutError("its own")


def test_call_that_is_given_up_is_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_call, "_ORDER_S", 0.0)
    posted: list[Callable[[Core, float], Any]] = []
    calls: list[int] = []
    with pytest.raises(HostError, match="is busy"):
        call_in_loop(posted.append, lambda: calls.append(1))
    posted[0](CORE, 0.0)
    assert not calls
