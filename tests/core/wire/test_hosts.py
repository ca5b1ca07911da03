"""What hosts of a mesh have agreed on."""

from __future__ import annotations

import os

import msgspec
import pytest

from cellmesh.errors import HostError
from cellmesh.wire.hosts import HEARTBEAT_S, SILENT_S, Invitation, own_facts, parse_invitation

# Within which a host that is not heard is to be reported.
REPORTED_S = 3.0


def test_host_that_is_not_heard_is_noticed_in_time() -> None:
    """Also one that sends and hears nothing: the notice takes an interval more."""
    assert SILENT_S + 2 * HEARTBEAT_S < REPORTED_S
    assert SILENT_S > 3 * HEARTBEAT_S  # heartbeats that are lost or late cost no connection


INVITATION = Invitation("train", "tcp://10.0.0.1:4711", "p" * 40, "s" * 40)
TEXT = msgspec.json.encode(INVITATION)


def test_invitation_is_read_back() -> None:
    assert parse_invitation(TEXT + b"\n") == INVITATION


@pytest.mark.parametrize("text", [b"", b"hello", b'"endpoint"', b'{"key": "1", "endpoint": "x"}'])
def test_other_texts_are_no_invitations(text: bytes) -> None:
    assert parse_invitation(text) is None


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace(b"sss", b"s"),
        TEXT.replace(b"sss", b"s s"),
        TEXT.replace(b'"mesh"', b'"mash"'),
        TEXT.replace(b'"train"', b"7"),
    ],
)
def test_damaged_invitation_is_refused_without_its_secret(text: bytes) -> None:
    with pytest.raises(HostError, match="the ticket is damaged") as raised:
        parse_invitation(text)
    assert "s" * 30 not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, -1),
        ({"GROUP_RANK": "1"}, 1),
        ({"JOB_COMPLETION_INDEX": "3"}, 3),
        ({"GROUP_RANK": "first"}, -1),
    ],
)
def test_engines_number_hosts(environment: dict[str, str], number: int) -> None:
    facts = own_facts(environment)
    assert (facts.number, facts.pid) == (number, os.getpid())
    assert not any(address.startswith("127.") for address in facts.addresses)
