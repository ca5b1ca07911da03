"""What several hosts say of one start, as one."""

from __future__ import annotations

from cellmesh.controller.session.hosts.joined_news import join_progress
from cellmesh.wire.messages import Progress


def test_progress_is_that_of_the_slowest_host() -> None:
    fast, slow = Progress("process group", 2), Progress("forking ranks", 1)
    assert join_progress([fast, slow]) == Progress("forking ranks", 3)
    assert join_progress([fast, None]) == Progress("importing torch", 2)
    assert join_progress([Progress("a later stage", 0), fast]) == fast
