"""What is sent to which host, and when nothing is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellmesh.controller.code_files import sync
from cellmesh.controller.code_files.sync import CodeSync, Make
from cellmesh.errors import HostError
from cellmesh.wire.codec import Parcel
from cellmesh.wire.hosts import CodeFile, FilesAnswer

NAMES = ("a", "b")
LOADS: list[str] = []


class Hosts:
    """Two hosts that have files, and answer as agents do."""

    def __init__(self) -> None:
        self.names = ["", ""]
        self.problems = ["", ""]
        self.asked: list[str] = []
        self.sizes: list[int] = []
        self.files: list[dict[str, bytes]] = [{}, {}]

    def ask(self, make: Make, timeout_s: float | None) -> Mapping[int, FilesAnswer] | None:
        return {host: self._answer(host, parcels) for host, parcels in make(7, (0, 1)).items()}

    def take_asked(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked

    def _answer(self, host: int, parcels: Sequence[Parcel[Any]]) -> FilesAnswer:
        assert [parcel.verb.is_last for parcel in parcels] == [False] * (len(parcels) - 1) + [True]
        order = parcels[0].verb
        self.sizes += [len(parcel.buffers[0]) for parcel in parcels]
        archive = b"".join(bytes(parcel.buffers[0]) for parcel in parcels)
        files = msgspec.msgpack.decode(archive, type=list[CodeFile])
        self.asked.append(f"{len(files)} to {NAMES[host]}")
        if order.base in ("", self.names[host]) and not self.problems[host]:
            if not order.base:
                self.files[host] = {}
            for path in order.removed:
                del self.files[host][path]
            self.files[host] |= {file.path: file.content for file in files}
            self.names[host] = order.name
        return FilesAnswer(7, self.names[host], self.problems[host])


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def code(tmp_path: Path, hosts: Hosts, said: list[str]) -> CodeSync:
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "same.py").write_text("a")
    return CodeSync((str(tmp_path),), hosts.ask, NAMES.__getitem__, lambda: len(LOADS), said.append)


def test_what_has_changed_is_sent_to_each_host(
    code: CodeSync, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_CHUNK_BYTES", 10)
    code.bring()
    assert hosts.take_asked() == ["0 to a", "0 to b", "2 to a", "2 to b"]
    assert hosts.files[0] == hosts.files[1] == {"0/a.py": b"a", "0/same.py": b"a"}
    assert max(hosts.sizes) == 10
    code.bring()
    assert hosts.take_asked() == []
    (tmp_path / "b.py").write_text("b")
    (tmp_path / "same.py").unlink()
    code.bring()
    assert hosts.take_asked() == ["1 to a", "1 to b"]
    assert hosts.files[0] == hosts.files[1] == {"0/a.py": b"a", "0/b.py": b"b"}


def test_hosts_get_what_they_lack(code: CodeSync, hosts: Hosts, tmp_path: Path) -> None:
    code.bring()
    hosts.take_asked()
    code.forget()
    code.bring()
    CodeSync(code.roots, hosts.ask, NAMES.__getitem__, int, str).bring()  # another notebook's
    assert hosts.take_asked() == ["0 to a", "0 to b"] * 2
    hosts.names[1], hosts.files[1] = "", {}  # it was started again
    (tmp_path / "a.py").write_text("b")
    code.forget()
    code.bring()
    assert hosts.take_asked() == ["1 to a", "1 to b", "2 to b"]
    assert hosts.files[0] == hosts.files[1] == {"0/a.py": b"b", "0/same.py": b"a"}


def test_each_mesh_of_a_notebook_gets_an_edit(code: CodeSync, hosts: Hosts, tmp_path: Path) -> None:
    others = Hosts()
    other = CodeSync(code.roots, others.ask, NAMES.__getitem__, int, str)
    for content, asked in (
        ("a", ["0 to a", "0 to b", "2 to a", "2 to b"]),
        ("bb", ["1 to a", "1 to b"]),
    ):
        (tmp_path / "a.py").write_text(content)
        code.bring()
        other.bring()
        assert hosts.take_asked() == others.take_asked() == asked
        assert hosts.files == others.files == [{"0/a.py": content.encode(), "0/same.py": b"a"}] * 2


def test_calls_in_a_row_look_now_and_then_or_after_a_load(
    code: CodeSync, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_LOOK_S", 3600.0)
    code.bring(is_hurried=True)
    assert hosts.take_asked()
    (tmp_path / "a.py").write_text("b")
    code.bring(is_hurried=True)
    assert not hosts.take_asked()
    LOADS.append("a")
    code.bring(is_hurried=True)
    assert hosts.take_asked()
    (tmp_path / "a.py").write_text("cc")
    monkeypatch.setattr(sync, "_LOOK_S", 0.0)
    code.bring(is_hurried=True)
    assert hosts.take_asked()


def test_file_of_another_size_than_it_says_is_left_out(
    code: CodeSync, hosts: Hosts, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "odd.py").symlink_to("/proc/self/status")
    code.bring()
    assert hosts.files[0].keys() == hosts.files[1].keys() >= {"0/a.py", "0/same.py"}
    assert "0/odd.py" not in hosts.files[0]
    (text,) = said
    assert f"{tmp_path}/odd.py: it does not have the 0 bytes" in text


def test_problem_is_named_and_tried_again(code: CodeSync, hosts: Hosts, tmp_path: Path) -> None:
    code.bring()
    (tmp_path / "a.py").write_text("b")
    hosts.problems[1] = "the disk is full"
    for is_hurried in (False, True):
        with pytest.raises(HostError, match=r"^b: the disk is full\. .* nothing was run.*--sync"):
            code.bring(is_hurried)
    hosts.problems[1] = ""
    code.bring()
    assert hosts.files[0] == hosts.files[1] == {"0/a.py": b"b", "0/same.py": b"a"}


def test_file_that_cannot_be_read_is_named_and_the_rest_is_sent(
    code: CodeSync, hosts: Hosts, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> Any:
        if path.endswith("a.py"):
            raise PermissionError(13, "Permission denied")
        return open(path, "rb")

    monkeypatch.setattr(sync, "open_regular", refuse)
    for _ in range(2):
        code.bring()
        assert "0/a.py" not in hosts.files[0]
        assert "0/same.py" in hosts.files[0]
    (text,) = said
    assert f"{tmp_path}/a.py: Permission denied" in text


def test_file_that_changes_while_it_is_read_is_read_again(
    code: CodeSync, hosts: Hosts, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["longer", "longer still"]

    def change(path: str) -> Any:
        if changes and path.endswith("a.py"):
            (tmp_path / "a.py").write_text(changes.pop(0))
        return open(path, "rb")

    monkeypatch.setattr(sync, "open_regular", change)
    code.bring()
    assert hosts.files[0]["0/a.py"] == b"longer still"
    assert not said
    changes += [str(n) * (n + 1) for n in range(9, 0, -1)]
    os.utime(tmp_path / "a.py", (1, 1))
    code.bring()
    assert "0/a.py" not in hosts.files[0]
    (text,) = said
    assert f"{tmp_path}/a.py: it does not have" in text
    code.bring()
    assert hosts.files[0]["0/a.py"] == b"11"


def test_large_files_are_named_once(code: CodeSync, said: list[str], tmp_path: Path) -> None:
    code._scanner.max_file_bytes = 0
    code.bring()
    code.forget()
    code.bring()
    (text,) = said
    assert f"{tmp_path}/same.py" in text
    assert ".gitignore" in text
