"""What people are shown who start agents, and the file that they copy."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cellmesh.controller.session.launch.invited_hosts import describe_start, write_invitation
from cellmesh.errors import HostError
from cellmesh.wire.rendezvous import Invitation, parse_invitation

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
