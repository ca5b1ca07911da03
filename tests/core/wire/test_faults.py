"""Exceptions of handlers: reported with their place, while the loop that called goes on."""

from __future__ import annotations

import os

import pytest

from cellmesh.wire.faults import Faults
from cellmesh.workers.agent.events import Events, Order


def fail(*args: object) -> None:
    raise ValueError("boom")


def test_a_handler_that_raises_is_reported_with_its_place_and_the_others_are_called() -> None:
    reports: list[str] = []
    events, heard = Events(Faults("the loop", reports.append)), []
    pipes = [os.pipe() for _ in range(3)]
    try:
        for index, (read_end, write_end) in enumerate(pipes):
            events.add(read_end, Order(index), fail if index == 1 else heard.append)
            os.write(write_end, b"x")
        for _ in range(5):
            events.wait(0)
        assert len(heard) == 10
    finally:
        for pair in pipes:
            for number in pair:
                os.close(number)
    assert len(reports) == 3, "one place is reported a few times only"
    assert all("the loop met an error at" in one and f"{__file__}:" in one for one in reports)
    assert all(one.endswith("ValueError: boom") for one in reports)


def test_a_report_that_cannot_be_made_is_dropped() -> None:
    faults = Faults("the loop", fail)
    faults.guard(fail)
    assert faults.num == 1


def test_base_exceptions_are_not_caught() -> None:
    def end() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        Faults("the loop", print).guard(end)
