"""The answers of the agents of several hosts are joined into those of one agent."""

from __future__ import annotations

from cellmesh.controller.session.hosts.fan import (
    Gathering,
    HostReports,
    join_progress,
    join_reports,
)
from cellmesh.wire.hosts import Host
from cellmesh.wire.messages import Progress
from cellmesh.wire.status import HostReport, RankInfo

AGENTS = [Host(name, "tcp://10.0.0.1:1", "key", rank, 1) for rank, name in enumerate("abc")]
RANKS = [RankInfo(rank, rank + 100, "a", "idle") for rank in range(3)]


def test_reports_are_joined_in_the_order_of_ranks() -> None:
    reports = [HostReport(7, (RANKS[2],), 1.0), HostReport(7, RANKS[:1], 3.0)]
    assert join_reports(7, reports, [RANKS[1]]) == HostReport(7, tuple(RANKS), 3.0)
    assert join_reports(7, []) == HostReport(7, ())


def test_late_answer_to_a_closed_question_opens_none() -> None:
    reports = HostReports()
    reports.begin(7, {0, 1})
    reports.silent.add(1)
    reports.note(0, HostReport(7, (RANKS[0],)))
    assert list(reports.take(AGENTS[:2], {0, 1})) == [HostReport(7, (RANKS[0],))]
    reports.note(1, HostReport(7, (RANKS[1],)))
    assert list(reports.take(AGENTS[:2], {0, 1})) == []


def test_host_that_said_nothing_yet_has_no_ranks_in_a_report() -> None:
    reports = HostReports()
    reports.silent |= {0, 1}
    reports.note_ranks(1, (RANKS[1],))
    reports.begin(7, {0, 1})
    (report,) = reports.take(AGENTS[:2], {0, 1})
    assert [(info.rank, info.is_heard) for info in report.ranks] == [(1, False)]


def test_question_is_answered_once_no_host_is_awaited() -> None:
    questions: Gathering[str] = Gathering()
    questions.begin(7, (0, 2, 3))
    questions.begin(8, (0,))
    questions.add(7, 0, "a")
    questions.add(6, 0, "of a controller before this one")
    assert questions.awaited(7) == [2, 3]
    assert list(questions.take({0, 2, 3})) == []
    questions.add(7, 2, "b")
    assert list(questions.take({0, 1, 2})) == [(7, {0: "a", 2: "b"})], "host 3 is lost"
    assert list(questions.take(())) == [(8, {})]
    assert questions.awaited(7) == []


def test_progress_is_that_of_the_slowest_host() -> None:
    fast, slow = Progress("process group", 2), Progress("forking ranks", 1)
    assert join_progress([fast, slow]) == Progress("forking ranks", 3)
    assert join_progress([fast, None]) == Progress("importing torch", 2)
    assert join_progress([Progress("a later stage", 0), fast]) == fast
