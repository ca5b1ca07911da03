"""Finds out, from the stacks of a rank's threads, which code they are executing, without running
user code.

Stacks of other threads are read with the garbage collector off. Python makes a frame's object when
code asks for it. This allocates, and in CPython 3.11 an allocation may start the collector, whose
finalizers may let other threads run. If one of these threads leaves that frame then, the new object
refers to memory that is reused, and the process ends by SIGSEGV. (CPython 3.12 collects only
between instructions.)
"""

from __future__ import annotations

import ast
import contextlib
import dis
import gc
import inspect
import linecache
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch.distributed import Work

from ...stdlib import threading
from ..static_lookup import module_of, traceback_of

_MACHINERY = ("IPython.core.", "cellmesh.")
# Modules with frames below those of a call: also of the event loop in which tasks execute.
_OUTERMOST = (*_MACHINERY, "asyncio.", "selectors")
OWN_FOLDER = str(Path(__file__).parents[2]) + "/"
_RUNS_SCRIPTS = str(Path(__file__).with_name("script.py"))

# The collector's state is per process: only the last user of `collector_off` may enable it again.
_LOCK = threading.Lock()


class Cells(Protocol):
    """Protocol of an object that identifies cells by code file names; the rank's shell."""

    def cell_of(self, filename: str) -> int:
        """Return n of the cell ``In[n]`` with this code file name; 0 if none has it."""


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Enter a context without garbage collection; for a moment only, as other threads'
    ``gc.enable`` and ``gc.disable`` may be undone.

    For less than the interpreter's switch interval after a thread has got the interpreter's lock,
    no other thread can make such changes.
    """
    with _LOCK:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def stack_of(frame: types.FrameType | None) -> list[types.FrameType]:
    """Return a frame and its callers, innermost first; for another thread's frame, call this in
    `collector_off`.
    """
    stack: list[types.FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def stacks_of_threads() -> dict[int, list[types.FrameType]]:
    """Return the frames of each running thread, innermost first, by the thread's identity."""
    with collector_off():
        return {identity: stack_of(frame) for identity, frame in sys._current_frames().items()}


def stack_of_main_thread() -> list[types.FrameType]:
    """Return the main thread's frames, innermost first."""
    with collector_off():
        return stack_of(sys._current_frames().get(threading.main_thread().ident or 0))


def local_value(frame: types.FrameType, name: str) -> object:
    """Return the value of a variable in a frame of a running thread; None if it is unbound."""
    with collector_off():
        return frame.f_locals.get(name, frame.f_globals.get(name))


