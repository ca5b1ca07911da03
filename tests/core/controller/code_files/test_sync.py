"""What is sent to which host, and when nothing is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cellmesh.controller.code_files import sync
from cellmesh.controller.code_files.sync import CodeSync, Make
from cellmesh.errors import HostError
from cellmesh.wire.code_files import FilesAnswer, OfferFiles, SendFiles
from cellmesh.wire.codec import Parcel

NAMES = ("a", "b")
LOADS: list[str] = []


def only(said: list[str]) -> str:
    (text,) = said
    return text


class Hosts:
    """Two hosts that have contents, and answer as agents do."""

    def __init__(self) -> None:
        self.contents: list[dict[bytes, bytes]] = [{}, {}]
        self.problems = ["", ""]
        self.asked: list[str] = []
        self.files: dict[int, dict[str, bytes]] = {}
        self.are_gone = False

    def ask(self, make: Make, timeout_s: float | None) -> Mapping[int, FilesAnswer] | None:
        if self.are_gone:
            return None
        return {host: self._answer(host, parcels) for host, parcels in make(7, (0, 1)).items()}

    def _answer(self, host: int, parcels: Sequence[Parcel[Any]]) -> FilesAnswer:
        for verb, buffers in parcels:
            if isinstance(verb, OfferFiles):
                self.asked.append(f"offer {NAMES[host]}")
                self._offered = verb
                lacking = {f.digest for f in verb.files} - self.contents[host].keys()
                if lacking or self.problems[host]:
                    return FilesAnswer(7, tuple(sorted(lacking)), self.problems[host])
            else:
                assert isinstance(verb, SendFiles)
                self.asked.append(f"send {len(verb.digests)} to {NAMES[host]}")
                self.contents[host].update(zip(verb.digests, map(bytes, buffers), strict=True))
        self.files[host] = {f.path: self.contents[host][f.digest] for f in self._offered.files}
        return FilesAnswer(7)


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


def test_each_content_is_sent_once_to_each_host_that_lacks_it(
    code: CodeSync, hosts: Hosts, tmp_path: Path
) -> None:
    code.bring()
    assert hosts.asked == ["offer a", "offer b", "send 1 to a", "send 1 to b"]
    assert hosts.files[0] == hosts.files[1] == {"a.py": b"a", "same.py": b"a"}
    hosts.asked.clear()
    code.bring()
    assert hosts.asked == []
    (tmp_path / "b.py").write_text("b")
    code.bring()
    assert hosts.asked == ["offer a", "offer b", "send 1 to a", "send 1 to b"]
    assert hosts.files[1]["b.py"] == b"b"


def test_calls_in_a_row_look_now_and_then_or_after_a_load(
    code: CodeSync, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_LOOK_S", 3600.0)
    code.bring(is_hurried=True)
    assert len(hosts.asked) == 4
    (tmp_path / "a.py").write_text("b")
    code.bring(is_hurried=True)
    assert len(hosts.asked) == 4
    LOADS.append("a")
    code.bring(is_hurried=True)
    assert len(hosts.asked) == 8
    (tmp_path / "a.py").write_text("cc")
    monkeypatch.setattr(sync, "_LOOK_S", 0.0)
    code.bring(is_hurried=True)
    assert len(hosts.asked) == 12


def test_hosts_that_have_all_get_nothing(code: CodeSync, hosts: Hosts) -> None:
    code.bring()
    code.forget()
    hosts.asked.clear()
    code.bring()
    assert hosts.asked == ["offer a", "offer b"]


def test_removed_file_is_offered_no_more(code: CodeSync, hosts: Hosts, tmp_path: Path) -> None:
    code.bring()
    (tmp_path / "same.py").unlink()
    code.bring()
    assert hosts.files[0] == {"a.py": b"a"}


def test_problem_of_a_host_is_named_and_tried_again(code: CodeSync, hosts: Hosts) -> None:
    hosts.problems[1] = "the disk is full"
    for _ in range(2):
        with pytest.raises(HostError, match=r"^b: the disk is full\. .* nothing was run.*--sync"):
            code.bring()
    hosts.problems[1] = ""
    code.bring()
    assert hosts.files[1]["a.py"] == b"a"


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
        assert "a.py" not in hosts.files[0]
        assert "same.py" in hosts.files[0]
    assert f"{tmp_path}/a.py: Permission denied" in only(said)


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
    assert hosts.files[0]["a.py"] == b"longer still"
    assert not said
    changes += [str(n) * (n + 1) for n in range(9)]
    os.utime(tmp_path / "a.py", (1, 1))
    code.bring()
    assert "a.py" not in hosts.files[0]
    assert f"{tmp_path}/a.py: it does not have" in only(said)
    code.bring()
    assert hosts.files[0]["a.py"]


def test_file_of_another_size_than_it_says_is_left_out(
    code: CodeSync, hosts: Hosts, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "odd.py").symlink_to("/proc/self/status")
    code.bring()
    assert hosts.files[0].keys() == hosts.files[1].keys() >= {"a.py", "same.py"}
    assert "odd.py" not in hosts.files[0]
    assert f"{tmp_path}/odd.py: it does not have the 0 bytes" in only(said)


def test_content_that_changes_between_offer_and_sending_is_offered_again(
    code: CodeSync, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "z.py").write_text("z")
    reads = []

    def change(path: str) -> Any:
        if path.endswith("z.py"):
            reads.append(path)
            if len(reads) == 2:
                (tmp_path / "z.py").write_text("y")
        return open(path, "rb")

    monkeypatch.setattr(sync, "open_regular", change)
    code.bring()
    assert hosts.files[0]["z.py"] == b"y"


def test_ended_mesh_is_no_problem_of_files(code: CodeSync, hosts: Hosts) -> None:
    hosts.are_gone = True
    code.bring()


def test_what_is_left_out_is_said_once(code: CodeSync, said: list[str], tmp_path: Path) -> None:
    code._scanner.max_bytes = 1
    code.bring()
    code.forget()
    code.bring()
    (text,) = said
    assert f"{tmp_path}/same.py" in text
    assert ".gitignore" in text


def test_messages_are_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_CHUNK_BYTES", 10)
    contents = {bytes([n]) * 16: b"x" * size for n, size in enumerate((4, 4, 4, 30, 1))}
    made = list(sync.messages(3, contents, contents))
    assert [len(parcel.buffers) for parcel in made] == [3, 1, 1]
    assert [parcel.verb.num_buffers for parcel in made] == [3, 1, 1]
    assert [d for parcel in made for d in parcel.verb.digests] == list(contents)


def test_only_roots_that_are_here_are_offered(hosts: Hosts, tmp_path: Path) -> None:
    def ask(make: Any, timeout_s: float | None) -> Mapping[int, FilesAnswer]:
        (parcel,) = make(1, (0,))[0]
        assert parcel.verb.roots == (1,)
        return {0: FilesAnswer(1)}

    roots = (str(tmp_path / "gone"), str(tmp_path))
    CodeSync(roots, ask, NAMES.__getitem__, int, str).bring()
