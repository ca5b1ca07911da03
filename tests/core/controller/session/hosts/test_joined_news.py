"""What several hosts say of one start, or answer to one question, as one."""

from __future__ import annotations

from cellmesh.controller.session.hosts.joined_news import join_progress, join_reports
from cellmesh.wire.messages import Progress
from cellmesh.wire.status import HostReport, RankInfo


def test_progress_is_that_of_the_slowest_host() -> None:
    fast, slow = Progress("process group", 2), Progress("forking ranks", 1)
    assert join_progress([fast, slow]) == Progress("forking ranks", 3)
    assert join_progress([fast, None]) == Progress("importing torch", 2)
    assert join_progress([Progress("a later stage", 0), fast]) == fast


def test_reports_are_joined_in_the_order_of_ranks() -> None:
    ranks = [RankInfo(rank, rank + 100, "a", "idle") for rank in range(3)]
    reports = [HostReport(7, (ranks[2],), 1.0), HostReport(7, (ranks[0], ranks[1]), 3.0)]
    assert join_reports(7, reports) == HostReport(7, tuple(ranks), 3.0)
    assert join_reports(7, []) == HostReport(7, ())
