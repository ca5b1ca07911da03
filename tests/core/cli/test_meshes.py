"""The state of a mesh by its ticket and processes, and numbers as people read them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.cli.meshes import Found, classify, end, find_meshes, is_shared
from cellmesh.cli.rendering import echo_meshes, format_bytes, format_seconds, plural
from cellmesh.errors import HostError
from cellmesh.wire.hosts import Host
from cellmesh.wire.own_file import Secret
from cellmesh.wire.ticket import Ticket, make_directory, write_ticket

from ...support.tickets import make_ticket


@pytest.mark.parametrize(
    ("agent_pid", "pids", "age_s", "state"),
    [
        (70, [70, 71], 3600.0, "running"),
        (70, [71], 3600.0, "leftover"),
        (0, [], 1.0, "starting"),
        (0, [70], 90.0, "starting"),
        (0, [], 61.0, "stale"),
    ],
)
def test_mesh_state_follows_from_agent_and_holder(
    agent_pid: int, pids: list[int], age_s: float, state: str
) -> None:
    assert classify(make_ticket(agent_pid=agent_pid), pids, age_s) == state


def put(root: Path, name: str, **changes: Any) -> Ticket:
    """Write a ticket into its directory under a root."""
    usual = {"agent_pid": 4_000_000, "controller_pid": 1, "mark": name}
    made = make_ticket(name=name, directory=str(make_directory(root, name)), **usual | changes)
    write_ticket(made)
    return made


def test_a_ticket_with_impossible_values_is_listed_as_broken_and_the_others_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    agent = Host("a", "tcp://127.0.0.1:port", "no key", 0, 2)
    put(root, "key", agents=(agent,), key=Secret("no hex"), curve_secret=Secret("x"))
    put(root, "port", agents=(agent,), curve_secret=Secret("x"))
    put(root, "pid", agent_pid=-5)
    put(root, "whole")
    found = {mesh.ticket.name: mesh for mesh in find_meshes(root)}
    assert found.keys() == {"key", "port", "pid", "whole"}
    assert found["whole"].state == "stale"
    assert found["key"].state == found["port"].state == "broken"
    echo_meshes([(mesh, 0, 0) for mesh in found.values()], ())
    assert f"{root}/key/ticket.json is no ticket of a mesh: ValueError" in capsys.readouterr().err


def test_texts_of_tickets_are_no_commands_for_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = make_ticket(agent_pid=1, name="a\x1b[2Jb\x07", cwd="/\x9b31m")
    echo_meshes([(Found(odd, "running", (), 1.0), 0, 0)], (), ["strange \x1b]0;title\x07"])
    shown = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b"} & set(
        shown.out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    )
    assert "a\\x1b[2Jb\\x07" in shown.out
    assert "strange \\x1b]0;title" in shown.err


def test_a_folder_that_a_ticket_names_is_not_removed_unless_the_ticket_lies_in_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis").write_text("...")
    wrong = make_ticket(agent_pid=0, directory=str(tmp_path / "precious"))
    with pytest.raises(HostError, match="has other files") as caught:
        end(Found(wrong, "leftover", (), 1.0))
    assert "rm -r" not in str(caught.value)
    assert (tmp_path / "precious/thesis").exists()


MOUNTS = [
    ("/", "ext4"),
    ("/home", "nfs4"),
    ("/home/local", "ext4"),
    ("/mnt", "lustre"),
    ("/mnt", "overlay"),  # the later of two hides the other
]


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/homes", False),
        ("/home/a/b", True),
        ("/home/local/a", False),
        ("/mnt/x", False),
    ],
)
def test_a_path_is_on_the_last_mount_above_it(
    path: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in MOUNTS]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    assert is_shared(Path(path)) is shared


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(999), "999 B"),
        (format_bytes(1.5e9), "1.5 GB"),
        (format_bytes(2e12), "2.0 TB"),
        (format_seconds(0.0125), "12.5 ms"),
        (format_seconds(119), "119 s"),
        (format_seconds(300), "5 min"),
        (format_seconds(2e5), "2 days"),
        (plural(1, "rank"), "1 rank"),
        (plural(0, "process"), "0 processes"),
    ],
)
def test_numbers_as_text(text: Any, expected: str) -> None:
    assert text == expected
