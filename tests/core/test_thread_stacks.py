"""Reading the frames of threads that run."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from cellmesh.workers.thread_stacks import (
    collector_off,
    local_value,
    stack_of,
    stack_of_main_thread,
    stacks_of_threads,
)


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
