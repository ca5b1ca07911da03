"""Limits of control groups, and of descriptors."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellmesh.wire.limits import free_in_group
from cellmesh.wire.process import limit_child, make_room, wait_readable


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "self": "0::/job/step\n",
            "fs/job/step/memory.max": "max\n",
            "fs/job/memory.max": "4000\n",
            "fs/job/memory.current": "3000\n",
            "fs/job/memory.stat": "anon 2000\ninactive_file 500\n",
        },
    )
    assert free_in_group(tmp_path / "fs", tmp_path / "self") == 1500


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            # The path is that of the host: in the container only the top is to be seen.
            "self": "4:memory:/docker/f00\n3:cpu,cpuacct:/docker/f00\n0::/\n",
            "fs/memory/memory.limit_in_bytes": "8000",
            "fs/memory/memory.usage_in_bytes": "7000",
            "fs/memory/memory.stat": "cache 1\ntotal_inactive_file 100\n",
        },
    )
    assert free_in_group(tmp_path / "fs", tmp_path / "self") == 1100
    (tmp_path / "fs/memory/memory.limit_in_bytes").write_text(f"{1 << 63}")
    assert free_in_group(tmp_path / "fs", tmp_path / "self") is None


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_descriptor_of_any_number_is_waited_for() -> None:
    read_end, write_end = os.pipe()
    number = os.dup2(read_end, 1100)  # which select(2) does not take
    assert wait_readable([number], 0) == []
    os.close(write_end)
    assert wait_readable([number], 10) == [number]
    os.close(number)
    os.close(read_end)


def test_room_is_made_as_far_as_it_is_needed_and_allowed(limits: tuple[int, int]) -> None:
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert make_room(1000) == 256
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 1000 < soft < 2000
    assert make_room(10) == soft, "there was enough"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
    make_room(2 * hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_room_is_made_where_no_file_can_be_opened(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    assert make_room(1000) == 3
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1003


def test_a_child_has_the_limit_from_before(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    soft = make_room(500)
    code = "import resource; input(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        limit_child(process.pid, soft)
        assert process.communicate(b"\n")[0].split() == [b"300"]
    limit_child(process.pid, soft)  # has ended: nothing happens
