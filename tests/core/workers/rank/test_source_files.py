"""Source files that tracebacks read."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path

import pytest

from cellmesh.workers.rank.compiler import MAX_SOURCE_BYTES, bound_source_files


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "updatecache", linecache.updatecache)
    bound_source_files()


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("x = 1\n")
    assert linecache.getline(str(path), 1) == "x = 1\n"


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_pipe_a_device_and_a_huge_file_are_not_read(
    is_relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), None])
    os.mkfifo(tmp_path / "pipe.py")
    os.symlink("/dev/zero", tmp_path / "device.py")
    with open(tmp_path / "huge.py", "wb") as file:
        file.truncate(MAX_SOURCE_BYTES + 1)
    for name in ("pipe.py", "device.py", "huge.py"):
        assert linecache.getlines(name if is_relative else str(tmp_path / name)) == []


def test_names_that_are_no_files_have_no_lines() -> None:
    assert linecache.getlines("<string>") == linecache.getlines("a\0b") == []
