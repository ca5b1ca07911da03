"""Requests about files, and the answers of hosts that may be lost before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from cellmesh.controller.session.hosts.file_requests import Answers, FileRequests
from cellmesh.wire.code_files import FilesAnswer, OfferFiles
from cellmesh.wire.codec import Parcel


@pytest.fixture
def requests() -> FileRequests:
    return FileRequests()


def begin(requests: FileRequests, hosts: Collection[int]) -> tuple[int, Future[Answers]]:
    future: Future[Answers] = Future()

    def make(request: int, there: Collection[int]) -> Mapping[int, Sequence[Parcel[Any]]]:
        return {host: [Parcel(OfferFiles(request, (), ()))] for host in there}

    messages = requests.begin(make, hosts, future)
    assert messages.keys() == set(hosts)
    number = next(iter(messages.values()))[0].verb.request if hosts else 0
    return number, future


def test_request_is_answered_once_all_hosts_have(requests: FileRequests) -> None:
    number, future = begin(requests, (0, 2))
    requests.answer(0, FilesAnswer(number))
    requests.answer(0, FilesAnswer(number - 1))  # of a controller before this one
    assert not future.done()
    requests.answer(2, FilesAnswer(number, (b"x",)))
    assert future.result(0) == {0: FilesAnswer(number), 2: FilesAnswer(number, (b"x",))}


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
