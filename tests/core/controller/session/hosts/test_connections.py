"""What a host says before it has joined is kept, and why it cannot join is known."""

from __future__ import annotations

import pytest

from cellmesh.controller.session.hosts.connections import Candidate
from cellmesh.wire.attach import Refused
from cellmesh.wire.codec import Parcel
from cellmesh.wire.hosts import FilesAnswer, Host
from cellmesh.wire.messages import MeshReady, Stopped, Verb


@pytest.fixture
def candidate() -> Candidate:
    return Candidate(Host("b", "tcp://10.0.0.2:5", "key", 1, 1))


def test_answers_about_files_go_on_and_the_rest_waits(candidate: Candidate) -> None:
    ready, answer = Parcel(MeshReady(())), Parcel(FilesAnswer(3))
    assert list(candidate.hear([ready, answer], None, 10.0, 0.0)) == [answer.verb]
    assert candidate.said == [ready]
    assert not candidate.ending


@pytest.mark.parametrize("verb", [Stopped("killed"), Refused("no such key")])
def test_agent_that_has_ended_cannot_join(verb: Verb, candidate: Candidate) -> None:
    assert not list(candidate.hear([Parcel(verb)], None, 10.0, 0.0))
    assert candidate.ending == f"its agent has ended: {verb.reason}"  # type: ignore[attr-defined]


def test_agent_that_is_not_heard_cannot_join_after_the_lease(candidate: Candidate) -> None:
    list(candidate.hear([], 5.0, 10.0, 14.9))
    assert not candidate.ending
    list(candidate.hear([], 5.0, 10.0, 15.0))
    assert "not heard for 10 s" in candidate.ending
