"""Tickets and the directories they lie in: who may read them, and what is refused."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.errors import HostError
from cellmesh.wire.host import own_version, this_place
from cellmesh.wire.own_file import to_json
from cellmesh.wire.ticket import (
    Holder,
    Ticket,
    find_strange,
    find_tickets,
    make_directory,
    new_key,
    read_holder,
    read_ticket,
    remove_directory,
    remove_own_directory,
    runtime_root,
    write_holder,
    write_ticket,
)

from ...support.tickets import make_ticket


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: pytest's own may be too long for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="cm") as directory:
        yield Path(directory) / "root"


def ticket_in(directory: Path, **changes: Any) -> Ticket:
    return make_ticket(name=directory.name, key=new_key(), directory=str(directory), **changes)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- directories


def test_a_directory_belongs_to_its_owner_alone(root: Path) -> None:
    before = os.umask(0)
    try:
        directory = make_directory(root, "mesh-1")
    finally:
        os.umask(before)
    assert directory == root / "mesh-1"
    assert [mode_of(path) for path in (root, directory, directory / "logs")] == [0o700] * 3


@pytest.mark.parametrize(
    ("prepare", "below", "why"),
    [
        (lambda root: root.mkdir(0o750), "", "must belong to you alone"),
        (lambda root: root.mkdir(0o705), "", "must belong to you alone"),
        (lambda root: make_directory(root, "one"), "",
         "one is in the way: choose another name, or look at it"),
        (lambda root: write_ticket(ticket_in(make_directory(root, "one"))), "",
         "a mesh of the name one lives (about to start): `%dist_attach one` finds it"),
        (lambda root: root.write_text("a file"), "", "in the way"),
        (lambda root: root.write_text("a file"), "below", "set JUPYTER_RUNTIME_DIR to another"),
        (lambda root: None, "ü" * 40, "too long for a socket's address"),
    ],
    ids=["0750", "0705", "left", "name in use", "a file", "below a file", "too long"],
)  # fmt: skip
def test_a_directory_that_cannot_be_made_is_refused(
    root: Path, prepare: Callable[[Path], object], below: str, why: str
) -> None:
    prepare(root)
    before = sorted(root.rglob("*")) if root.exists() else None
    with pytest.raises(HostError, match=re.escape(why)):
        make_directory(root / below, "one")
    assert (sorted(root.rglob("*")) if root.exists() else None) == before


def test_root_and_ticket_of_another_user_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_ticket(ticket_in(make_directory(root, "one")))
    somebody_else = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody_else)
    with pytest.raises(HostError, match="must belong to you alone"):
        make_directory(root, "two")
    with pytest.raises(HostError, match="not yours alone"):
        read_ticket(path)


def test_a_removal_that_was_killed_can_be_taken_up(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_directory(root, "one")
    ticket = ticket_in(directory)
    unlink, num_left = os.unlink, 0

    class Killed(BaseException):
        pass

    def unlink_some(*args: Any, **kwargs: Any) -> None:
        nonlocal num_left
        if num_left == 0:
            raise Killed
        num_left -= 1
        unlink(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink_some)
    for num_before in range(4):
        (directory / "logs").mkdir(exist_ok=True)
        write_ticket(ticket)
        for name in ("a", "z", "logs/rank0.log", "logs/rank1.log"):
            (directory / name).touch()
        num_left = num_before
        with pytest.raises(Killed):
            remove_directory(directory)
        assert read_ticket(ticket.path) == ticket
    num_left = 10
    remove_own_directory(ticket)
    assert not directory.exists()


# ---- tickets


def test_a_ticket_is_read_back(root: Path) -> None:
    assert find_tickets(root) == []
    odd = {"cwd": "/donn\udce9es", "sys_path": ("/donn\udce9es", "/ö")}  # no UTF-8
    ticket = ticket_in(make_directory(root, "one"), **odd)
    write_ticket(msgspec.structs.replace(ticket, agent_pid=7))
    before = os.umask(0)
    try:
        path = write_ticket(ticket)
    finally:
        os.umask(before)
    assert path == ticket.path == root / "one" / "ticket.json"
    assert (read_ticket(path), mode_of(path)) == (ticket, 0o600)
    assert sorted(each.name for each in path.parent.iterdir()) == ["logs", "ticket.json"]
    assert ticket.agent_endpoint == f"ipc://{root}/one/agent.sock"
    assert ticket.place == this_place()
    write_ticket(older := ticket_in(make_directory(root, "older"), created_at=-1.0))
    (root / "link").symlink_to("one")
    assert find_tickets(root) == [older, ticket]
    assert len({new_key() for _ in range(100)}) == 100


def test_a_ticket_that_cannot_be_written_or_read_is_an_error_of_the_host(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(HostError, match="cannot write"):
        write_ticket(ticket_in(root / "below"))
    with pytest.raises(HostError, match="cannot read"):
        read_ticket(root / "none" / "ticket.json")


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_ticket_that_others_may_read_is_not_used(root: Path, mode: int) -> None:
    path = write_ticket(ticket_in(make_directory(root, "one")))
    path.chmod(mode)
    with pytest.raises(HostError, match="not yours alone"):
        read_ticket(path)


def private_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)
    return path


BAD_TICKETS = {
    "empty": b"",
    "no JSON": b"hello",
    "bad UTF-8": b'{"name": "\xff\xfe"}',
    "nested too deeply": b'{"name": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("content", BAD_TICKETS.values(), ids=BAD_TICKETS)
def test_a_file_that_is_no_ticket_is_refused_and_skipped(root: Path, content: bytes) -> None:
    write_ticket(good := ticket_in(make_directory(root, "good")))
    with pytest.raises(HostError, match="is no ticket"):
        read_ticket(private_file(root / "bad" / "ticket.json", content))
    (root / "empty").mkdir()
    (root / "file").write_text("")
    assert find_tickets(root) == [good]


@pytest.mark.parametrize(("agent_pid", "remedy"), [(0, "use that version$"), (77, r"`kill 77`")])
def test_a_ticket_of_another_version_names_both(root: Path, agent_pid: int, remedy: str) -> None:
    ticket = ticket_in(make_directory(root, "one"), version="9.8.7", agent_pid=agent_pid)
    content = json.dumps({**json.loads(to_json(ticket)), "num_hosts": 5}).encode()
    path = private_file(root / "one" / "ticket.json", content)
    with pytest.raises(
        HostError, match=rf"cellmesh 9\.8\.7, and this is {own_version()}: .*{remedy}"
    ):
        read_ticket(path)
    assert find_tickets(root) == []
    [(directory, why)] = find_strange(root)
    assert directory == root / "one"
    assert "9.8.7" in why


@pytest.mark.parametrize("hidden", ["", "cellmesh"])
def test_root_of_another_user_is_named(hidden: str, tmp_path: Path) -> None:
    root = tmp_path / hidden
    root.mkdir(exist_ok=True)
    tmp_path.chmod(0)
    user = os.geteuid()
    if user == 0:  # who may read all files
        os.seteuid(65534)
    try:
        assert find_tickets(root) == []
        [(directory, why)] = find_strange(root)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    assert directory == root
    assert "another user's: set JUPYTER_RUNTIME_DIR" in why


def test_holder_of_a_mesh_is_written_next_to_the_ticket(root: Path) -> None:
    ticket = ticket_in(make_directory(root, "one"))
    assert read_holder(ticket) is None
    holder = Holder(controller_pid=5, is_attached=True, since=1.5)
    write_holder(ticket, holder)
    assert read_holder(ticket) == holder
    assert mode_of(ticket.holder_path) == 0o600
    ticket.holder_path.write_bytes(b"no")
    assert read_holder(ticket) is None


def test_a_runtime_directory_too_long_for_sockets_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", "/run/user/0/jupyter")
    assert runtime_root() == Path("/run/user/0/jupyter/cellmesh")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", "/home/" + "x" * 90)
    root = runtime_root()
    assert root == Path(tempfile.gettempdir()) / f"cellmesh-{os.getuid()}"


# ---- what is no ticket, and no directory, of this user's


def _huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


STRANGE_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
    "a link": lambda path: path.symlink_to("/proc/kcore"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a huge file": _huge,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", STRANGE_FILES.values(), ids=STRANGE_FILES)
def test_ticket_that_is_no_small_file_is_refused_without_waiting(
    root: Path, make: Callable[[Path], object]
) -> None:
    write_ticket(good := ticket_in(make_directory(root, "good")))
    (root / "strange").mkdir()
    path = root / "strange" / "ticket.json"
    make(path)
    with pytest.raises(HostError, match=re.escape(str(path))):
        read_ticket(path)
    assert find_tickets(root) == [good]
    assert [str(where.name) for where, _ in find_strange(root)] == ["strange"]
    make(good.holder_path)
    assert read_holder(good) is None


@pytest.mark.parametrize("is_own", [True, False])
def test_a_root_that_is_a_link_is_its_users_own(
    root: Path, is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "target")
    if not is_own:  # the link is another user's, what it leads to is ours
        lstat = Path.lstat
        fake = SimpleNamespace(st_mode=lstat(root).st_mode, st_uid=os.getuid() + 1)
        monkeypatch.setattr(Path, "lstat", lambda path: fake if path == root else lstat(path))
        with pytest.raises(HostError, match="must belong to you alone"):
            make_directory(root, "one")
    else:
        make_directory(root, "one")
    assert [path.name for path in (tmp_path / "target").iterdir()] == (["one"] if is_own else [])
