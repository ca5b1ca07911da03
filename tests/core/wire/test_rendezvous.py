"""Invitations, and what a host says of itself."""

from __future__ import annotations

import os

import msgspec
import pytest

from cellmesh.errors import HostError
from cellmesh.wire.hosts import Invitation, own_facts, parse_invitation

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
