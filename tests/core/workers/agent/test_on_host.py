"""What the process that starts a host's agent decides, and says of an agent that does not start."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from cellmesh.controller.options import make_options
from cellmesh.controller.session.launch.local import make_ticket
from cellmesh.errors import HostError
from cellmesh.wire.curve import new_keys
from cellmesh.wire.hosts import Announcement, HostPart
from cellmesh.wire.ticket import runtime_root
from cellmesh.workers.agent import on_host
from cellmesh.workers.agent.on_host import choose_address, is_engines

# Reserved for documentation: no host has it.
NOWHERE = "203.0.113.9"


@dataclass
class Silent:
    """A notebook that only hears."""

    said: list[Announcement] = field(default_factory=list)

    def say(self, announcement: Announcement) -> None:
        self.said.append(announcement)

    def hear(self, agent: int) -> bytes:
        return b""


@pytest.fixture
def own_signals() -> Iterator[None]:
    """What a test sets for signals is undone."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ticket_text(name: str = "x") -> bytes:
    """A ticket for the agent of the only host, as a launcher sends it."""
    part = HostPart(0, 1, "a", 0, 1, new_keys().public, ("127.0.0.1",))
    ticket = make_ticket(make_options(hosts="a:1", name=name), False)
    return json.dumps(msgspec.to_builtins(msgspec.structs.replace(ticket, host=part))).encode()


def test_agent_that_does_not_start_says_why(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    monkeypatch.setattr(on_host, "choose_address", lambda *given: (NOWHERE, "lo"))
    with pytest.raises(HostError, match=f"did not start: .*cannot bind tcp://{NOWHERE}"):
        on_host._start(ticket_text(), Silent(), "", "")
    assert [path.name for path in runtime_root().iterdir()] == ["x"]  # the notebook's


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RANK", True),
        ("MASTER_PORT", True),
        ("TORCHELASTIC_USE_AGENT_STORE", True),
        ("OMP_NUM_THREADS", False),
        ("CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_variables_of_torchrun_are_kept_from_ranks(name: str, expected: bool) -> None:
    assert is_engines(name) == expected


PART = HostPart(0, 2, "n1", 0, 1, "")  # knows no address of the notebook: the route is the loopback
HERE, ELSEWHERE = "127.0.0.1", "10.9.9.9"


@pytest.mark.parametrize("launch", ["", "ssh -J gate {host} {command}", "/usr/bin/ssh {host}"])
def test_agent_has_the_address_that_the_notebooks_ssh_has_connected_to(
    launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_interface = {"lo": [HERE], "mgmt": ["10.1.0.4"]}
    monkeypatch.setattr(
        "cellmesh.workers.agent.on_host.addresses_by_interface", lambda: by_interface
    )
    environment = {"SSH_CONNECTION": "10.1.1.1 5 10.1.0.4 22"}
    assert choose_address(PART, "", "", launch, environment) == ("10.1.0.4", "mgmt")
    assert choose_address(PART, HERE, "", launch, environment) == (HERE, "lo")


@pytest.mark.parametrize(
    ("launch", "dialled"),
    [
        ("", ELSEWHERE),  # of a container on the host, say
        ("srun --nodelist={host} {command}", ELSEWHERE),  # that of the login node
        ("srun --nodelist={host} {command}", "10.1.0.4"),
        ("hand", "10.1.0.4"),  # of a management network
        ("torchrun", "10.1.0.4"),
    ],
)
def test_agent_has_the_address_of_its_route_where_no_ssh_has_started_it(
    launch: str, dialled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_interface = {"lo": [HERE], "mgmt": ["10.1.0.4"]}
    monkeypatch.setattr(
        "cellmesh.workers.agent.on_host.addresses_by_interface", lambda: by_interface
    )
    environment = {"SSH_CONNECTION": f"10.1.1.1 5 {dialled} 22"}
    assert choose_address(PART, "", "", launch, environment) == (HERE, "lo")
