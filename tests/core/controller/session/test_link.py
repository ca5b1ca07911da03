"""The link's loop: what wakes it, and which callers may wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cellmesh.controller.core.core import Core
from cellmesh.controller.session.link import Link
from cellmesh.controller.session.runs import Runs
from cellmesh.errors import MeshUsageError, NoMeshError
from cellmesh.wire.status import ReadHost

WAIT_S = 10.0


class Owner:
    """A session whose agent is silent."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()  # of the agents' sockets
        self.ready: list[int] = []
        self.is_closed = threading.Event()

    def connect(self) -> Any:
        return self

    def descriptors(self) -> tuple[int]:
        return (self.reads,)

    def note_ready(self, number: int) -> None:
        self.ready.append(len(os.read(number, 1)))

    def hear(self, now: float) -> list[Any]:
        return []

    def is_readable(self) -> bool:
        return False

    def send(self, parcels: Any) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def deadline(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.reads)
        os.close(self.writes)

    def note(self, change: Any) -> None:
        pass

    def note_closed(self) -> None:
        self.is_closed.set()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def link(owner: Owner) -> Iterator[Link]:
    reads, writes = os.pipe()  # of the agent's process
    link = Link(owner, Core(1), reads)
    runs: Any = Runs(owner, link, 1)  # type: ignore[arg-type]
    link.start(runs)
    yield link
    os.close(writes)  # ends the loop, unless `close` has
    link.close()
    assert owner.is_closed.wait(WAIT_S)


def in_loop(link: Link, call: Any) -> Any:
    """The result of a function that the loop calls."""
    found, done = list[Any](), threading.Event()

    def act(core: Core, now: float) -> tuple[()]:
        found.append(call())
        done.set()
        return ()

    link.post(act)
    assert done.wait(WAIT_S)
    return found[0]


def test_commands_and_messages_wake_the_loop_one_by_one(link: Link, owner: Owner) -> None:
    for number in range(1, 4):
        os.write(owner.writes, b"x")
        while len(owner.ready) < number:
            in_loop(link, lambda: None)
    assert in_loop(link, link.is_in_loop)
    assert not link.is_in_loop()


def refused(link: Link) -> str:
    try:
        link.check_may_wait()
    except MeshUsageError as error:
        return str(error)
    return ""


def test_only_the_loops_thread_may_not_wait_for_it_and_only_until_it_ends(link: Link) -> None:
    assert "a callback" in in_loop(link, lambda: refused(link))
    assert not refused(link)
    link.close()
    link.close()
    assert not refused(link)
    with pytest.raises(NoMeshError, match="the mesh has ended"):
        link.post(lambda core, now: ())
    assert link.ask(lambda core, now: core.ask_agent(ReadHost)).result(WAIT_S) is None


def test_the_end_of_the_agents_process_ends_the_loop_and_open_questions(owner: Owner) -> None:
    reads, writes = os.pipe()
    link = Link(owner, Core(1), reads)
    runs: Any = Runs(owner, link, 1)  # type: ignore[arg-type]
    link.start(runs)
    reply = link.ask(lambda core, now: core.ask_agent(ReadHost))
    os.close(writes)
    assert reply.result(WAIT_S) is None
    assert owner.is_closed.wait(WAIT_S)


def test_a_forked_process_is_refused(link: Link) -> None:
    parent = os.getpid()
    child = os.fork()
    if not child:
        os._exit(0 if f"({parent})" in refused(link) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
