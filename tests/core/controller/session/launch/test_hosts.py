"""What agents announce is checked before any of them is let go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cellmesh.controller.session.launch.hosts import HostAgents, check_hosts
from cellmesh.errors import HostError, MeshUsageError
from cellmesh.wire.host import Place
from cellmesh.wire.hosts import AgentAddress, Announcement
from cellmesh.wire.ticket import Ticket
from cellmesh.wire.versions import Versions


def announced(name: str, address: str, nccl: str = "", boot: str = "") -> Announcement:
    return Announcement(
        address=AgentAddress(name, f"tcp://{address}:5", "key", 0, 1),
        place=Place(boot or name, "boot", "pids"),
        versions=Versions("1", "3.11.1", "2.13.0", nccl),
    )


def test_hosts_that_fit_pass() -> None:
    check_hosts([announced("a", "10.0.0.1"), announced("b", "10.0.0.2", "2.27.3")], is_ssh=True)
    check_hosts([announced("a", "127.0.0.1"), announced("b", "127.0.0.1")], is_ssh=True)


def test_two_names_of_one_host_are_refused_by_ssh_only() -> None:
    two = [announced("a", "10.0.0.1", boot="x"), announced("b", "10.0.0.1", boot="x")]
    check_hosts(two, is_ssh=False)
    with pytest.raises(MeshUsageError, match="a and b are one host"):
        check_hosts(two, is_ssh=True)


def test_loopback_is_refused_beside_other_hosts() -> None:
    with pytest.raises(MeshUsageError, match="a is reached by the loopback"):
        check_hosts([announced("a", "127.0.0.1"), announced("b", "10.0.0.2")], is_ssh=True)


def test_hosts_with_other_versions_are_refused() -> None:
    two = [announced("a", "10.0.0.1", "2.26.1"), announced("b", "10.0.0.2", "2.27.3")]
    with pytest.raises(HostError, match=r"NCCL: a has 2\.26\.1, b has 2\.27\.3"):
        check_hosts(two, is_ssh=True)


def test_end_that_two_threads_await_closes_its_descriptor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number may be another's when the second thread is about to close it, too."""
    ticket = Ticket(
        name="far",
        key="00",
        directory=str(tmp_path),
        num_ranks=1,
        backend="gloo",
        mesh_dim_names=("dp",),
        mesh_shape=(1,),
        preload=(),
        sys_path=(),
        cwd="/",
        controller_pid=1,
        created_at=0.0,
        agents=(AgentAddress("a", "tcp://127.0.0.1:5", "", 0, 1),),
    )
    agents = HostAgents(ticket)
    monkeypatch.setattr(agents._reach, "find", lambda found: found)
    agents_end = agents.start()
    close, closed = os.close, list[int]()

    def close_as_another_waits(descriptor: int) -> None:
        closed.append(descriptor)
        if len(closed) == 1:
            assert agents.wait(0)
        close(descriptor)

    monkeypatch.setattr(os, "close", close_as_another_waits)
    assert agents.wait(0)
    monkeypatch.undo()
    close(agents_end)
    assert len(closed) == 1
