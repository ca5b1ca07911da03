"""The state of a mesh by its ticket and processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.cli.meshes import Found, classify, end, find_meshes, is_shared
from cellmesh.cli.rendering import echo_meshes
from cellmesh.errors import HostError
from cellmesh.wire.hosts import Host
from cellmesh.wire.own_file import Secret
from cellmesh.wire.ticket import Ticket, make_directory, write_ticket


def ticket(agent_pid: int) -> Ticket:
    return Ticket(
        name="train",
        key=Secret("00"),
        directory="/run/cellmesh/train",
        num_ranks=2,
        backend="auto",
        mesh_dim_names=("dp",),
        mesh_shape=(2,),
        preload=(),
        sys_path=(),
        cwd="/",
        controller_pid=1,
        created_at=0.0,
        agent_pid=agent_pid,
    )


@pytest.mark.parametrize(
    ("agent_pid", "pids", "age_s", "state"),
    [
        (70, [70, 71], 3600.0, "running"),
        (70, [71], 3600.0, "leftover"),
        (70, [], 1.0, "stale"),
        (0, [], 1.0, "starting"),
        (0, [70], 90.0, "starting"),
        (0, [], 61.0, "stale"),
    ],
)
def test_mesh_state_follows_from_agent_and_holder(
    agent_pid: int, pids: list[int], age_s: float, state: str
) -> None:
    assert classify(ticket(agent_pid), pids, age_s) == state


def put(root: Path, name: str, **changes: Any) -> Ticket:
    """Write a ticket into its directory under a root."""
    made = msgspec.structs.replace(
        ticket(4_000_000),
        name=name,
        directory=str(make_directory(root, name)),
        mark=name,
        **changes,
    )
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
    odd = msgspec.structs.replace(ticket(1), name="a\x1b[2Jb\x07", cwd="/\x9b31m")
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
    wrong = msgspec.structs.replace(ticket(0), directory=str(tmp_path / "precious"))
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
        ("/", False),
        ("/homes", False),
        ("/home", True),
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


def test_a_path_below_no_mount_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [])
    assert not is_shared(Path("/"))


def test_proc_is_not_shared() -> None:
    assert not is_shared(Path("/proc/self/fd"))
