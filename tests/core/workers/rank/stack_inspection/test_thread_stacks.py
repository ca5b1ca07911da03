"""Reading the frames of threads that run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from cellmesh.workers.rank.stack_inspection.thread_stacks import (
    collector_off,
    local_value,
    stack_of,
    stack_of_main_thread,
    stacks_of_threads,
)

# The collector starts at another allocation in each round; a finalizer then has the main thread
# leave the calls in which it is read, and make others. Where that happens while a frame's object is
# being made, the process ends by a signal.
_LEAVE_WHILE_READ = """
import gc, threading
from cellmesh.workers.rank.stack_inspection.thread_stacks import {reader} as read

class Garbage:
    def __init__(self, leave, has_left):
        self.itself, self.leave, self.has_left = self, leave, has_left
    def __del__(self):
        self.leave.set()
        self.has_left.wait(30)

def call(depth, is_there, leave):
    if depth:
        return call(depth - 1, is_there, leave)
    is_there.set()
    leave.wait(30)

def call_others(depth, *more):
    a = b = c = (depth, more)
    return call_others(depth - 1, a, b) if depth else c

def look(at, is_there, leave, has_left):
    is_there.wait(30)
    gc.collect()
    Garbage(leave, has_left)
    gc.set_threshold(gc.get_count()[0] + at)
    read()
    gc.set_threshold(700)
    gc.collect()

for at in range(1, 60):
    events = [threading.Event() for _ in range(3)]
    reader = threading.Thread(target=look, args=(at, *events))
    reader.start()
    call(40, *events[:2])
    call_others(60)
    events[2].set()
    reader.join()
print("alive")
"""


@pytest.mark.parametrize("reader", ["stack_of_main_thread", "stacks_of_threads"])
def test_a_thread_may_leave_the_frames_that_are_read(reader: str) -> None:
    command = [sys.executable, "-c", _LEAVE_WHILE_READ.format(reader=reader)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


def test_stacks_are_innermost_first() -> None:
    def inner() -> list[str]:
        return [frame.f_code.co_name for frame in stack_of_main_thread()]

    here = threading.main_thread().ident
    assert here is not None
    # The main thread reads itself here: above this function are those that read.
    assert inner()[1:3] == ["inner", "test_stacks_are_innermost_first"]
    assert [frame.f_code.co_name for frame in stacks_of_threads()[here]].count(
        "test_stacks_are_innermost_first"
    ) == 1
    assert stack_of(sys._getframe())[0].f_code.co_name == "test_stacks_are_innermost_first"
    assert stack_of(None) == []


def test_values_of_names_in_a_frame() -> None:
    mine = 3
    frame = sys._getframe()
    assert local_value(frame, "mine") == mine
    assert local_value(frame, "gc") is gc
    assert local_value(frame, "nothing") is None


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_left_as_it_was(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), collector_off():
            _ = 1 / int(gc.isenabled())
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


def test_the_last_reader_turns_the_collector_on_again() -> None:
    inside, go_on = threading.Event(), threading.Event()
    seen: list[bool] = []

    def first() -> None:
        with collector_off():
            inside.set()
            go_on.wait(10)

    def second() -> None:
        with collector_off():
            seen.append(gc.isenabled())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert seen == [False]
    assert gc.isenabled()
