"""The answers of the agents of several hosts are joined into those of one agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from cellmesh.controller.session.hosts.fan import (
    Answers,
    FileRequests,
    HostReports,
    join_progress,
    join_reports,
)
from cellmesh.wire.codec import Parcel
from cellmesh.wire.hosts import FilesAnswer, Host, PlaceFiles
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


@pytest.fixture
def requests() -> FileRequests:
    return FileRequests()


def begin(requests: FileRequests, hosts: Collection[int]) -> tuple[int, Future[Answers]]:
    future: Future[Answers] = Future()

    def make(request: int, there: Collection[int]) -> Mapping[int, Sequence[Parcel[Any]]]:
        return {host: [Parcel(PlaceFiles(request, "a", ""), (b"",))] for host in there}

    messages = requests.begin(make, hosts, future)
    assert messages.keys() == set(hosts)
    number = next(iter(messages.values()))[0].verb.request if hosts else 0
    return number, future


def test_request_is_answered_once_all_hosts_have(requests: FileRequests) -> None:
    number, future = begin(requests, (0, 2))
    requests.answer(0, FilesAnswer(number))
    requests.answer(0, FilesAnswer(number - 1))  # of a controller before this one
    assert not future.done()
    requests.answer(2, FilesAnswer(number, "a"))
    assert future.result(0) == {0: FilesAnswer(number), 2: FilesAnswer(number, "a")}


def test_lost_host_is_not_waited_for(requests: FileRequests) -> None:
    number, future = begin(requests, (0, 1))
    requests.answer(0, FilesAnswer(number))
    requests.keep({0})
    assert future.result(0) == {0: FilesAnswer(number)}


def test_request_to_no_host_is_answered_at_once(requests: FileRequests) -> None:
    assert begin(requests, ())[1].result(0) == {}


def test_end_of_the_mesh_ends_requests(requests: FileRequests) -> None:
    _, future = begin(requests, (0,))
    requests.close()
    assert future.result(0) is None


def test_hosts_that_have_not_answered_are_known(requests: FileRequests) -> None:
    number, future = begin(requests, (0, 2, 3))
    begin(requests, (0, 2, 3))
    requests.answer(2, FilesAnswer(number))
    assert requests.awaited(future) == [0, 3]


def test_progress_is_that_of_the_slowest_host() -> None:
    fast, slow = Progress("process group", 2), Progress("forking ranks", 1)
    assert join_progress([fast, slow]) == Progress("forking ranks", 3)
    assert join_progress([fast, None]) == Progress("importing torch", 2)
    assert join_progress([Progress("a later stage", 0), fast]) == fast
