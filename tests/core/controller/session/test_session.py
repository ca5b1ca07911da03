"""The controller's session: what holds from the moment at which its link may hear the agent."""

import os
import threading
from pathlib import Path

import msgspec
import pytest

from cellmesh.controller.core.core import Change
from cellmesh.controller.session.launch.local import LocalAgent, found
from cellmesh.controller.session.link import Link
from cellmesh.controller.session.session import Session
from cellmesh.errors import NoMeshError
from cellmesh.wire.attach import RunInfo, Welcome
from cellmesh.wire.curve import new_keys
from cellmesh.wire.hosts import Host

from ....support.tickets import make_ticket

WELCOME = Welcome(1, os.getpid(), "host", next_run=8, runs=(RunInfo(7, (0, 1), "cell 2"),))
TICKET = make_ticket()


def hear_welcome(link: Link) -> None:
    """The link's thread, if the agent's first message is there as soon as it runs."""
    try:
        link._owner.note(Change("starting", WELCOME))
    finally:
        os.close(link._wake)
        os.close(link._agent)


def test_an_agent_may_answer_as_soon_as_the_link_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "_serve", hear_welcome)
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    session = Session(TICKET, LocalAgent(TICKET, found), os.pidfd_open(os.getpid()), is_found=True)
    session._at_exit.forget()
    (run,) = session.runs.all()
    assert (run.number, run.title) == (7, "cell 2")


def test_connection_that_cannot_be_made_ends_the_mesh_with_the_cause(tmp_path: Path) -> None:
    agents = [
        Host(name, endpoint, new_keys().public, rank, 1)
        for rank, (name, endpoint) in enumerate(
            [("a", "tcp://192.0.2.9:5"), ("b", "tcp://no-port")]
        )
    ]
    ticket = msgspec.structs.replace(
        TICKET, agents=tuple(agents), curve_secret=new_keys().secret, directory=str(tmp_path)
    )
    session = Session(ticket, LocalAgent(TICKET, found), os.pidfd_open(os.getpid()), is_found=True)
    with pytest.raises(NoMeshError, match="cannot use tcp://no-port: Invalid argument"):
        session.wait_until_attached(60.0)
