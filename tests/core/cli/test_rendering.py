"""The table of `cellmesh ps`, its remarks, and numbers as people read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cellmesh.cli.rendering import Row, echo_meshes, plural
from cellmesh.controller.session.living import FoundMesh, find_meshes
from cellmesh.wire.hosts import Host
from cellmesh.wire.own_file import Secret
from cellmesh.wire.segments import format_bytes
from cellmesh.wire.ticket import Ticket, make_directory, write_ticket

from ...support.tickets import make_ticket


def put(root: Path, name: str, **changes: Any) -> Ticket:
    """Write a ticket into its directory under a root."""
    usual = {"agent_pid": 4_000_000, "controller_pid": 1, "mark": name}
    made = make_ticket(name=name, directory=str(make_directory(root, name)), **usual | changes)
    write_ticket(made)
    return made


def test_a_ticket_with_impossible_values_hides_no_other_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    agent = Host("a", "tcp://127.0.0.1:port", "no key", 0, 2)
    put(root, "key", agents=(agent,), key=Secret("no hex"), curve_secret=Secret("x"))
    put(root, "port", agents=(agent,), curve_secret=Secret("x"))
    put(root, "pid", agent_pid=-5)
    put(root, "whole")
    found = {mesh.name: mesh for mesh in find_meshes(root)}
    states = {name: mesh.state for name, mesh in found.items()}
    assert states == {"key": "unheard", "port": "unheard", "pid": "dead", "whole": "dead"}
    echo_meshes([Row(mesh) for mesh in found.values()])
    assert f"(a); it may live on there until its lease ends. `rm {root}/key" in (
        capsys.readouterr().err
    )


def test_texts_of_tickets_are_no_commands_for_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = make_ticket(agent_pid=1, name="a\x1b[2Jb\x07", cwd="/\x9b31m")
    echo_meshes([Row(FoundMesh(odd, "running"))], ["strange \x1b]0;title\x07"])
    shown = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b"} & {*shown.out}
    assert "a\\x1b[2Jb\\x07" in shown.out
    assert "strange \\x1b]0;title" in shown.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(999), "999 B"),
        (format_bytes(1.5e9), "1.5 GB"),
        (format_bytes(2e12), "2.0 TB"),
        (plural(1, "rank"), "1 rank"),
        (plural(0, "process"), "0 processes"),
    ],
)
def test_numbers_as_text(text: Any, expected: str) -> None:
    assert text == expected
