from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cellmesh.wire.process import limit_child, make_room, wait_readable


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def large_number() -> Iterator[tuple[int, int]]:
    """A pipe whose read end has a number that select(2) does not take."""
    read_end, write_end = os.pipe()
    os.dup2(read_end, 1100)
    os.close(read_end)
    yield 1100, write_end
    os.close(1100)
    os.close(write_end)


def test_a_descriptor_of_any_number_is_waited_for(large_number: tuple[int, int]) -> None:
    number, write_end = large_number
    assert wait_readable([number], 0) == []
    os.write(write_end, b"x")
    assert wait_readable([number]) == [number]


def test_a_pipe_that_hangs_up_is_readable() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    assert wait_readable([read_end], 10) == [read_end]
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
