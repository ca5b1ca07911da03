"""Why a host's agent has gone, as its engine answers."""

from __future__ import annotations

import threading

import pytest

from cellmesh.controller.session.hosts.loss_inquiry import LossInquiry
from tests.faults.watching import wait_until


def test_nothing_is_asked_without_an_engine() -> None:
    assert not LossInquiry(None).begin(0, "n1", "stopped from outside")


def test_answer_replaces_what_the_agent_has_said() -> None:
    may_answer, answers = threading.Event(), {"n1": "Slurm has ended job 7", "n2": ""}

    def ask(node: str) -> str:
        assert may_answer.wait(10)
        return answers[node]

    inquiry = LossInquiry(ask)
    assert inquiry.begin(0, "n1")
    assert inquiry.begin(1, "n2")
    assert inquiry.begin(1, "n2", "stopped from outside")  # heard while the engine is asked
    assert list(inquiry.answers()) == []
    may_answer.set()
    found: dict[int, str] = {}
    wait_until(lambda: found.update(inquiry.answers()) or len(found) == 2, 10.0, "both answers")
    assert found == {0: "Slurm has ended job 7", 1: "stopped from outside"}
    assert not inquiry.is_open


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_question_that_fails_leaves_what_the_agent_has_said() -> None:
    def ask(node: str) -> str:
        raise ValueError(node)

    inquiry = LossInquiry(ask)
    assert inquiry.begin(1, "n2", "stopped from outside")
    for thread in threading.enumerate():  # whose exception is this test's, and no later one's
        if thread.name == "cellmesh-inquiry":
            thread.join(10)
    assert dict(inquiry.answers()) == {1: "stopped from outside"}
    assert not inquiry.is_open
