"""The user's files on a host: received, and put in place all at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellmesh.wire.faults import Faults
from cellmesh.wire.hosts import CodeFile, FilesAnswer, PlaceFiles
from cellmesh.wire.ticket import Ticket, path_of_ranks
from cellmesh.workers.agent.code_files import CodeFiles, CodeStore
from cellmesh.workers.agent.events import Events

MTIME_NS = 10**18


@pytest.fixture
def store(tmp_path: Path) -> CodeStore:
    return CodeStore(1, tmp_path / "code")


def archive_of(files: dict[str, bytes]) -> bytes:
    return msgspec.msgpack.encode(
        [CodeFile(path, MTIME_NS, content) for path, content in files.items()]
    )


def place(
    store: CodeStore, name: str, base: str = "", removed: tuple[str, ...] = (), **contents: bytes
) -> None:
    """Place modules by their names, with ``__`` between the parts of a path."""
    files = {f"0/{path.replace('__', '/')}.py": content for path, content in contents.items()}
    store.place(PlaceFiles(1, name, base, removed), archive_of(files))


def content_of(store: CodeStore) -> dict[str, bytes]:
    root = Path(store.places[0])
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_files_are_placed_with_their_times_and_others_removed(store: CodeStore) -> None:
    assert store.name == ""
    place(store, "first", a=b"1", package__b=b"2", package__c=b"1")
    assert content_of(store) == {"a.py": b"1", "package/b.py": b"2", "package/c.py": b"1"}
    assert os.stat(f"{store.places[0]}/a.py").st_mtime_ns == MTIME_NS
    place(store, "second", "first", ("0/package/b.py", "0/package/c.py"), a=b"2", d=b"1")
    assert content_of(store) == {"a.py": b"2", "d.py": b"1"}
    assert not Path(store.places[0], "package").exists()
    place(store, "third", b=b"all")
    assert content_of(store) == {"b.py": b"all"}
    assert store.name == "third"
    assert {each.name for each in Path(store.places[0]).parents[1].iterdir()} == {
        "current",
        "third",
    }


def test_every_directory_of_the_notebook_is_there_without_files(tmp_path: Path) -> None:
    store = CodeStore(2, tmp_path / "code")
    store.place(PlaceFiles(1, "first", ""), archive_of({"1/a.py": b"1"}))
    store.place(PlaceFiles(1, "second", "first", ("1/a.py",)), archive_of({}))
    assert [os.listdir(place) for place in store.places] == [[], []]


@pytest.mark.parametrize("path", ["/etc/x", "a/../../x", "", "a\0b"])
def test_path_that_leads_outside_is_refused(path: str, store: CodeStore) -> None:
    with pytest.raises(ValueError, match="no place here"):
        store.place(PlaceFiles(1, "first", ""), archive_of({path: b""}))
    with pytest.raises(ValueError, match="no place here"):
        store.place(PlaceFiles(1, "first", "", (path,)), archive_of({}))
    assert not Path(store.places[0]).parents[1].exists()


def test_agent_answers_each_request_once(store: CodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(Faults("the test", pytest.fail))
    answers: list[FilesAnswer] = []
    places: list[tuple[str, ...]] = []
    files = CodeFiles(store, events, answers.append, places.append)

    def hear(number: int) -> FilesAnswer:
        while len(answers) < number:
            events.wait(60.0)
        return answers[-1]

    files.handle(PlaceFiles(1, "first", "first"), (archive_of({}),))
    assert hear(1) == FilesAnswer(1, "")
    assert places == []
    whole = archive_of({"0/a.py": b"1", "0/b.py": b"2"})
    files.handle(PlaceFiles(2, "first", "", is_last=False), (whole[:9],))  # whose notebook has gone
    files.handle(PlaceFiles(3, "first", "", is_last=False), (whole[:7],))
    files.handle(PlaceFiles(3, "first", ""), (whole[7:],))
    assert hear(2) == FilesAnswer(3, "first")
    assert places == [store.places]
    files.handle(PlaceFiles(4, "second", "first"), (archive_of({"../a.py": b""}),))
    assert "no place here" in hear(3).problem
    files.handle(PlaceFiles(5, "second", "first"), (b"?",))
    assert hear(4).problem.startswith("ValidationError")

    def refuse(path: Path, content: Any) -> int:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refuse)
        files.handle(PlaceFiles(6, "second", "first"), (archive_of({"0/a.py": b"2"}),))
        assert hear(5).problem.startswith("cannot write /")
        assert hear(5).problem.endswith("a.py: No space left on device")
    files.handle(PlaceFiles(7, "second", "first"), (archive_of({"0/a.py": b"2"}),))
    assert hear(6) == FilesAnswer(7, "second")
    files.close()
    assert content_of(store) == {"a.py": b"2", "b.py": b"2"}


def test_ranks_import_from_the_places_in_the_notebooks_order(tmp_path: Path) -> None:
    there, own = str(tmp_path), "/own"
    ticket = Ticket(
        name="t", key="", directory="", num_ranks=1, backend="auto", mesh_dim_names=(),
        mesh_shape=(), preload=(), sys_path=(there, own), cwd="/", controller_pid=1, created_at=0.0,
        roots=("/r0", "/r1"), notebook_path=("/nowhere", there, "/r1", "/r0", "relative"),
    )  # fmt: skip
    assert path_of_ranks(ticket, ("/c/0", "/c/1")) == (there, "/c/1", "/c/0", own)
    assert path_of_ranks(ticket, ()) == (there, own)
