"""Determines what a rank's main thread is doing, from its control thread."""

from __future__ import annotations

import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass

from ...exceptions import traceback_of
from ..shell import RankShell
from .calls import call_of, is_user_code, waits_for_work
from .thread_stacks import stack_of_main_thread

# Files of torch whose outermost frame is what the user called, and names in them that only wrap.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rpc/__init__.py",
    "cellmesh/workers/groups/init_process_group.py",
)
# Files whose frames on a rank's stack mean that it waits for RPC's other workers.
_WAITS_FOR_WORKERS = ("torch/distributed/rpc/api.py", "cellmesh/workers/groups/rpc.py")
# Where functional collectives wait for what has been begun elsewhere.
_WAITERS = frozenset(
    {"__torch_dispatch__", "trigger_wait", "wait", "wait_tensor", "_maybe_wrap_tensor"}
)
_WRAPPERS = frozenset({"wrapper", "_wrapper", "make_watched"})


@dataclass(frozen=True)
class Waited:
    """The collective that the main thread waited in.

    Attributes:
        collective: the ``torch.distributed`` call, "" if it was none.
        group: torch's name of its process group, "" if that is not known.
        waited_s: for how long, in seconds.
    """

    collective: str = ""
    group: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True)
class StopPoint:
    """The interrupt or release of a run.

    Attributes:
        kind: what it is to be seen to end with: KeyboardInterrupt, or `Released`.
        waited: what it waited in then.
    """

    kind: type[KeyboardInterrupt]
    waited: Waited


@dataclass(frozen=True)
class Activity:
    """The cell, line and call that a stack is in.

    Attributes:
        execution_count: the cell that runs (0: unknown).
        line: its line (0: unknown).
        where: the call that the innermost frame of user code is in, as written; "" if that is not
            known.
        collective: the ``torch.distributed`` call it is in, "" if none; ``wait`` for that of a
            `Work`.
        may_wait: whether it is inside of torch, which may wait for what it has begun (a backward
            pass).
    """

    execution_count: int
    line: int
    where: str
    collective: str
    may_wait: bool = False


def look_at_main_thread(shell: RankShell) -> Activity:
    """Read the main thread's stack.

    Args:
        shell: knows which files are cells.

    Returns:
        Where it is. It may have moved on by the time the caller reads this.
    """
    return _read(stack_of_main_thread(), shell)


def describe_interruption(
    tb: types.TracebackType | None, handled: BaseException | None = None
) -> str:
    """Describe where a KeyboardInterrupt was raised: a collective, or the call in the user's
    code.

    Args:
        tb: its traceback.
        handled: what was being handled then: the collective may just have raised, freed by its
            peers' end.
    """
    collective, where = _places(tb)
    if handled is not None and not collective:
        collective, _ = _places(traceback_of(handled))
    return f"interrupted in {collective or where}".replace("<module>", "the cell")


def describe_release(tb: types.TracebackType | None, handled: BaseException | None = None) -> str:
    """Describe the activity of a rank that was released outside of a collective, as
    `describe_interruption` does.
    """
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(tb))
    verb = "waited in" if any(each.endswith(_WAITS_FOR_WORKERS) for each in files) else "ran"
    return describe_interruption(tb, handled).replace("interrupted in", verb)


def _places(tb: types.TracebackType | None) -> tuple[str, str]:
    """The collective in a traceback, and its innermost frame of user code."""
    collective = where = ""
    while tb is not None:
        code = tb.tb_frame.f_code
        if not collective and _is_collective(code) and code.co_name not in _WAITERS:
            collective = code.co_name
        if is_user_code(tb.tb_frame):
            where = call_of(code, tb.tb_lasti) or code.co_name
        tb = tb.tb_next
    return collective, where or "the cell"


def _is_collective(code: types.CodeType) -> bool:
    return code.co_filename.endswith(_COLLECTIVES) and code.co_name not in _WRAPPERS


def _read(stack: Sequence[types.FrameType], shell: RankShell) -> Activity:
    innermost, user, cell = stack[0] if stack else None, None, None
    collective = ""
    for frame in stack:
        code = frame.f_code
        if user is None and is_user_code(frame):
            user = frame
        if _is_collective(code):
            collective = "wait" if code.co_name in _WAITERS else code.co_name
        if shell.cell_of(code.co_filename):
            cell = frame
            break
    if innermost is not None and not collective and waits_for_work(innermost):
        collective = "wait"
    return Activity(
        execution_count=shell.cell_of(cell.f_code.co_filename) if cell is not None else 0,
        line=cell.f_lineno if cell is not None else 0,
        where=call_of(user.f_code, user.f_lasti) if user is not None else "",
        collective=collective,
        may_wait=innermost is not None and "/torch/" in innermost.f_code.co_filename,
    )
