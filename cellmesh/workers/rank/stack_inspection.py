"""Reads from their stacks what a rank's threads do, without running user code.

Stacks of other threads are read with the garbage collector off. Python makes a frame's object when
code asks for it. That allocates, and in CPython 3.11 an allocation may start the collector, whose
finalizers may let other threads run; if one of them leaves that very frame then, the new object is
tied to memory that is used for something else, and the process ends by SIGSEGV (3.12 collects
between instructions only).
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

# The collector is the process's: who turns it on again must be the last who wants it off.
_LOCK = threading.Lock()


class Cells(Protocol):
    """Protocol of the rank's shell, which knows its cells."""

    def cell_of(self, filename: str) -> int:
        """Return the execution count of the cell that has this filename; 0 if none has."""


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Enter a context without garbage collection, for moments only: other threads' changes to the
    collector's state may be lost.

    In less than the interpreter's switch interval after a thread has got the interpreter's lock
    there are no others that could say something.
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
    """Return a frame and its callers, innermost first; of this thread, or in `collector_off`."""
    stack: list[types.FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def stacks_of_threads() -> dict[int, list[types.FrameType]]:
    """Return each thread's frames, innermost first, by the thread's identity; threads go on."""
    with collector_off():
        return {identity: stack_of(frame) for identity, frame in sys._current_frames().items()}


def stack_of_main_thread() -> list[types.FrameType]:
    """Return the main thread's frames, innermost first."""
    with collector_off():
        return stack_of(sys._current_frames().get(threading.main_thread().ident or 0))


def local_value(frame: types.FrameType, name: str) -> object:
    """Return a local variable's value in a frame of a running thread; None if there is none."""
    with collector_off():
        return frame.f_locals.get(name, frame.f_globals.get(name))


def is_machinery(frame: types.FrameType) -> bool:
    """Return whether a frame is of IPython's or cellmesh's code that runs user code."""
    return module_of(frame).startswith(_MACHINERY)


def user_part(frames: Sequence[types.FrameType], shell: Any) -> slice:
    """Return the frames of a stack from the first frame of user code on, outermost first."""
    cells = (index for index, frame in enumerate(frames) if shell.cell_of(frame.f_code.co_filename))
    start = next(cells, None)
    if start is None:  # a call: the frames below the outermost ones, which are Python's and ours
        start = 0
        while start < len(frames) and not is_machinery(frames[start]):
            start += 1
        while start < len(frames) and is_machinery(frames[start]):
            start += 1
        if start == len(frames) and not any(map(is_machinery, frames)):
            start = 0  # a thread
    end = len(frames)
    while end > start and is_machinery(frames[end - 1]):
        end -= 1
    return slice(start, end)


_MAX_TEXT = 60
# Instructions that call a method of an expression's value without a call in the source.
_IMPLIED_CALLS = ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "WITH_EXCEPT_START", "FOR_ITER", "CALL")
_LIBRARIES = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
)

_OWN_DIRECTORY = f"{Path(__file__).parents[2]}/"


def is_user_code(frame: types.FrameType) -> bool:
    """Return whether a frame is of a cell or a user's module, and no library's or cellmesh's."""
    return not is_of_library(frame.f_code.co_filename) and not is_own_code(frame)


def is_of_library(filename: str) -> bool:
    """Return whether a code file is Python's or an installed package's."""
    return filename.startswith(("<frozen", *_LIBRARIES))


def is_own_code(frame: types.FrameType) -> bool:
    """Return whether a frame is of cellmesh."""
    return module_of(frame).startswith("cellmesh.")


def call_of(code: types.CodeType, instruction: int) -> str:
    """Return the source text of the function, as ``time.sleep``, or of the expression in a ``with``
    or ``for`` that an instruction calls; else "".
    """
    node = _node_at(code, instruction)
    # Versions of Python differ in whether the statement or its expression is the instruction's.
    if isinstance(node, ast.With | ast.AsyncWith):
        node = node.items[0].context_expr
    elif isinstance(node, ast.For | ast.AsyncFor):
        node = node.iter
    elif not isinstance(node, ast.Call | ast.Await) and (
        node is None or dis.opname[code.co_code[instruction]] not in _IMPLIED_CALLS
    ):
        return ""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def waits_for_work(frame: types.FrameType) -> bool:
    """Return whether a frame is in the ``wait()`` of a torch.distributed Work."""
    node = _node_at(frame.f_code, frame.f_lasti)
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr != "wait":
        return False
    return isinstance(_value_of(function.value, frame), Work)


_T = TypeVar("_T")
# A parse takes far less than a thread's turn, so that two in a row are hardly disturbed.
_NUM_TRIES = 5


def parse_again(parse: Callable[[], _T]) -> _T:
    """Call a function that makes an AST, again if a parse of another thread has disturbed it.

    CPython 3.11 counts how deep it is in an AST in one place for all threads (Python-ast.c,
    ``ast_state.recursion_depth``). Seen on ranks: the control thread looked for the call that the
    main thread was in, and the main thread's next cell ended with a SystemError.

    Raises:
        SystemError: it was disturbed each time.
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
    """Return the value of a name, attribute or list item, if looking it up runs no user code."""
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


# Files of torch whose outermost frame is what the user called, and names in them that only wrap.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rpc/__init__.py",
    "cellmesh/workers/groups/default_group.py",
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
    """What a rank's main thread waited in, "" for what is not known."""

    collective: str = ""  # the ``torch.distributed`` call
    group: str = ""  # torch's name of its process group
    waited_s: float = 0.0
    making: tuple[int, ...] = ()  # the group's members, where the rank is making it


