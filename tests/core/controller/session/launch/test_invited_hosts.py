"""What people are shown who start agents, and the file that they copy."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellmesh.controller.session.launch.invited_hosts import (
    InvitedHosts,
    Listener,
    choose_address,
    describe_start,
)
from cellmesh.errors import HostError, MeshUsageError
from cellmesh.wire.curve import new_keys, public_of
from cellmesh.wire.host import Place
from cellmesh.wire.hosts import GO, Announcement, HostFacts, HostPart, Invitation, parse_invitation
from cellmesh.wire.own_file import write_whole
from cellmesh.workers.agent.on_host import Visit

from .....support.tickets import make_ticket

INVITATION = Invitation("train", "tcp://10.0.0.1:4711", "p" * 40, "s" * 40)


def test_ticket_is_a_line_in_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    write_whole(path, INVITATION, indent=None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (line,) = path.read_bytes().splitlines(keepends=True)
    assert line.endswith(b"\n")
    assert parse_invitation(line) == INVITATION


def test_line_to_run_on_each_host_names_the_file() -> None:
    path = Path("/run/train/join.json")
    by_hand = describe_start("hand", 2, path)
    assert by_hand.startswith("On each of 2 hosts, start the agent:")
    assert "-m cellmesh agent --ticket ~/cellmesh-train.json" in by_hand
    assert str(path) in by_hand
    assert "--nnodes 2 --nproc-per-node 1 " in describe_start("torchrun", 2, path)
    assert describe_start("hand", 1, path, joins=True).startswith("On 1 more host, start")


def test_line_for_a_lost_host_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's rendezvous is for all hosts of the mesh, of which one is lost."""
    monkeypatch.setattr("cellmesh.controller.session.launch.invited_hosts._RETURN_S", 0.0)
    where = {"directory": str(tmp_path), "address": "127.0.0.1"}
    ticket = make_ticket(num_ranks=3, launch="torchrun", **where)
    invited = InvitedHosts(lambda text, stays: None)
    lost = HostPart(1, 3, "b", 1, 1, "", joins=True)
    try:
        asked = invited.prepare(ticket)
        (announced,) = invited.start(asked, [lost], 1.0, needs_all=False)
        with pytest.raises(HostError, match="1 hosts are awaited, and none announced itself: st"):
            invited.start(asked, [lost], 0.0)
    finally:
        invited.leave()
    assert "torchrun --nnodes 3 " in announced.problem


# ---- the listener, with hosts in memory

SECRET, HOSTS = new_keys().secret, new_keys()
WAIT_S = 30.0


def facts(name: str, number: int = -1) -> HostFacts:
    return HostFacts(name, Place(name, "boot", "pids"), ("10.0.0.1",), number)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("tcp://127.0.0.1:*", SECRET, HOSTS.public, lambda number: None)
    yield listener
    listener.close("it is over")


def visit(listener: Listener, name: str, secret: str = HOSTS.secret) -> Visit:
    return Visit(Invitation("m", listener.endpoint, public_of(SECRET), secret), facts(name))


def test_host_announces_itself_and_is_let_go(listener: Listener) -> None:
    host, heard = visit(listener, "a"), list[bytes | None]()

    def join() -> None:
        heard.append(host.receive_ticket())
        host.say(Announcement(job="5"))
        never, end = os.pipe()
        heard.append(host.hear(never))
        os.close(never)
        os.close(end)

    thread = threading.Thread(target=join)
    thread.start()
    (guest,) = listener.gather(1, time.monotonic() + WAIT_S, lambda found: None)
    listener.give(guest, b"the ticket")
    assert listener.hear(guest, time.monotonic() + WAIT_S).job == "5"
    listener.order(guest, GO)
    thread.join(WAIT_S)
    host.close()
    assert heard == [b"the ticket", GO]


def test_host_that_is_announced_twice_is_one(listener: Listener) -> None:
    first, second = visit(listener, "a"), visit(listener, "a")
    errors: list[str] = []

    def wait(host: Visit) -> None:
        try:
            host.receive_ticket()
        except HostError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait, args=[host]) for host in (first, second)]
    for thread in threads:
        thread.start()
    gathered = listener.gather(2, time.monotonic() + 2.0, lambda found: None)
    assert [guest.facts.name for guest in gathered] == ["a"]
    listener.close("it is over")
    for thread, host in zip(threads, (first, second), strict=True):
        thread.join(WAIT_S)
        host.close()
    assert sorted(errors) == ["another process has announced a once more", "it is over"]


def test_host_with_another_key_is_not_heard(listener: Listener) -> None:
    host = visit(listener, "a", new_keys().secret)
    assert host.receive_ticket(patience_s=1.0) is None
    host.close()
    assert listener.gather(1, 0.0, lambda found: None) == []


# ---- the address at which agents find the notebook's host

ALL = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"], "down": []}


@pytest.mark.parametrize(
    ("wanted", "routed", "expected"),
    [
        ("eth0", "10.1.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.1.0.1", "10.0.0.1"),
        ("", "10.1.0.1", "10.1.0.1"),
    ],
)
def test_address_is_the_wanted_one_or_that_of_the_route(
    wanted: str, routed: str, expected: str
) -> None:
    assert choose_address(wanted, ALL, routed) == expected


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("", "at which address"),
        ("eth7", "no such address or interface .*eth0 10.0.0.1"),
        ("down", "no such address"),
    ],
)
def test_address_that_cannot_be_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        choose_address(wanted, ALL, "")
