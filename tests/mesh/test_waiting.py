"""The link's thread brings callers their answers; a stop at any instant of a call loses nothing."""

from __future__ import annotations

import asyncio
import dis
import signal
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.run import Run
from cellmesh.controller.session import link as link_module

PACKAGE = str(Path(cm.__file__).parent)
# A call is stopped at each of its instants, in so many tests.
NUM_PARTS = 4
# Behind these instructions Python calls the handlers of signals, and nowhere else.
HANDLING = "CALL", "RESUME", "JUMP_BACKWARD"


def answer(number: int) -> int:
    return number + 1


def test_the_links_thread_handles_each_answer(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    settle: Any = Run.settle

    def note(*args: Any) -> None:
        threads.append(threading.current_thread().name)
        settle(*args)

    monkeypatch.setattr(Run, "settle", note)
    for number in range(20):
        assert set(mesh.run(answer, number).values()) == {number + 1}
    assert set(threads) == {"cellmesh-link"}


def test_a_callback_that_exits_ends_no_loop(
    mesh: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.run(answer, 0)
    run = mesh.submit_cell("import time; time.sleep(0.1)")  # the loop calls the callback
    run.on_end(lambda: sys.exit("of a callback"))
    assert run.wait(30)
    assert set(mesh.run(answer, 1).values()) == {2}
    assert "SystemExit: of a callback" in capsys.readouterr().err


def test_a_finalizer_may_post_in_the_middle_of_a_post(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may call it at any allocation, as within `Link.post`."""
    link, executed = mesh.rank_set.session._link, list[str]()
    write, ended = link_module.os.eventfd_write, threading.Event()

    def note(what: str) -> Any:
        return lambda core, now: executed.append(what) or (what == "first" and ended.set()) or ()

    def write_as_collected(number: int, value: int) -> None:
        if len(link._commands) == 1:
            link.post(note("finalizer"))
        write(number, value)

    poster = threading.Thread(target=link.post, args=(note("first"),), daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(link_module.os, "eventfd_write", write_as_collected)
        poster.start()
        assert ended.wait(30)
    assert set(mesh.run(answer, 1).values()) == {2}
    assert sorted(executed) == ["finalizer", "first"]
    poster.join()


def test_runs_without_a_waiting_caller_end(mesh: cm.Mesh) -> None:
    assert mesh.submit(answer, 1).wait(30)
    ended = threading.Event()
    mesh.submit(answer, 1).on_end(ended.set)
    assert ended.wait(30)

    async def wait_async() -> Any:
        return await mesh.submit(answer, 2)

    assert set(asyncio.run(wait_async()).values()) == {3}
    assert mesh.states().keys() == set(range(len(mesh)))


def test_several_threads_that_wait_get_their_own_answers(mesh: cm.Mesh) -> None:
    def call(first: int) -> list[set[int]]:
        return [set(mesh.run(answer, first + number).values()) for number in range(30)]

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(call, 1000 * thread) for thread in (1, 2, 3)]
        mine = call(0)
        found = [mine, *(other.result(60) for other in others)]
    assert found == [[{1000 * thread + number + 1} for number in range(30)] for thread in range(4)]


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_stop_at_any_instant_of_a_call_leaves_the_mesh_whole(part: int, quick: cm.Mesh) -> None:
    def count(at: int) -> tuple[Any, list[str]]:
        seen: list[str] = []

        def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes, code, last = True, frame.f_code.co_code, ""

            def trace_within(frame: types.FrameType, event: str, arg: Any) -> Any:
                nonlocal last
                if event == "opcode":
                    before, last = last, dis.opname[code[frame.f_lasti]]
                    if before.startswith(HANDLING):
                        seen.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
                        if len(seen) == at + 1:
                            signal.raise_signal(signal.SIGINT)
                return trace_within

            return trace_within

        return trace, seen

    def call_traced(at: int) -> tuple[str, list[str]]:
        trace, seen = count(at)
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            value = quick.run(answer, at)
        except KeyboardInterrupt as error:  # RanksInterrupted is one
            return type(error).__name__, seen
        finally:
            sys.settrace(before)
        assert set(value.values()) == {at + 1}
        return "value", seen

    quick.run(answer, 0)
    how, seen = call_traced(-1)
    assert how == "value"
    assert {"Link.post", "News.wait"} <= {at.split(":")[0] for at in seen}
    outcomes = set()
    for at in range(part, len(seen), NUM_PARTS):
        how, struck = call_traced(at)
        outcomes.add(how)
        place = struck[at] if at < len(struck) else "its end"
        again = quick.submit(answer, at)
        assert again.wait(30), f"after a stop at {place} ({how}) the mesh answers no more"
        assert set(again.result().values()) == {at + 1}, place
    assert not quick.rank_set.session.runs.living
    assert len(outcomes) > 1, outcomes
