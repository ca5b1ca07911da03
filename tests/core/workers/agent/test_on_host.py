"""What the process that starts a host's agent decides, and says of an agent that does not start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from cellmesh.controller.options import make_options
from cellmesh.controller.session.launch.local import make_ticket
from cellmesh.errors import HostError
from cellmesh.wire.curve import new_keys
from cellmesh.wire.host import Place, Versions, started_ticks, this_place
from cellmesh.wire.hosts import Announcement, Host, HostPart
from cellmesh.wire.own_file import Secret, to_json
from cellmesh.wire.ticket import Ticket, make_directory, read_ticket, runtime_root, write_ticket
from cellmesh.workers.agent import on_host
from cellmesh.workers.agent.on_host import Lines


def given_ticket() -> Ticket:
    """A ticket for the agent of the only host, as a launcher sends it."""
    part = HostPart(0, 1, "a", 0, 1, new_keys().public, ("127.0.0.1",))
    ticket = make_ticket(make_options(hosts="a:1", name="x"))
    return msgspec.structs.replace(ticket, host=part)


HERE = this_place()
ELSEWHERE = msgspec.structs.replace(HERE, host="b", boot="its own")
RESTARTED = msgspec.structs.replace(HERE, boot="an earlier one")


def leave(given: Ticket, place: Place, agent_pid: int) -> Ticket:
    """An agent's directory of another mesh of the name, as it is after the agent's end, or not."""
    directory = make_directory(runtime_root(), f"{given.name}-h0")
    old = msgspec.structs.replace(
        given,
        directory=str(directory),
        place=place,
        agent_pid=agent_pid,
        agent_ticks=started_ticks(os.getpid()),
        mark="other",
        created_at=0.0,
        key=Secret("11"),
    )
    write_ticket(old)
    return old


@pytest.mark.parametrize(
    ("place", "agent_lives", "in_the_way"),
    [(HERE, False, ""), (RESTARTED, True, ""), (HERE, True, HERE.host), (ELSEWHERE, False, "b")],
)
def test_directory_that_a_crash_has_left_makes_way_and_that_of_an_agent_that_may_live_does_not(
    place: Place, agent_lives: bool, in_the_way: str, runtime_dir: Path
) -> None:
    given = given_ticket()
    left = leave(given, place, os.getpid() if agent_lives else 2**22 + 1)
    if in_the_way:
        with pytest.raises(HostError, match=rf"may live on {in_the_way} .*`cellmesh ps`.*--name"):
            on_host._own_ticket(given, "127.0.0.1", "")
        assert read_ticket(left.path).key == left.key
    else:
        own = on_host._own_ticket(given, "127.0.0.1", "")
        assert (own.directory, read_ticket(own.path).key) == (left.directory, given.key)


def ticket_for_all() -> bytes:
    """A ticket for the agents of three hosts, as one command gets it."""
    parts = tuple(HostPart(i, 3, "", 2 * i, 2, new_keys().public) for i in range(3))
    return to_json(msgspec.structs.replace(given_ticket(), host=None, parts=parts))


@pytest.mark.parametrize(
    ("environment", "first_rank", "name"),
    [
        ({"SLURM_PROCID": "2", "SLURMD_NODENAME": "n2"}, 4, "n2"),
        ({"CELLMESH_HOST_NUMBER": "1", "CELLMESH_HOST_NAME": "a.1", "SLURM_PROCID": "0"}, 2, "a.1"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, 0, HERE.host),
    ],
)
def test_agent_takes_the_part_of_its_hosts_number(
    environment: dict[str, str],
    first_rank: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    runtime_dir: Path,
) -> None:
    monkeypatch.setattr(os, "environ", environment | {"JUPYTER_RUNTIME_DIR": str(runtime_dir)})
    ticket = on_host._decode(ticket_for_all())
    assert ticket.host is not None
    assert (ticket.host.first_rank, ticket.host.name) == (first_rank, name)
    assert ticket.parts == ()


@pytest.mark.parametrize(("old", "new"), [(b'"key":', b'"key"'), (b'"cwd":', b'"cxd":')])
def test_damaged_ticket_is_refused_without_its_secret(
    old: bytes, new: bytes, runtime_dir: Path
) -> None:
    given = given_ticket()
    with pytest.raises(HostError, match="what was given is no ticket") as raised:
        on_host._decode(to_json(given).replace(old, new))
    assert given.key not in str(raised.value)


def test_host_without_a_part_is_refused(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    given = ticket_for_all()
    for number, said in (("3", "3, of 3"), ("x", "-1, of 3")):
        monkeypatch.setenv("CELLMESH_HOST_NUMBER", number)
        with pytest.raises(HostError, match=f"numbers its host {said}.*CELLMESH_HOST_NUMBER"):
            on_host._decode(given)


def test_announcement_fits_a_line_of_srun(capsys: pytest.CaptureFixture[str]) -> None:
    """It breaks lines of more than 1,024 bytes, and other hosts' lines may be between."""
    name, number = "n" * 64, "9" * 20
    address = Host(name, f"tcp://255.255.255.255:{number}", "k" * 40, 1023, 1023)
    place, versions = Place(name, "b" * 36, number), Versions(*["2.13.0+cu130.dev20261126"] * 3)
    lines = Lines(None)
    lines.say(Announcement("", address, place, versions, job=number))
    lines.say(Announcement("begin" + "x" * 5000 + "end"))
    announced, problem = capsys.readouterr().out.splitlines()
    assert len(announced) < 1024
    assert len(problem) < 1024
    assert re.search("begin.* ... .*end", problem)


PART = HostPart(0, 2, "n1", 0, 1, "")  # knows no address of the notebook: the route is the loopback
LOOPBACK, OF_HOST, OTHER = "127.0.0.1", "10.1.0.4", "10.9.9.9"


@pytest.mark.parametrize(
    ("launch", "dialled", "requested", "chosen"),
    [
        ("", OF_HOST, "", (OF_HOST, "mgmt")),
        ("ssh -J gate {host} {command}", OF_HOST, "", (OF_HOST, "mgmt")),
        ("", OF_HOST, LOOPBACK, (LOOPBACK, "lo")),
        ("", OTHER, "", (LOOPBACK, "lo")),  # of a container on the host, say
        ("srun --nodelist={host} {command}", OF_HOST, "", (LOOPBACK, "lo")),
        ("torchrun", OF_HOST, "", (LOOPBACK, "lo")),  # that of a management network
    ],
)
def test_agent_has_the_address_that_the_notebooks_ssh_has_dialled_or_of_its_route(
    launch: str,
    dialled: str,
    requested: str,
    chosen: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_interface = {"lo": [LOOPBACK], "mgmt": [OF_HOST]}
    monkeypatch.setattr(on_host, "addresses_by_interface", lambda: by_interface)
    environment = {"SSH_CONNECTION": f"10.1.1.1 5 {dialled} 22"}
    assert on_host.choose_address(PART, requested, "", launch, environment) == chosen