@dataclass(frozen=True)
class StopPoint:
    """How a run was interrupted or released: what it is to end with, and what it waited in."""

    kind: type[KeyboardInterrupt]
    waited: Waited


@dataclass(frozen=True)
class Activity:
    """Where a rank's main thread is in its code; 0 or "" for what is not known."""

    execution_count: int  # the ``In[n]`` of the cell that it runs
    line: int  # of that cell
    where: str  # the call that the innermost frame of user code is in, as written
    collective: str  # the ``torch.distributed`` call it is in; ``wait`` for that of a `Work`
    may_wait: bool = False  # inside of torch, which may wait (a backward pass)
    inner: str = ""  # the line of another cell, as `Place`


@dataclass(frozen=True)
class Place:
    """Where code is in the notebook's cells; 0 or "" for what is not known."""

    execution_count: int = 0  # the ``In[n]`` of the cell that runs, 0 in a call
    line: int = 0  # its innermost line
    # "In[8] line 10" of another cell, whose function that line called; "train.py line 4" of a file
    # that it ran.
    inner: str = ""


def place_of(frames: Iterable[tuple[types.CodeType, int]], shell: Cells) -> Place:
    """Return the place of code in cells.

    Args:
        frames: code and line of each frame, outermost first.
        shell: has the cells.
    """
    cells: list[tuple[types.CodeType, int, int]] = []
    script: tuple[str, int] = "", 0  # where a file is that a cell runs or imports
    for code, line in frames:
        if (count := shell.cell_of(code.co_filename)) > 0:
            cells.append((code, count, line))
            script = "", 0
        elif cells and (code.co_filename == script[0] or (_runs_file(code) and not script[0])):
            script = code.co_filename, line
    if not cells:
        return Place()
    first, count, _ = cells[0]
    code, inner_count, inner_line = cells[-1]
    # The outermost frame of a cell that runs is its own; that of a call is a function's.
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
    """Return the line of the last instruction up to `offset` that has one, 0 if none has.

    An interrupt may strike an instruction that Python's compiler has added (of the end of a
    ``with``), which has no line.
    """
    found = 0
    for begin, _, line in code.co_lines():
        if begin > offset:
            break
        found = line or found
    return found


def _runs_file(code: types.CodeType) -> bool:
    """Return whether this is the code of a whole file of the user's."""
    name = code.co_filename
    return code.co_name == "<module>" and name.startswith("/") and not is_of_library(name)


def describe_call(frames: Sequence[tuple[types.CodeType, int]], shell: Cells) -> str:
    """Return in words which line of the user's made a call; "" if that is not known.

    Args:
        frames: code and line of each frame, outermost first.
        shell: has the cells.
    """
    place = place_of(frames, shell)
    if place.line:
        where = f"In[{place.execution_count}] line {place.line}"
        return f"{place.inner}, called at {where}" if place.inner else where
    if place.inner:
        return place.inner
    ours = ("<", *_LIBRARIES, _OWN_DIRECTORY)
    users = [(code, line) for code, line in frames if not code.co_filename.startswith(ours)]
    return f"{shorten_path(users[-1][0].co_filename)} line {users[-1][1]}" if users else ""


def look_at_main_thread(shell: Cells) -> Activity:
    """Return where the main thread is, by its stack; it may have moved on since."""
    return _read(stack_of_main_thread(), shell)


def describe_interruption(
    tb: types.TracebackType | None, handled: BaseException | None = None
) -> str:
    """Describe where a KeyboardInterrupt was raised: a collective, or the call in the user's code.

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
    """Describe what a rank did when it was released outside of a collective."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(tb))
    verb = "waited in" if any(each.endswith(_WAITS_FOR_WORKERS) for each in files) else "ran"
    return describe_interruption(tb, handled).replace("interrupted in", verb)


def _places(tb: types.TracebackType | None) -> tuple[str, str]:
    """Return the collective that a traceback passes through, and the innermost frame of user
    code.
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
    """Return as text the stack of the main thread, or of all threads that user code has started."""
    stacks = stacks_of_threads()
    main = threading.main_thread()
    parts = [_format_stack(stacks.get(main.ident or 0, ()), shell)]
    for thread in threading.enumerate() if all_threads else ():
        is_own = thread is main or thread.name.startswith(_OWN_THREADS)
        if not is_own and thread.ident in stacks:
            parts.append(f"thread {thread.name}:\n{_format_stack(stacks[thread.ident], shell)}")
    return "\n".join(parts)


def shorten_path(name: str) -> str:
    """Return a library's file relative to the import path, as ``torch/nn/modules/module.py``."""
    places = {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")}
    for place in sorted(places, key=len, reverse=True):
        if name.startswith(f"{place}/"):
            return name[len(place) + 1 :]
    return name


def _format_stack(stack: Sequence[types.FrameType], shell: Cells) -> str:
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
