"""The listener that hosts announce themselves to, with hosts in memory."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from cellmesh.controller.session.launch.invited_hosts import Guest, Rendezvous, choose_guests
from cellmesh.errors import HostError
from cellmesh.wire.curve import new_keys, public_of
from cellmesh.wire.host import Place, Versions
from cellmesh.wire.hosts import GO, Announcement, HostFacts, Invitation
from cellmesh.workers.agent.on_host import Visit

VERSIONS = Versions("1", "3.11.1", "2.13.0")
SECRET, HOSTS = new_keys().secret, new_keys()
WAIT_S = 30.0


def facts(name: str, number: int = -1) -> HostFacts:
    return HostFacts(name, Place(name, "boot", "pids"), 7, ("10.0.0.1",), (), VERSIONS, number)


@pytest.fixture
def listener() -> Iterator[Rendezvous]:
    listener = Rendezvous("tcp://127.0.0.1:*", SECRET, HOSTS.public, lambda number: None)
    yield listener
    listener.close("it is over")


def visit(listener: Rendezvous, name: str, secret: str = HOSTS.secret) -> Visit:
    return Visit(Invitation("m", listener.endpoint, public_of(SECRET), secret), facts(name))


def test_hosts_get_parts_by_number_then_arrival() -> None:
    def guest(name: str, number: int, heard_at: float = 10.0, has_part: bool = False) -> Guest:
        return Guest(name.encode(), facts(name, number), heard_at, has_part)

    guests = [guest("b", 1), guest("gone", 0, 1.0), guest("a", 0), guest("had", 2, has_part=True)]
    assert [each.facts.name for each in choose_guests(guests, 11.0)] == ["a", "b"]
    guests = [guest("first", -1), guest("second", -1)]
    assert [each.facts.name for each in choose_guests(guests, 11.0)] == ["first", "second"]


def test_host_announces_itself_and_is_let_go(listener: Rendezvous) -> None:
    host, heard = visit(listener, "a"), list[bytes | None]()

    def join() -> None:
        heard.append(host.receive_ticket())
        host.say(Announcement(pid=5))
        never, end = os.pipe()
        heard.append(host.hear(never))
        os.close(never)
        os.close(end)

    thread = threading.Thread(target=join)
    thread.start()
    (guest,) = listener.gather(1, time.monotonic() + WAIT_S, lambda found: None)
    listener.give(guest, b"the ticket")
    assert listener.hear(guest, time.monotonic() + WAIT_S).pid == 5
    listener.order(guest, GO)
    thread.join(WAIT_S)
    host.close()
    assert heard == [b"the ticket", GO]


def test_host_that_is_announced_twice_is_one(listener: Rendezvous) -> None:
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
    with pytest.raises(HostError, match="2 hosts are awaited, and a announced itself"):
        listener.gather(2, time.monotonic() + 2.0, lambda found: None)
    listener.close("it is over")
    for thread, host in zip(threads, (first, second), strict=True):
        thread.join(WAIT_S)
        host.close()
    assert sorted(errors) == ["it is over", "process 7 has announced a once more"]


def test_host_with_another_key_is_not_heard(listener: Rendezvous) -> None:
    host = visit(listener, "a", new_keys().secret)
    assert host.receive_ticket(patience_s=1.0) is None
    host.close()
    with pytest.raises(HostError, match="none announced itself"):
        listener.gather(1, 0.0, lambda found: None)


def test_strangers_at_the_listener_are_counted() -> None:
    counted: queue.Queue[int] = queue.Queue()
    listener = Rendezvous("tcp://127.0.0.1:*", SECRET, HOSTS.public, counted.put)
    try:
        address, _, port = listener.endpoint.removeprefix("tcp://").rpartition(":")
        for _ in range(3):
            with socket.create_connection((address, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while counted.get(timeout=WAIT_S) < 3:
            pass
    finally:
        listener.close("it is over")