def is_machinery(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to IPython's or cellmesh's code that runs user code."""
    return module_of(frame).startswith(_MACHINERY)


def user_part(frames: Sequence[types.FrameType], shell: Any) -> slice:
    """Return the part of a stack, outermost first, that begins at the first frame of user code."""
    cells = (index for index, frame in enumerate(frames) if shell.cell_of(frame.f_code.co_filename))
    start = next(cells, None)
    if start is None:  # a call: skip the outermost frames, which are Python's and cellmesh's
        start = 0
        while start < len(frames) and not is_machinery(frames[start]):
            start += 1
        while start < len(frames) and module_of(frames[start]).startswith(_OUTERMOST):
            start += 1
        if start == len(frames) and not any(map(is_machinery, frames)):
            start = 0  # a thread of user code
    end = len(frames)
    while end > start and is_machinery(frames[end - 1]):
        end -= 1
    return slice(start, end)


_MAX_TEXT = 60
# Instructions that call methods implicitly, without a call in the source.
_IMPLIED_CALLS = ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "WITH_EXCEPT_START", "FOR_ITER", "CALL")
_LIBRARIES = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
)


def is_user_code(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to a cell or a user's module, not to a library or cellmesh."""
    return not is_of_library(frame.f_code.co_filename) and not is_own_code(frame)


def is_of_library(filename: str) -> bool:
    """Return whether a code file belongs to Python or an installed package."""
    return filename.startswith(("<frozen", *_LIBRARIES))


def is_own_code(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to cellmesh."""
    return module_of(frame).startswith("cellmesh.")


def call_of(code: types.CodeType, instruction: int) -> str:
    """Return the source text of the function that an instruction calls, such as ``time.sleep``; for
    a ``with`` or ``for``, that of its expression; "" for other instructions.
    """
    node = _node_at(code, instruction)
    # Python versions differ in whether the position is the statement's or its expression's.
    if isinstance(node, ast.With | ast.AsyncWith):
        node = node.items[0].context_expr
    elif isinstance(node, ast.For | ast.AsyncFor):
        node = node.iter
    elif not isinstance(node, ast.Call | ast.Await) and (
        node is None or dis.opname[code.co_code[instruction]] not in _IMPLIED_CALLS
    ):
        return ""
    if not isinstance(node, ast.expr):  # a class, whose metaclass runs
        return ""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def waits_for_work(frame: types.FrameType) -> bool:
    """Return whether a frame executes the ``wait()`` of a torch.distributed Work."""
    node = _node_at(frame.f_code, frame.f_lasti)
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr != "wait":
        return False
    return isinstance(_value_of(function.value, frame), Work)


_T = TypeVar("_T")
# A parse takes far less than a thread's switch interval, so two in a row are rarely disturbed.
_NUM_TRIES = 5


def parse_again(parse: Callable[[], _T]) -> _T:
    """Call a function that builds an AST; repeat it if a parse on another thread made it fail.

    CPython 3.11 keeps the recursion depth of an AST in one place for all threads (Python-ast.c,
    ``ast_state.recursion_depth``). So while the control thread looks up the main thread's current
    call, the main thread's next cell may fail with a SystemError.

    Raises:
        SystemError: every attempt was disturbed.
    """
    for _ in range(_NUM_TRIES - 1):
        try:
            return parse()
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return parse()


def _node_at(code: types.CodeType, instruction: int) -> ast.expr | ast.stmt | None:
    if instruction < 0:
        return None
    positions = list(code.co_positions())
    line, end_line, column, end_column = positions[instruction // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : end_line]]
    if len(lines) != end_line - line + 1:
        return None
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    text = b"".join(lines)
    try:
        return parse_again(lambda: ast.parse(b"(" + text + b")", mode="eval")).body
    except (SyntaxError, ValueError, RecursionError):
        pass
    try:
        body = parse_again(lambda: ast.parse(text)).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    return body[0] if len(body) == 1 else None


def _value_of(node: ast.expr, frame: types.FrameType) -> Any:
    """Return the value of a name, attribute or list item in a frame; None if reading it would run
    user code.
    """
    match node:
        case ast.Name(name):
            return local_value(frame, name)
        case ast.Attribute(value, name):
            return inspect.getattr_static(_value_of(value, frame), name, None)
        case ast.Subscript(value, ast.Constant(index)):
            items = _value_of(value, frame)
            if (
                type(items) in (list, tuple)
                and type(index) is int
                and -len(items) <= index < len(items)
            ):
                return items[index]
            return items.get(index) if type(items) is dict else None
    return None


# Files of torch whose outermost frame is the function that the user called; names of mere wrappers.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rpc/__init__.py",
    "cellmesh/workers/groups/default_group.py",
)
# Files with a frame on the stack of a rank that waits for RPC's other workers.
_WAITS_FOR_WORKERS = ("torch/distributed/rpc/api.py", "cellmesh/workers/groups/rpc.py")
# Functions in which functional collectives wait for an operation begun elsewhere.
_WAITERS = frozenset(
    {"__torch_dispatch__", "trigger_wait", "wait", "wait_tensor", "_maybe_wrap_tensor"}
)
_WRAPPERS = frozenset({"wrapper", "_wrapper", "make_watched"})


@dataclass(frozen=True)
class Waited:
    """The collective or other operation that a rank's main thread waited in; "" if unknown."""

    collective: str = ""  # the ``torch.distributed`` call
    group: str = ""  # torch's name of its process group
    waited_s: float = 0.0
    making: tuple[int, ...] = ()  # members of the group, if the rank is making it


@dataclass(frozen=True)
class StopPoint:
    """How a run was stopped: the class of the exception that ends it, and the operation in which
    its rank waited.
    """

    kind: type[KeyboardInterrupt]
    waited: Waited


@dataclass(frozen=True)
class Activity:
    """The code that a rank's main thread is executing; 0 or "" for unknown facts."""

    execution_count: int  # ``In[n]`` of the cell that runs
    line: int  # line of that cell
    where: str  # source text of the call in the innermost frame of user code
    collective: str  # the ``torch.distributed`` call; ``wait`` for that of a `Work`
    may_wait: bool = False  # whether it is in code of torch that may wait (a backward pass)
    inner: str = ""  # line of another cell, as in `Place`


@dataclass(frozen=True)
class Place:
    """A position in the notebook's cells; 0 or "" for unknown facts."""

    execution_count: int = 0  # ``In[n]`` of the cell that runs, 0 in a call
    line: int = 0  # innermost line of that cell
    # "In[8] line 10" for a function of another cell that this line called; "train.py line 4" for a
    # file that it ran; "train.py:4" in a script.
    inner: str = ""


def place_of(frames: Iterable[tuple[types.CodeType, int]], shell: Cells) -> Place:
    """Return the position in the notebook's cells to which the frames of a stack belong.

    Args:
        frames: code and line of each frame, outermost first.
        shell: identifies cells by code file names.
    """
    cells: list[tuple[types.CodeType, int, int]] = []
    script: tuple[str, int] = "", 0  # position in a file that a cell runs or imports
    is_script, place = False, ""
    for code, line in frames:
        name = code.co_filename
        is_script |= name == _RUNS_SCRIPTS
        if is_script and name.startswith("/") and not name.startswith((*_LIBRARIES, OWN_FOLDER)):
            place = f"{Path(name).name}:{line}"
        if (count := shell.cell_of(code.co_filename)) > 0:
            cells.append((code, count, line))
            script = "", 0
        elif cells and (code.co_filename == script[0] or (_runs_file(code) and not script[0])):
            script = code.co_filename, line
    if not cells:
        return Place(inner=place)
    first, count, _ = cells[0]
    code, inner_count, inner_line = cells[-1]
    # The outermost frame of a running cell is the cell's own; that of a call is a function's.
    own = first.co_filename if first.co_name == "<module>" else None
    lines = [line for each, _, line in cells if each.co_filename == own]
    inner = "" if code.co_filename == own else f"In[{inner_count}] line {inner_line}"
    if script[0]:
        inner = f"{Path(script[0]).name} line {script[1]}"
    return Place(count if lines else 0, lines[-1] if lines else 0, inner)


def lines_of(tb: types.TracebackType | None) -> Iterator[tuple[types.CodeType, int]]:
    """Yield code and line of each frame of a traceback, outermost first."""
    while tb is not None:
        code = tb.tb_frame.f_code
        yield code, tb.tb_lineno or line_before(code, tb.tb_lasti)
        tb = tb.tb_next


def line_before(code: types.CodeType, offset: int) -> int:
    """Return the line of an instruction; if it has no line, that of the nearest earlier instruction
    that has one; 0 if none has.

    An interrupt may hit an instruction without a line, added by Python's compiler (for the end of a
    ``with``).
    """
    found = 0
    for begin, _, line in code.co_lines():
        if begin > offset:
            break
        found = line or found
    return found


def _runs_file(code: types.CodeType) -> bool:
    """Return whether a code object is the top-level code of a file of the user."""
    name = code.co_filename
    return code.co_name == "<module>" and name.startswith("/") and not is_of_library(name)


def look_at_main_thread(shell: Cells) -> Activity:
    """Return the code that the main thread is executing; the thread may have moved on before the
    caller uses it.
    """
    return _read(stack_of_main_thread(), shell)


def describe_interruption(
    tb: types.TracebackType | None, handled: BaseException | None = None
) -> str:
    """Return text on the collective or the call in user code in which a KeyboardInterrupt was
    raised.

    Args:
        tb: traceback of the interrupt.
        handled: exception that was being handled: the collective may just have raised it, as its
            peers have ended.
    """
    collective, where = _places(tb)
    if handled is not None and not collective:
        collective, _ = _places(traceback_of(handled))
    return f"interrupted in {collective or where}".replace("<module>", "the cell")


def describe_release(tb: types.TracebackType | None, handled: BaseException | None = None) -> str:
    """Return text on what a rank was executing when it was released while not in a collective: a
    wait for RPC workers, or other user code.
    """
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(tb))
    verb = "waited in" if any(each.endswith(_WAITS_FOR_WORKERS) for each in files) else "ran"
    return describe_interruption(tb, handled).replace("interrupted in", verb)


def _places(tb: types.TracebackType | None) -> tuple[str, str]:
    """Return the name of the collective in a traceback ("" without one), and the call in its
    innermost frame of user code.
    """
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


def _read(stack: Sequence[types.FrameType], shell: Cells) -> Activity:
    innermost, user = stack[0] if stack else None, None
    collective = ""
    for frame in stack:
        code = frame.f_code
        if user is None and is_user_code(frame):
            user = frame
        if _is_collective(code):
            collective = "wait" if code.co_name in _WAITERS else code.co_name
        if shell.cell_of(code.co_filename):
            break
    if innermost is not None and not collective and waits_for_work(innermost):
        collective = "wait"
    lines = (
        (each.f_code, each.f_lineno or line_before(each.f_code, each.f_lasti))
        for each in reversed(stack)
    )
    place = place_of(lines, shell)
    return Activity(
        execution_count=place.execution_count,
        line=place.line,
        where=call_of(user.f_code, user.f_lasti) if user is not None else "",
        collective=collective,
        may_wait=innermost is not None and "/torch/" in innermost.f_code.co_filename,
        inner=place.inner,
    )


_OWN_THREADS = "cellmesh-"


def format_stacks(shell: Cells, all_threads: bool = False) -> str:
    """Return text with the stack of the main thread; if `all_threads`, also those of all threads
    that cellmesh has not started.
    """
    stacks = stacks_of_threads()
    main = threading.main_thread()
    parts = [format_stack(stacks.get(main.ident or 0, ()), shell)]
    for thread in threading.enumerate() if all_threads else ():
        is_own = thread is main or thread.name.startswith(_OWN_THREADS)
        if not is_own and thread.ident in stacks:
            parts.append(f"thread {thread.name}:\n{format_stack(stacks[thread.ident], shell)}")
    return "\n".join(parts)


def shorten_path(name: str) -> str:
    """Return the path of a library's file relative to its import directory, such as
    ``torch/nn/modules/module.py``.
    """
    places = {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")}
    for place in sorted(places, key=len, reverse=True):
        if name.startswith(f"{place}/"):
            return name[len(place) + 1 :]
    return name


def format_stack(stack: Sequence[types.FrameType], shell: Cells) -> str:
    """Return text with the part of a stack, innermost first, that is the user's."""
    outermost_first = stack[::-1]
    frames = outermost_first[user_part(outermost_first, shell)]
    if not frames:
        return "  idle\n"
    lines = []
    for each in frames:
        name = each.f_code.co_filename
        summary = traceback.FrameSummary(name, each.f_lineno, each.f_code.co_name)
        count = shell.cell_of(name)
        where = f"In[{count}]" if count else f'"{shorten_path(name)}"'
        lines.append(f"  {where}, line {each.f_lineno}, in {each.f_code.co_name}\n")
        if summary.line:
            lines.append(f"    {summary.line}\n")
    return "".join(lines)
