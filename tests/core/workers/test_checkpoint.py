"""A checkpoint's directory holds a whole checkpoint, wherever a save that replaces it is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellmesh.workers import checkpoint
from cellmesh.workers.checkpoint import CheckpointDirectory, differ, digests_of


def write(directory: Path, version: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "__0_0.distcp").write_text(version)
    (directory / ".metadata").write_text(version)


def version_at(directory: Path) -> str:
    """Which version is there, whole."""
    assert sorted(entry.name for entry in directory.iterdir()) == [".metadata", "__0_0.distcp"]
    (version,) = {entry.read_text() for entry in directory.iterdir()}
    return version


def begin(target: Path, version: str) -> CheckpointDirectory:
    """A save that has written all, beside the target."""
    directory = CheckpointDirectory(target, token=version)
    assert not directory.why_not()
    directory.remove_left()
    write(directory.beside, version)
    return directory


def save(target: Path, version: str) -> None:
    directory = begin(target, version)
    directory.put()
    directory.clear()


def is_killed_at(nth: int, can_exchange: bool, target: Path) -> bool:
    """Save in another process, which dies before the nth change of the file system that puts the
    new checkpoint in place; whether it was so many.
    """
    pid = os.fork()
    if pid:
        return bool(os.waitpid(pid, 0)[1])
    num_changes = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_changes
            num_changes += 1
            if num_changes == nth:
                os._exit(1)
            return function(*args, **kwargs)

        return call

    try:
        if not can_exchange:
            checkpoint.exchange = lambda first, second: False
        directory = begin(target, "new")
        os.fsync = counted(os.fsync)
        Path.rename = counted(Path.rename)  # type: ignore[method-assign]
        checkpoint.exchange = counted(checkpoint.exchange)
        checkpoint.shutil.rmtree = counted(checkpoint.shutil.rmtree)  # type: ignore[assignment]
        directory.put()
        directory.clear()
        os._exit(0)
    finally:
        os._exit(2)


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("nth", range(1, 8))
def test_checkpoint_is_whole_wherever_the_save_is_killed(
    tmp_path: Path, nth: int, has_old: bool, can_exchange: bool
) -> None:
    target = tmp_path / "runs" / "latest"
    if has_old:
        write(target, "old")
    was_killed = is_killed_at(nth, can_exchange, target)
    if has_old and can_exchange:
        assert version_at(target) in ("old", "new")  # before a load or save has looked after it
    assert not CheckpointDirectory(target).why_no_checkpoint() or (was_killed and not has_old)
    if target.exists():
        assert (
            version_at(target) == "new" if not was_killed else version_at(target) in ("old", "new")
        )
    # The next save removes the remains.
    save(target, "newer")
    assert version_at(target) == "newer"
    assert [entry.name for entry in target.parent.iterdir()] == ["latest"]


def test_a_save_fails_if_a_later_one_has_removed_its_directory(tmp_path: Path) -> None:
    target = tmp_path / "run[0-9]*"
    first, second = begin(target, "first"), begin(target, "second")
    with pytest.raises(FileNotFoundError):
        first.put()
    second.put()
    assert version_at(target) == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == [target.name]


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


def test_ranks_differ_only_where_they_hold_other_values_under_one_path() -> None:
    same = "".join(["lo", "ss"])  # equal, another object: pickles of the two lists differ
    assert digests_of({"of": ["loss", "loss"]}) == digests_of({"of": ["loss", same]})
    assert not differ([digests_of({"layers": {"0": 1}}), digests_of({"layers": {"1": 2}})])
    assert differ([digests_of({"lr": 0.1}), digests_of({"lr": 0.2})])
