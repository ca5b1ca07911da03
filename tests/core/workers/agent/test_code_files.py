"""The user's files on a host: compared, received, put into their places."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellmesh.wire.code_files import CodeFile, FilesAnswer, OfferFiles, SendFiles, digest_of
from cellmesh.wire.faults import Faults
from cellmesh.wire.host import this_place
from cellmesh.wire.ticket import Ticket, path_of_ranks
from cellmesh.workers.agent import code_files
from cellmesh.workers.agent.code_files import CodeFiles, CodeProblem, CodeStore, is_own
from cellmesh.workers.agent.events import Events

ROOT = "/a directory of the notebook's host"


def file(path: str, content: bytes = b"", root: int = 0, mtime_ns: int = 10**18) -> CodeFile:
    return CodeFile(root, path, digest_of(content), len(content), mtime_ns)


def same(path: Path, root: Path, number: int = 0) -> CodeFile:
    status, content = path.stat(), path.read_bytes()
    numbers = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    return CodeFile(number, str(path.relative_to(root)), digest_of(content), *numbers)


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    return CodeStore((ROOT,), tmp_path / "code", lambda path, boot: False, stale_s=0.0)


def bring(store: CodeStore, **contents: bytes) -> list[bytes]:
    """Have a store take modules; return the contents that it asked for."""
    files = {f"{name.replace('__', '/')}.py": content for name, content in contents.items()}
    by_digest = {digest_of(content): content for content in contents.values()}
    missing = store.offer((0,), [file(path, content) for path, content in files.items()])
    for digest in missing:
        store.take((digest,), (by_digest[digest],))
    store.place()
    return [by_digest[digest] for digest in missing]


def content_of(store: CodeStore) -> dict[str, bytes]:
    root = store.directory / "0"
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_files_are_placed_with_their_times_and_others_removed(store: CodeStore) -> None:
    assert sorted(bring(store, a=b"1", package__b=b"2", package__c=b"1")) == [b"1", b"2"]
    assert content_of(store) == {"a.py": b"1", "package/b.py": b"2", "package/c.py": b"1"}
    assert os.stat(store.directory / "0/a.py").st_mtime_ns == 10**18
    assert store.places == (str(store.directory / "0"),)
    assert bring(store, a=b"2", d=b"1") == []  # it has both already
    assert content_of(store) == {"a.py": b"2", "d.py": b"1"}
    assert sorted(each.name for each in store.directory.iterdir()) == ["0"]
    assert sorted(each.name for each in (store.directory / "0").iterdir()) == ["a.py", "d.py"]


def test_what_python_compiled_of_a_file_goes_with_it(store: CodeStore) -> None:
    bring(store, a=b"1", b=b"1", package__c=b"3")
    for name in ("__pycache__/a.cpython-311.pyc", "__pycache__/b.cpython-311.pyc"):
        path = store.directory / "0" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    compiled = store.directory / "0/package/__pycache__/c.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    bring(store, a=b"2", b=b"1")
    left = [path.name for path in (store.directory / "0").rglob("*.pyc")]
    assert left == ["b.cpython-311.pyc"]
    assert not compiled.parent.parent.exists()


def test_file_that_becomes_a_directory_and_back(store: CodeStore) -> None:
    for files in ([file("x", b"1")], [file("x/y.py", b"1")], [file("x", b"1")]):
        for digest in store.offer((0,), files):
            store.take((digest,), (b"1",))
        store.place()
        assert content_of(store) == {files[0].path: b"1"}


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a//b", ".", "a/.", "a\0b"])
def test_path_that_leads_outside_is_refused(path: str, store: CodeStore) -> None:
    with pytest.raises(CodeProblem, match="no place here"):
        store.offer((0,), [file(path)])
    assert not store.directory.exists()


@pytest.mark.parametrize("root", [-1, 1])
def test_root_that_is_not_the_meshs_is_refused(root: int, store: CodeStore) -> None:
    with pytest.raises(CodeProblem, match="no place here"):
        store.offer((0,), [file("a.py", root=root)])


def test_content_that_was_not_asked_for_is_refused(store: CodeStore) -> None:
    (digest,) = store.offer((0,), [file("a.py", b"1")])
    with pytest.raises(CodeProblem, match="was not asked for"):
        store.take((digest,), (b"2",))
    with pytest.raises(CodeProblem, match="was not asked for"):
        store.take((digest_of(b"2"),), (b"2",))


def test_own_copy_is_used_where_it_is_the_same(tmp_path: Path) -> None:
    root = tmp_path / "own"
    root.mkdir()
    (root / "a.py").write_bytes(b"same")
    (root / "b.py").write_bytes(b"else")
    store = CodeStore((str(root),), tmp_path / "code", lambda path, boot: False)
    missing = store.offer((0,), [file("a.py", b"same"), file("b.py", b"news"), file("c.py", b"1")])
    assert set(missing) == {digest_of(b"news"), digest_of(b"1")}


def test_shared_directory_is_used_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    module = root / "a.py"
    module.write_text("1")
    store = CodeStore((str(root), ROOT), tmp_path / "code", lambda path, boot: False, stale_s=60.0)
    assert store.offer((0, 1), [same(module, root)]) == ()
    store.place()
    assert store.places == (str(root), str(tmp_path / "code/1"))
    module.write_text("22")
    described = same(module, root)
    older = msgspec.structs.replace(described, mtime_ns=0)
    store.stale_s = 0.0
    with pytest.raises(CodeProblem, match="is another file than the notebook's"):
        store.offer((0, 1), [older])
    assert store.offer((0, 1), [described]) == ()
    assert not (tmp_path / "code").exists()


def test_shared_directory_that_is_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "a.py"
    module.write_text("1")
    store = CodeStore((str(tmp_path),), tmp_path / "code", lambda path, boot: False, stale_s=60.0)
    store.offer((0,), [same(module, tmp_path)])
    module.write_text("22")
    described = same(module, tmp_path)
    looks = iter([False, False, True])
    monkeypatch.setattr(CodeStore, "_is_same", lambda store, file: next(looks))
    assert store.offer((0,), [described]) == ()
    assert next(looks, None) is None


def test_directory_of_an_overlay_is_not_taken_for_a_shared_one(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    store = CodeStore((str(tmp_path),), tmp_path / "code", lambda path, boot: True)
    store.offer((0,), [same(tmp_path / "a.py", tmp_path)])
    assert store.places == (str(tmp_path / "code/0"),)


def test_directory_of_a_cloned_disk_is_not_taken_for_a_shared_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "filesystem_of", lambda path: "ext4")
    (tmp_path / "a.py").touch()
    offered = [same(tmp_path / "a.py", tmp_path)]
    for boot, place in (("another", tmp_path / "code/0"), (this_place().boot, tmp_path)):
        store = CodeStore((str(tmp_path),), tmp_path / "code", is_own)
        assert store.offer((0,), offered, boot) == ()  # the host's copy is the same as yet
        assert store.places == (str(place),)


@pytest.mark.parametrize(
    ("kind", "is_one_machine", "expected"),
    [
        ("ext4", False, True),
        ("ext4", True, False),
        ("nfs4", False, False),
        ("nfs4", True, False),
        ("overlay", False, True),
        ("overlay", True, True),
        ("", False, True),
    ],
)
def test_file_system_decides_whether_equal_files_are_the_same(
    kind: str, is_one_machine: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "filesystem_of", lambda path: kind)
    assert is_own("/any", this_place().boot if is_one_machine else "another") is expected


def test_roots_that_are_not_offered_stay(tmp_path: Path) -> None:
    store = CodeStore((ROOT, ROOT + "2"), tmp_path / "code", lambda path, boot: False)
    (digest,) = store.offer((0, 1), [file("a.py", b"1"), file("b.py", b"1", root=1)])
    store.take((digest,), (b"1",))
    store.place()
    store.offer((1,), [])
    store.place()
    assert (store.directory / "0/a.py").exists()
    assert not (store.directory / "1/b.py").exists()


def test_full_disk_changes_nothing(store: CodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(store, a=b"1")
    plain = Path.write_bytes

    def refuse(path: Path, content: Any) -> int:
        if path.name == "1":  # the draft of the second file
            raise OSError(28, "No space left on device")
        return plain(path, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(CodeProblem, match=r"cannot write .*/1: No space left on device"):
        bring(store, a=b"2", b=b"3")
    assert content_of(store) == {"a.py": b"1"}
    monkeypatch.undo()
    bring(store, a=b"2", b=b"3")
    assert content_of(store) == {"a.py": b"2", "b.py": b"3"}


def test_agent_answers_each_request_once(store: CodeStore) -> None:
    events = Events(Faults("the test", pytest.fail))
    answers: list[FilesAnswer] = []
    places: list[tuple[str, ...]] = []
    files = CodeFiles(store, events, answers.append, places.append)

    def hear(number: int) -> FilesAnswer:
        while len(answers) < number:
            events.wait(60.0)
        return answers[-1]

    files.handle(OfferFiles(1, (0,), (file("a.py", b"1"), file("b.py", b"2"))), ())
    assert set(hear(1).missing) == {digest_of(b"1"), digest_of(b"2")}
    assert places == []
    for content in (b"1", b"2"):
        files.handle(SendFiles(2, (digest_of(content),), 1), (content,))
    assert hear(2) == FilesAnswer(2)
    assert places == [store.places]
    files.handle(OfferFiles(3, (0,), (file("../a.py"),)), ())
    assert "no place here" in hear(3).problem
    files.handle(OfferFiles(4, (0,), (file("a.py", b"2"),)), ())
    assert hear(4) == FilesAnswer(4)
    assert content_of(store) == {"a.py": b"2"}


def test_ranks_import_from_the_places_in_the_notebooks_order(tmp_path: Path) -> None:
    there, own = str(tmp_path), "/own"
    ticket = Ticket(
        name="t", key="", directory="", num_ranks=1, backend="auto", mesh_dim_names=(),
        mesh_shape=(), preload=(), sys_path=(there, own), cwd="/", controller_pid=1, created_at=0.0,
        roots=("/r0", "/r1"), notebook_path=("/nowhere", there, "/r1", "/r0", "relative"),
    )  # fmt: skip
    assert path_of_ranks(ticket, ("/c/0", "/c/1")) == (there, "/c/1", "/c/0", own)
    assert path_of_ranks(ticket, ()) == (there, own)
