"""What people are shown who start agents, and the file that they copy."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cellmesh.controller.session.launch.invited_hosts import (
    InvitedHosts,
    describe_start,
    write_invitation,
)
from cellmesh.errors import HostError
from cellmesh.wire.hosts import HostPart, Invitation, parse_invitation

from .....support.tickets import make_ticket

INVITATION = Invitation("train", "tcp://10.0.0.1:4711", "p" * 40, "s" * 40)


def test_ticket_is_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    write_invitation(path, INVITATION)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert parse_invitation(path.read_bytes()) == INVITATION
    with pytest.raises(HostError, match="cannot write"):
        write_invitation(path, INVITATION)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("hand", "-m cellmesh agent --ticket ~/cellmesh-train.json"),
        ("torchrun", "--nnodes 2 --nproc-per-node 1 "),
    ],
)
def test_line_to_run_on_each_host_names_the_file(launch: str, expected: str) -> None:
    path = Path("/run/train/join.json")
    text = describe_start(launch, 2, path)
    assert expected in text
    assert str(path) in text
    assert "s" * 40 not in text
    assert text.startswith("On each of 2 hosts, start the agent:")


@pytest.mark.parametrize(
    ("num_hosts", "expected"), [(1, "On 1 more host, start"), (2, "On 2 more hosts, start")]
)
def test_hosts_that_join_are_asked_for(num_hosts: int, expected: str) -> None:
    path = Path("/run/train/join.json")
    assert describe_start("hand", num_hosts, path, joins=True).startswith(expected)


def test_line_for_a_lost_host_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's rendezvous is for all hosts of the mesh, of which one is lost."""
    monkeypatch.setattr("cellmesh.controller.session.launch.invited_hosts._RETURN_S", 0.0)
    ticket = make_ticket(
        directory=str(tmp_path), num_ranks=3, launch="torchrun", address="127.0.0.1"
    )
    invited = InvitedHosts(ticket, lambda text, stays: None)
    failures: dict[int, HostError] = {}
    lost = HostPart(1, 3, "b", 1, 1, "", joins=True)
    try:
        assert invited.start(invited.ticket, [lost], 1.0, failures) == []
    finally:
        invited.leave()
    assert "torchrun --nnodes 3 " in str(failures[0])
