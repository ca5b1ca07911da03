"""The process that waits for the next mesh of a notebook or of a user's shells."""

from __future__ import annotations

import functools
import os
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from cellmesh.wire.marks import StartMesh
from cellmesh.wire.preload import change_preloads, learn
from cellmesh.wire.waiting import Needs, address, find_sockets, name_socket, open_directory
from cellmesh.workers.preload import Loading, Watched
from cellmesh.workers.prestart import Shells, _Waiting


def test_it_ends_after_its_time_and_loads_nothing_then(tmp_path: Path) -> None:
    kernel, own = socket.socketpair()
    loading = Loading([], str(tmp_path / "list.json"), "")
    pidfd = os.pidfd_open(os.getpid())
    with kernel, own:
        _Waiting(own, [pidfd], 0.01, cast(Any, None), loading).serve()
    os.close(pidfd)


def test_a_request_at_the_end_of_a_mesh_keeps_its_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def run(become_guardian: functools.partial[int]) -> None:
        seen.append(become_guardian.args)
        assert {*map(stat.S_ISSOCK, (os.fstat(number).st_mode for number in seen[0][2]))} == {True}
        raise SystemExit

    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr("cellmesh.workers.prestart.run_and_exit", run)
    kernel, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    loading = Loading([], str(tmp_path / "list.json"), "")
    waiting = _Waiting(own, [], 60.0, cast(Any, None), loading)
    (tmp_path / "request").write_bytes(msgspec.msgpack.encode(StartMesh("", b"", {})))
    with kernel, own, open(tmp_path / "request", "rb") as file, open(os.devnull) as null:
        guardian = os.posix_spawn("/bin/true", ["true"], {})
        waiting.watch([guardian])
        os.waitid(os.P_PID, guardian, os.WEXITED | os.WNOWAIT)
        socket.send_fds(kernel, [b"m"], [file.fileno(), null.fileno(), null.fileno()])
        with pytest.raises(SystemExit):
            waiting.serve()
    ((_, descriptors, numbers, _),) = seen
    assert numbers.isdisjoint(descriptors)
    for number in descriptors:
        os.close(number)


# ---- of shells


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> os._Environ[str]:
    """An environment that records which variables are looked up."""
    monkeypatch.setattr(Watched, "asked", set())
    monkeypatch.setattr(Watched, "prefixes", set())
    plain: Any = os.environ
    data = {b"READ": b"1", b"SEED": b"2", b"BAR_WIDTH": b"3", b"RANK": b"4"}
    copied = type(os.environ)(
        data, plain.encodekey, plain.decodekey, plain.encodevalue, plain.decodevalue
    )
    cast(Any, copied).__class__ = Watched
    return copied


def misfit(shells: Shells, changes: Mapping[str, str], **given: Any) -> str:
    fields = {"conditions": {}, "sys_path": (), "list_path": "", "ignored": ()}
    return shells.misfit(Needs(**fields | given), {**shells.environment, **changes})


def test_variables_matter_that_imports_have_looked_up(environ: os._Environ[str]) -> None:
    assert environ.get("READ") == "1"
    assert "ABSENT" not in environ
    found = {name: value for name, value in environ.items() if name.startswith("BAR_")}
    assert found == {"BAR_WIDTH": "3"} == {n: v for n, v in dict(environ).items() if n in found}
    shells = Shells(-1, {}, dict(environ), "")
    assert misfit(shells, {"SEED": "3", "NEW": "1", "RANK": "5", "TERM": "dumb"}) == ""
    for name in ("READ", "ABSENT", "BAR_WIDTH", "BAR_COLOUR", "LD_PRELOAD", "PYTORCH_JIT"):
        assert misfit(shells, {name: "other"}) == name


def test_conditions_and_modules_of_other_projects_matter(tmp_path: Path) -> None:
    shells = Shells(-1, {"umask": "2"}, {}, "one")
    assert misfit(shells, {}, conditions={"umask": "2"}) == ""
    assert misfit(shells, {}, conditions={"umask": "7"}) == "umask"
    assert misfit(shells, {}, conditions={"umask": "2", "nice": "1"}) == "nice"
    assert misfit(shells, {}, conditions={"umask": "2"}, list_path="another") == ""
    # Also of modules that the project's list has no room for any more.
    shells = Shells(-1, {}, {}, "one", learned={"msgspec.json", "not_there"})
    (tmp_path / "msgspec.py").touch()
    assert misfit(shells, {}, list_path="one", sys_path=sys.path) == ""
    beside = [str(tmp_path), *sys.path]
    assert misfit(shells, {}, list_path="one", sys_path=beside) == "msgspec"
    assert misfit(shells, {}, list_path="another", sys_path=sys.path) == "the project"
    assert "the project" in shells.take(StartMesh("", b"", {}))


def test_modules_that_a_project_has_learned_are_added_once(runtime_dir: Path) -> None:
    path = runtime_dir / "lists" / "list.json"
    shells = Shells(open_directory(), {}, {}, str(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address(shells.directory, name_socket(shells.pid)))
        assert find_sockets(shells.directory)[0].num_modules == -1
        shells.note()
        change_preloads(path, lambda found: learn(found, "", {"one": 1.0, "two": 2.0}))
        assert [shells.more_to_learn(), shells.more_to_learn()] == [["one", "two"], []]
        assert find_sockets(shells.directory)[0].num_modules == 2
        path.unlink()  # as if it had lost them to slower ones
        change_preloads(path, lambda found: learn(found, "", {"three": 3.0}))
        assert [shells.more_to_learn(), shells.more_to_learn()] == [["three"], []]
        assert find_sockets(shells.directory)[0].num_modules == 3
    os.close(shells.directory)
