"""A zygote whose system has no process left: it says so, and there is no second one of it."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

import pytest

from cellmesh.workers import zygote


@pytest.mark.filterwarnings("ignore:This process")  # pytest's may have threads
@pytest.mark.parametrize("num_forks", [1, 2])
def test_a_fork_that_fails_is_reported(num_forks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> NoReturn:
        raise BlockingIOError(11, "no process left")

    forks = iter([*[os.fork] * num_forks, fails])
    monkeypatch.setattr(zygote.os, "fork", lambda: next(forks)())
    agent, other = socket.socketpair()
    with agent, other:
        forked = zygote._fork_orphans([lambda: None, lambda: None], agent)
    assert len(forked.pids) == num_forks - 1
    assert forked.problem == "[Errno 11] no process left"
