"""What a rank's threads do, as their stacks and a control thread see it."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from cellmesh.workers.rank import script
from cellmesh.workers.rank.stack_inspection import (
    Activity,
    Place,
    collector_off,
    describe_interruption,
    look_at_main_thread,
    parse_again,
    place_of,
    stack_of,
    stack_of_main_thread,
    stacks_of_threads,
)


def test_stacks_are_innermost_first() -> None:
    def inner() -> list[str]:
        return [frame.f_code.co_name for frame in stack_of_main_thread()]

    # The main thread reads itself here: above this function are those that read.
    assert inner()[1:3] == ["inner", "test_stacks_are_innermost_first"]
    assert stack_of(sys._getframe())[0].f_code.co_name == "test_stacks_are_innermost_first"
    assert stack_of(None) == []


@pytest.mark.parametrize("read", [stack_of_main_thread, stacks_of_threads])
def test_the_collector_is_off_while_frames_of_other_threads_are_read(
    read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer would let the other thread leave them, which ends the process by a signal."""
    frames = sys._current_frames
    seen: list[bool] = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or frames())
    assert read()
    assert (seen, gc.isenabled()) == ([False], True)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_left_as_it_was(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), collector_off():
            _ = 1 / int(gc.isenabled())
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


WAIT_S = 10.0
C10D = "/env/torch/distributed/distributed_c10d.py"


class Shell:
    """Knows which files are cells, as the rank's shell does."""

    def cell_of(self, filename: str) -> int:
        return (
            int(filename.removeprefix("<cell ").removesuffix(">"))
            if filename.startswith("<cell ")
            else 0
        )


def define(source: str, filename: str, module: str, **names: Any) -> dict[str, Any]:
    namespace = {"__name__": module, **names}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), namespace)
    return namespace


class Spot:
    """A place to stop at: `here` blocks in C, so that its caller's frame is the innermost."""

    def __init__(self) -> None:
        self._arrived, self._leave = threading.Lock(), threading.Lock()
        self._arrived.acquire()
        self._leave.acquire()

    @property
    def names(self) -> dict[str, Any]:
        return {"arrive": self._arrived.release, "leave": self._leave.acquire}

    def look(self, run: Any) -> Activity:
        """Run code that goes through here, and look at it from another thread meanwhile."""
        seen: list[Activity] = []

        def watch() -> None:
            assert self._arrived.acquire(timeout=WAIT_S)
            gave_up_at = time.monotonic() + WAIT_S
            while not seen or (seen[-1].where == "arrive" and time.monotonic() < gave_up_at):
                seen.append(look_at_main_thread(Shell()))  # type: ignore[arg-type]
            self._leave.release()

        thread = threading.Thread(target=watch)
        thread.start()
        run()
        thread.join(WAIT_S)
        return seen[-1]


STOP = "arrive(), leave()"


def run_cell(source: str, number: int, **names: Any) -> Any:
    return lambda: define(source, f"<cell {number}>", "__main__", **names)


def test_innermost_call_and_the_line_of_the_cell_are_named() -> None:
    spot = Spot()
    library = define(f"def compute():\n    {STOP}\n", "/lib/numbers.py", "numbers", **spot.names)
    cell = run_cell("def step():\n    compute()\n\nstep()\n", 3, compute=library["compute"])
    assert spot.look(cell) == Activity(3, 2, "leave", "")


def test_a_line_of_another_cell_is_named_with_its_cell_and_the_line_that_called_it() -> None:
    spot = Spot()
    step = define(f"\n\ndef step():\n    {STOP}\n", "<cell 8>", "__main__", **spot.names)["step"]
    activity = spot.look(run_cell("\nstep()\n", 9, step=step))
    assert activity == Activity(9, 2, "leave", "", inner="In[8] line 4")
    called = spot.look(step)  # by `mesh.run`: no cell runs
    assert called == Activity(0, 0, "leave", "", inner="In[8] line 4")


def collectives(spot: Spot) -> dict[str, Any]:
    """As in torch: what the user calls, called through a wrapper, does its work in further
    functions.
    """
    source = (
        f"def _wait(work):\n    {STOP}\n"
        "def all_reduce(tensor):\n    _wait(tensor)\n"
        "def wrapper(*args):\n    return all_reduce(*args)\n"
    )
    return define(source, C10D, "torch.distributed.distributed_c10d", **spot.names)


def test_collective_called_by_the_user_is_named() -> None:
    spot = Spot()
    cell = run_cell("\nall_reduce(1)\n", 4, all_reduce=collectives(spot)["wrapper"])
    assert spot.look(cell) == Activity(4, 2, "leave", "all_reduce", may_wait=True)


