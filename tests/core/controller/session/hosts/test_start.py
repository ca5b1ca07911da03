"""Hosts that join, and lost ones that are taken back or started again, by calls in the link's
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import msgspec
import pytest

from cellmesh.controller.code_files.sync import CodeSync
from cellmesh.controller.core.core import Core
from cellmesh.controller.session.hosts.connections import Connections
from cellmesh.controller.session.hosts.start import bring_back, choose_places
from cellmesh.controller.session.launch.hosts import HostAgents
from cellmesh.errors import HostError, MeshUsageError
from cellmesh.wire.hosts import Host

from .....support.tickets import make_ticket

NAMES = ("a", "b", "c")
AGENTS = tuple(Host(name, f"tcp://{name}:5", "key", i, 1) for i, name in enumerate(NAMES))

OF_TWO_SIZES = (*AGENTS[:2], msgspec.structs.replace(AGENTS[2], num_ranks=2))


class World:
    """Three hosts, of which the last two are lost."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.lost = (1, 2)
        self.returned: set[int] = set()
        self.failures: dict[int, HostError] = {}
        self.ticket = make_ticket(agents=AGENTS)

    def take_back(self, index: int) -> bool:
        return index in self.returned

    def start_again(
        self, names: Mapping[int, str], given_up: Collection[int]
    ) -> dict[int, HostError]:
        self.done.append(dict(names))
        agents = list(self.ticket.agents)
        for index in names.keys() - self.failures.keys():
            agents[index] = msgspec.structs.replace(agents[index], name=names[index])
        self.ticket = msgspec.structs.replace(self.ticket, agents=tuple(agents))
        return self.failures

    def replace(self, index: int, ticket: Any, is_gone: bool) -> None:
        self.done.append((index, is_gone))

    def forget(self) -> None:
        self.done.append("forget")

    def bring(self, timeout_s: float) -> None:
        self.done.append("bring")

    def bring_back(self, new_hosts: str = "") -> str:
        hosts, launcher = cast(Connections, self), cast(HostAgents, self)
        return bring_back(hosts, launcher, at_once, new_hosts, cast(CodeSync, self))


def at_once(command: Callable[[Core, float], Any]) -> None:
    command(cast(Core, None), 0.0)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("new_hosts", "lost", "returned", "done"),
    [
        ("", (1, 2), [], [{1: "b", 2: "c"}, (1, True), (2, True), "forget", "bring"]),
        ("d", (1, 2), [], [{1: "d", 2: "c"}, (1, False), (2, True), "forget", "bring"]),
        ("", (1, 2), [1], [{2: "c"}, (2, True), "forget", "bring"]),
        ("d", (1, 2), [1], [{2: "c"}, (2, True), "forget", "bring"]),
        ("", (), [], ["bring"]),
    ],
    ids=["again", "elsewhere", "heard again", "heard again, and needs no new one", "none is lost"],
)
def test_lost_hosts_are_started_at_once(
    new_hosts: str, lost: tuple[int, ...], returned: list[int], done: list[Any], world: World
) -> None:
    world.lost, world.returned = lost, set(returned)
    assert world.bring_back(new_hosts) == ""
    assert world.done == done


@pytest.mark.parametrize(
    ("new_hosts", "places"),
    [
        ("", {}),
        ("d:2", {2: "d"}),
        ("d,e", {1: "d", 2: "e"}),
        (["c"], {2: "c"}),
        ("d:2,b", {1: "b", 2: "d"}),
    ],
)
def test_new_hosts_get_places_of_lost_ones(new_hosts: Any, places: dict[int, str]) -> None:
    assert choose_places(new_hosts, [1, 2], OF_TWO_SIZES) == places


@pytest.mark.parametrize(
    ("new_hosts", "lost", "message"),
    [
        ("d:3", [1, 2], r"place d:3 could take \(lost: b:1, c:2\)"),
        ("d,e,f", [1, 2], r"place f could take \(no further one is lost\)"),
        ("d", [], r"place d could take \(no further one is lost\)"),
        ("a", [1], "a has ranks of the mesh"),
        ("d:x", [1], "is no host with a number"),
    ],
)
def test_new_hosts_without_a_place_are_refused(
    new_hosts: str, lost: list[int], message: str
) -> None:
    with pytest.raises(MeshUsageError, match=message):
        choose_places(new_hosts, lost, OF_TWO_SIZES)


def test_host_that_does_not_start_is_named_and_the_other_is_used(world: World) -> None:
    world.failures = {1: HostError("b: no route")}
    text = world.bring_back()
    assert text.startswith("b is lost, and no agent could be started: b: no route\n")
    assert "`%dist_heal --hosts NAME` puts another host in a lost one's place" in text
    assert world.done[1:] == [(2, True), "forget", "bring"]


def test_hosts_that_all_do_not_start_are_an_error(world: World) -> None:
    world.failures = {1: HostError("b: no route"), 2: HostError("c: no torch")}
    with pytest.raises(HostError, match=r"(?s)b is lost.*no route\nc is lost.*no torch"):
        world.bring_back()
    assert world.done == [{1: "b", 2: "c"}]
