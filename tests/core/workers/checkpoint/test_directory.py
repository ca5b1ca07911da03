"""A checkpoint's place holds a whole checkpoint, wherever a save that replaces it is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellmesh.workers.checkpoint import directory as checkpoint_place
from cellmesh.workers.checkpoint.directory import CheckpointDirectory, exchange


class Killed(BaseException):
    """Stands for SIGKILL: nobody handles it."""


def write(directory: Path, version: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "__0_0.distcp").write_text(version)
    (directory / ".metadata").write_text(version)


def version_at(directory: Path) -> str:
    """Which version is there, whole."""
    assert sorted(entry.name for entry in directory.iterdir()) == [".metadata", "__0_0.distcp"]
    (version,) = {entry.read_text() for entry in directory.iterdir()}
    return version


def begin(target: Path, version: str, token: str) -> CheckpointDirectory:
    """A save that has written all."""
    place = CheckpointDirectory(target)
    place.open_beside(token, cleans_up=True)
    place.mark_written(0, b"")
    write(place.beside, version)
    return place


def kill_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Be killed before the nth change of the file system."""
    num_changes = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_changes
            num_changes += 1
            if num_changes == nth:
                raise Killed
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "unlink", counted(os.unlink))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(checkpoint_place, "exchange", counted(checkpoint_place.exchange))
    monkeypatch.setattr(checkpoint_place.shutil, "rmtree", counted(checkpoint_place.shutil.rmtree))


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("nth", range(1, 8))
def test_checkpoint_is_whole_wherever_the_save_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, has_old: bool, can_exchange: bool
) -> None:
    target = tmp_path / "runs" / "latest"
    if has_old:
        write(target, "old")
    place = begin(target, "new", "a")
    with monkeypatch.context() as patch:
        if not can_exchange:
            patch.setattr(checkpoint_place, "exchange", lambda first, second: False)
        kill_at(patch, nth)
        was_killed = False
        try:
            place.put()
        except Killed:
            was_killed = True
    place.close(discards=False)  # as the kernel does
    if has_old and can_exchange:
        assert version_at(target) in ("old", "new")  # nobody need have looked after it
    assert not CheckpointDirectory(target).why_no_checkpoint() or (was_killed and not has_old)
    if target.exists():
        assert (
            version_at(target) == "new" if not was_killed else version_at(target) in ("old", "new")
        )
    # The next save removes what was left.
    after = begin(target, "newer", "b")
    after.put()
    after.close(discards=False)
    assert version_at(target) == "newer"
    assert [entry.name for entry in target.parent.iterdir()] == ["latest"]


def test_two_directories_change_their_names(tmp_path: Path) -> None:
    write(tmp_path / "a", "a")
    write(tmp_path / "b", "b")
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert (version_at(tmp_path / "a"), version_at(tmp_path / "b")) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "c")


def test_a_save_that_goes_on_is_not_cleaned_up(tmp_path: Path) -> None:
    first = begin(tmp_path / "latest", "first", "a")
    second = begin(tmp_path / "latest", "second", "b")
    assert first.beside.exists()
    first.put()
    second.put()
    assert not first.is_there()
    assert second.is_there()
    first.close(discards=True)
    second.close(discards=False)
    assert version_at(tmp_path / "latest") == "second"


def test_the_last_to_let_go_of_a_failed_save_removes_it(tmp_path: Path) -> None:
    ranks = [CheckpointDirectory(tmp_path / "latest") for _ in range(3)]
    for rank, place in enumerate(ranks):
        place.open_beside("a", cleans_up=rank == 0)
    ranks[1].mark_failed(1, "OSError: full")
    ranks[0].mark_written(0, b"x")
    assert ranks[2].failures() == {1: "OSError: full"}
    assert ranks[2].written() == [0]
    for place in ranks[:2]:
        place.close(discards=True)
    assert ranks[2].failures() == {1: "OSError: full"}
    ranks[2].close(discards=True)
    assert not list(tmp_path.iterdir())


def test_of_a_link_the_directory_behind_it_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "disk" / "runs", "old")
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "runs")
    place = begin(tmp_path / "latest", "new", "a")
    place.put()
    place.close(discards=False)
    assert (tmp_path / "latest").is_symlink()
    assert version_at(tmp_path / "latest") == version_at(tmp_path / "disk" / "runs") == "new"
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["runs"]


def test_directory_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    assert "notes.txt" in CheckpointDirectory(tmp_path / "data").why_not()
    assert "is a file" in CheckpointDirectory(tmp_path / "file").why_not()
    (tmp_path / "data" / ".metadata").write_text("")
    assert "notes.txt" in CheckpointDirectory(tmp_path / "data").why_not()
    write(tmp_path / "checkpoint", "old")
    (tmp_path / "empty").mkdir()
    for name in ("checkpoint", "empty", "none"):
        assert not CheckpointDirectory(tmp_path / name).why_not()
    assert "nothing at" in CheckpointDirectory(tmp_path / "none").why_no_checkpoint()
    assert "is no checkpoint" in CheckpointDirectory(tmp_path / "empty").why_no_checkpoint()
