"""Agents of several hosts are started at once, and those that start do not need the others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cellmesh.controller.session.launch.host_commands import HostCommands
from cellmesh.errors import HostError
from cellmesh.wire.host import Place
from cellmesh.wire.hosts import ANNOUNCEMENT, Announcement, HostPart
from tests.core.controller.session.test_session import TICKET

WAIT_S = 30.0
# What the hosts do: a and b start only beside each other, as they wait for each other's file.
SCRIPT = """
cd {directory}; touch $0; read ticket
case $0 in
  a) until [ -e b ]; do sleep 0.01; done; cat announced; read go;;
  b) until [ -e a ]; do sleep 0.01; done; cat announced; read go;;
  broken) echo no such file >&2; exit 3;;
  full) cat problem; read go;;
  silent) read go;;
esac
"""


def parts(*names: str) -> list[HostPart]:
    return [HostPart(i, len(names), name, i, 1, "key", ("here",)) for i, name in enumerate(names)]


@pytest.fixture
def commands(tmp_path: Path) -> HostCommands:
    for name, problem in (("announced", ""), ("problem", "the disk is full")):
        said = Announcement(place=Place("h", "boot", "pids"), problem=problem)
        (tmp_path / name).write_bytes(ANNOUNCEMENT.encode() + msgspec.json.encode(said) + b"\n")
    (tmp_path / "logs").mkdir()
    return HostCommands()


@pytest.fixture
def ticket(tmp_path: Path) -> object:
    script = SCRIPT.format(directory=tmp_path)
    return msgspec.structs.replace(
        TICKET, directory=str(tmp_path), launch=f"sh -c '{script}' {{host}} {{command}}"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken", "broken: .*no such file"),
        ("full", "full: the disk is full"),
        ("silent", "silent did not answer within 3 s"),
    ],
)
def test_hosts_start_at_once_whatever_becomes_of_another(
    name: str, text: str, commands: HostCommands, ticket: object
) -> None:
    failures: dict[int, HostError] = {}
    timeout_s = 3.0 if name == "silent" else WAIT_S
    started = commands.start(ticket, parts("a", name, "b"), timeout_s, failures)  # type: ignore[arg-type]
    assert [each.problem for each in started] == ["", ""]
    assert failures.keys() == {1}
    with pytest.raises(HostError, match=f"(?s){text}"):
        raise failures[1]
    assert [each.name for each in commands._starting] == ["a", "b"]
    commands.drop(0)
    assert [each.name for each in commands._starting] == ["b"]
    commands.let_go()
    assert commands.wait(WAIT_S)


def test_host_that_is_needed_fails_the_start(commands: HostCommands, ticket: object) -> None:
    with pytest.raises(HostError, match="full: the disk is full"):
        commands.start(ticket, parts("a", "full", "b"), WAIT_S)  # type: ignore[arg-type]
    commands.end()
    assert not commands.poll()
