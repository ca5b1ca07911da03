"""The reports of several hosts, joined."""

from __future__ import annotations

from cellmesh.controller.session.hosts.host_reports import HostReports, join_reports
from cellmesh.wire.hosts import AgentAddress
from cellmesh.wire.status import HostReport, RankInfo

AGENTS = [AgentAddress(name, "tcp://10.0.0.1:1", "key", rank, 1) for rank, name in enumerate("abc")]
RANKS = [RankInfo(rank, rank + 100, "a", "idle") for rank in range(3)]


def test_reports_are_joined_in_the_order_of_ranks() -> None:
    reports = [HostReport(7, (RANKS[2],), 1.0), HostReport(7, RANKS[:1], 3.0)]
    assert join_reports(7, reports, [RANKS[1]]) == HostReport(7, tuple(RANKS), 3.0)
    assert join_reports(7, []) == HostReport(7, ())


def test_late_answer_to_a_closed_question_opens_none() -> None:
    reports = HostReports()
    reports.begin(7)
    reports.silent.add(1)
    reports.note(0, HostReport(7, (RANKS[0],)))
    assert list(reports.take(AGENTS[:2], {0, 1})) == [HostReport(7, (RANKS[0],))]
    reports.note(1, HostReport(7, (RANKS[1],)))
    assert list(reports.take(AGENTS[:2], {0, 1})) == []


def test_host_that_said_nothing_yet_has_no_ranks_in_a_report() -> None:
    reports = HostReports()
    reports.silent |= {0, 1}
    reports.note_ranks(1, (RANKS[1],))
    reports.begin(7)
    (report,) = reports.take(AGENTS[:2], {0, 1})
    assert [(info.rank, info.is_heard) for info in report.ranks] == [(1, False)]
