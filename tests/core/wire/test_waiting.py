"""The directory of the sockets on which zygotes wait for shells."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cellmesh.wire.host import Process, started_ticks
from cellmesh.wire.waiting import (
    address,
    find_sockets,
    is_own_peer,
    name_socket,
    open_directory,
    sweep,
)

OWN = Process(os.getpid(), started_ticks(os.getpid()))


def test_sockets_of_killed_zygotes_are_removed_and_those_of_other_hosts_are_not(
    runtime_dir: Path,
) -> None:
    with pytest.raises(FileNotFoundError):
        open_directory(makes=False)
    sweep()  # nothing to do
    directory = open_directory()
    own = name_socket(OWN.pid, 3)
    dead = f"{own}0"  # the number is another process's now
    elsewhere = f"00000000{own[8:]}"
    for name in (dead, own, elsewhere, "README"):
        os.close(os.open(name, os.O_CREAT, dir_fd=directory))
    ((found, num_modules, process),) = [
        (each.name, each.num_modules, each.process) for each in find_sockets(directory)
    ]
    assert (found, num_modules, process) == (own, 3, OWN)
    assert sorted(os.listdir(directory)) == sorted([own, elsewhere, "README"])
    os.close(directory)


def test_those_that_have_learned_most_or_were_used_last_are_first(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmesh.wire.waiting.is_process", lambda pid, ticks: True)
    directory = open_directory()
    for pid, num_modules, used_at in [(11, 0, 5), (12, 0, 7), (13, 2, 1), (14, -1, 9)]:
        name = name_socket(pid, num_modules)
        os.close(os.open(name, os.O_CREAT, dir_fd=directory))
        os.utime(name, (used_at, used_at), dir_fd=directory)
    assert [each.process.pid for each in find_sockets(directory)] == [13, 12, 11, 14]
    os.close(directory)


def test_a_directory_of_others_is_not_used(runtime_dir: Path) -> None:
    path = runtime_dir / "cellmesh-waiting"
    os.close(open_directory())
    path.chmod(0o755)
    with pytest.raises(PermissionError):
        open_directory()
    path.chmod(0o700)
    path.rename(runtime_dir / "moved")
    path.symlink_to(runtime_dir / "moved")
    with pytest.raises(NotADirectoryError):
        open_directory()


def test_a_long_path_is_no_problem_and_peers_show_their_user(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = runtime_dir / ("x" * 200)
    monkeypatch.setattr("cellmesh.wire.waiting.runtime_root", lambda: long)
    directory = open_directory()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        server.bind(address(directory, name_socket(OWN.pid)))
        server.listen()
        client.connect(address(directory, name_socket(OWN.pid)))
        assert is_own_peer(client)
        monkeypatch.setattr(os, "getuid", lambda: 1)
        assert not is_own_peer(client)
    os.close(directory)
