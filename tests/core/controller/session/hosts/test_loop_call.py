"""A call in the link's loop gives its result, its exception, or says that it was not made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cellmesh.controller.session.hosts import loop_call
from cellmesh.controller.session.hosts.loop_call import call_in_loop
from cellmesh.errors import HostError


def test_call_returns_its_result_or_raises_its_exception() -> None:
    assert call_in_loop(lambda action: action(), lambda: 3) == 3
    with pytest.raises(TimeoutError, match="its own"):
        call_in_loop(lambda action: action(), fail)


def fail() -> None:
    raise TimeoutError("its own")


def test_call_that_is_given_up_is_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_call, "_ORDER_S", 0.0)
    posted: list[Callable[[], None]] = []
    calls: list[int] = []
    with pytest.raises(HostError, match="is busy"):
        call_in_loop(posted.append, lambda: calls.append(1))
    posted[0]()
    assert not calls
