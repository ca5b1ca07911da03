"""The link's thread brings callers their answers; a stop at any instant of a call loses nothing."""

from __future__ import annotations

import dis
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm

PACKAGE = str(Path(cm.__file__).parent)
# A call is stopped at each of its instants, in so many tests.
NUM_PARTS = 4
# Behind these instructions Python calls the handlers of signals, and nowhere else.
HANDLING = "CALL", "RESUME", "JUMP_BACKWARD"


def answer(number: int) -> int:
    return number + 1


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
