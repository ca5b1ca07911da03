"""What the link's thread waits on, and which callers may wait for it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator

import pytest

from cellmesh.controller.session.loop import Loop
from cellmesh.errors import MeshUsageError


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_a_wait_ends_by_a_call_from_another_thread(loop: Loop) -> None:
    loop.begin(())
    thread = threading.Thread(target=loop.rouse)
    thread.start()
    assert loop.wait(math.inf) == []
    thread.join()


def test_a_call_before_the_wait_ends_it_once(loop: Loop) -> None:
    loop.begin(())
    loop.rouse()
    loop.rouse()
    assert loop.wait(math.inf) == []
    began = time.monotonic()
    assert loop.wait(began + 0.01) == []
    assert time.monotonic() >= began + 0.01


def test_a_wait_returns_ready_descriptors_until_they_are_forgotten(loop: Loop) -> None:
    reader, writer = os.pipe()
    try:
        loop.begin((reader,))
        os.write(writer, b"x")
        assert loop.wait(math.inf) == [reader]
        loop.forget(reader)
        assert loop.wait(time.monotonic()) == []
    finally:
        os.close(reader)
        os.close(writer)


def test_only_the_loops_thread_may_not_wait_for_it_and_only_until_it_ends() -> None:
    loop = Loop()
    loop.check_may_wait()
    loop.begin(())
    with pytest.raises(MeshUsageError, match="a callback"):
        loop.check_may_wait()
    other = threading.Thread(target=loop.check_may_wait)  # an exception there fails the test
    other.start()
    other.join()
    loop.close()
    loop.rouse()
    loop.check_may_wait()  # as a later thread to which the system gives the same number


def test_a_forked_process_is_refused(loop: Loop) -> None:
    child = os.fork()
    if not child:
        status = 1
        try:
            loop.check_may_wait()
        except MeshUsageError as error:
            status = 0 if f"({loop.pid})" in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