CELL, F, G = ("<module>", "<cell 9>", 5), ("f", "<cell 9>", 2), ("g", "<cell 8>", 10)
LIBRARY, SCRIPT = ("f", "/lib/a.py", 7), ("<module>", "/home/me/train.py", 30)
STEP, IMPORT = ("step", "/home/me/train.py", 12), ("<module>", "/home/me/models.py", 3)
RUNNER = ("run_script", script.__file__, 1)
STDLIB = ("<module>", f"{os.path.dirname(os.__file__)}/a.py", 7)


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([], Place()),
        ([LIBRARY], Place()),
        ([CELL, LIBRARY], Place(9, 5)),
        ([CELL, F], Place(9, 2)),
        ([CELL, F, G], Place(9, 2, "In[8] line 10")),
        ([CELL, G, F], Place(9, 2)),
        ([G, ("h", "<cell 7>", 1)], Place(0, 0, "In[7] line 1")),
        # by %run; an import in it that fails is of its line
        ([CELL, LIBRARY, SCRIPT, STEP, IMPORT], Place(9, 5, "train.py line 12")),
        ([CELL, STDLIB], Place(9, 5)),
        ([CELL, SCRIPT, G], Place(9, 5, "In[8] line 10")),  # a cell's function, of the file
        # by `cellmesh run`: the innermost line of the user
        ([RUNNER, SCRIPT, LIBRARY, STEP, STDLIB], Place(inner="train.py:12")),
        ([RUNNER, STDLIB, SCRIPT, RUNNER], Place(inner="train.py:30")),
        ([SCRIPT, RUNNER, STDLIB], Place()),
    ],
)
def test_place_in_cells(frames: list[tuple[str, str, int]], place: Place) -> None:
    code = define("def f(): ...\n", "/lib/f.py", "f")["f"].__code__
    named = [(code.replace(co_name=name, co_filename=file), line) for name, file, line in frames]
    assert place_of(named, Shell()) == place  # type: ignore[arg-type]


# ---- interruptions


def interrupted(run: Any) -> types.TracebackType | None:
    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    # The test's own frames are not part of what a rank runs.
    tb = caught.value.__traceback__
    while tb is not None and not tb.tb_frame.f_code.co_filename.startswith(("<cell", "/lib")):
        tb = tb.tb_next
    return tb


RAISES = "raise KeyboardInterrupt"


def test_an_interruption_in_a_collective_names_the_collective() -> None:
    source = (
        f"def _wait():\n    {RAISES}\ndef barrier():\n    _wait()\ndef wrapper():\n    barrier()\n"
    )
    wrapper = define(source, C10D, "torch.distributed.distributed_c10d")["wrapper"]
    tb = interrupted(run_cell("wait()", 1, wait=wrapper))
    assert describe_interruption(tb) == "interrupted in barrier"


def test_an_interruption_beside_a_collective_that_was_just_freed_names_it() -> None:
    source = "def barrier():\n    raise RuntimeError\n"
    with pytest.raises(RuntimeError) as freed:
        define(source, C10D, "torch.distributed")["barrier"]()
    tb = interrupted(run_cell(RAISES, 1))
    assert describe_interruption(tb, freed.value) == "interrupted in barrier"
    for other in (None, ValueError("no collective")):
        assert describe_interruption(tb, other) == "interrupted in the cell"


# ---- calls


LIBRARY_OF_GATES = """
class Gate:
    def __init__(self, *args): pass
    def stop(self, *args): return (arrive(), leave())
    pass_through = __enter__ = __add__ = stop
    def __exit__(self, *exc): pass
class Leaves:
    def __enter__(self): pass
    __exit__ = Gate.stop
class Loader:
    def __iter__(self): return self
    def __next__(self):
        arrive(), leave()
        raise StopIteration
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"time.wait({STOP})", "leave"),
        ("loader = Loader()\nfor x in loader:\n    pass", "loader"),
        ("with Gate() as gate:\n    pass", "Gate"),
        ("with Leaves() as gate:\n    1 / 0", "Leaves"),
        ("x = Gate() + 1", ""),
    ],
)
def test_call_is_shown_as_written(source: str, words: str) -> None:
    spot = Spot()
    library = define(LIBRARY_OF_GATES, "/lib/gate.py", "cellmesh.gate", **spot.names)
    time = types.SimpleNamespace(wait=lambda *args: None)
    names = library | {"time": time, "__name__": "__main__"}
    assert spot.look(run_cell(source, 5, **names)).where == words


class NoWork:
    """Something else with a ``wait()``."""


@pytest.mark.parametrize(("kind", "collective"), [(dist.Work, "wait"), (NoWork, "")])
def test_waiting_for_a_work_is_a_collective_and_no_other_wait(kind: type, collective: str) -> None:
    class Kind(kind):  # type: ignore[misc]
        pass

    spot, work = Spot(), Kind()
    work.wait = spot.names["leave"]
    cell = run_cell("arrive(), works[0].wait()", 6, arrive=spot.names["arrive"], works=[work])
    assert spot.look(cell) == Activity(6, 1, "works[0].wait", collective)


def test_parse_that_other_threads_disturb_is_done_again_but_not_for_ever() -> None:
    disturbed = SystemError("AST constructor recursion depth mismatch (before=78, after=29)")
    errors: list[Exception] = [disturbed] * 2

    def parse() -> str:
        if errors:
            raise errors.pop()
        return "tree"

    assert parse_again(parse) == "tree"
    errors += [disturbed] * 100
    with pytest.raises(SystemError, match="mismatch"):
        parse_again(parse)
    errors[:] = [SyntaxError("other")]
    with pytest.raises(SyntaxError, match="other"):
        parse_again(parse)
