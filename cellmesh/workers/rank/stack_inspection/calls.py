"""Finds the source text of the call that a frame is in, without running user code."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import sys
import sysconfig
import types
from typing import Any

from torch.distributed import Work

from .thread_stacks import local_value, module_of

_MAX_TEXT = 60
# What a `with` begins by, and what ends it after an exception.
_WITH = ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "WITH_EXCEPT_START")
_LIBRARIES = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
)


def is_user_code(frame: types.FrameType) -> bool:
    """Whether a frame is of a cell or of a user's module, not of an installed library or of
    cellmesh.
    """
    name = frame.f_code.co_filename
    if name.startswith("<frozen"):
        return False
    if name.startswith(_LIBRARIES):
        return False
    return not module_of(frame).startswith("cellmesh.")


def call_of(code: types.CodeType, instruction: int) -> str:
    """The source text of the call that an instruction belongs to: ``time.sleep``,
    ``loader.__next__``.

    Args:
        code: the frame's.
        instruction: its `f_lasti`.

    Returns:
        "" where it is no call, or its source is not known.
    """
    name = dis.opname[code.co_code[instruction]] if instruction >= 0 else ""
    node = _node_at(code, instruction)
    match node:
        # What the interpreter calls by itself; versions differ in whether the statement or the
        # expression is its place: of a `with` it is the expression from Python 3.13.
        case (
            ast.With(items=[ast.withitem(node), *_]) | ast.AsyncWith(items=[ast.withitem(node), *_])
        ):
            return _of_with(node, code, instruction)
        case ast.expr() if name in _WITH or (name == "CALL" and _is_implied(code, instruction)):
            return _of_with(node, code, instruction)
        case ast.Call(function):
            return _shorten(ast.unparse(function))
        case ast.Await() as node:
            return _shorten(ast.unparse(node))
        case ast.For(iter=node) | ast.AsyncFor(iter=node):
            return _shorten(f"{ast.unparse(node)}.__next__")
        case ast.expr() as node if name == "FOR_ITER":
            return _shorten(f"{ast.unparse(node)}.__next__")
    return ""


def _of_with(manager: ast.expr, code: types.CodeType, instruction: int) -> str:
    """The method of a context manager that an instruction of its ``with`` calls."""
    exits = dis.opname[code.co_code[instruction]] in ("CALL", "WITH_EXCEPT_START")
    return _shorten(f"{ast.unparse(manager)}.{'__exit__' if exits else '__enter__'}")


def _is_implied(code: types.CodeType, instruction: int) -> bool:
    """Whether a call is implicit: its arguments have no position of their own in the source."""
    if sys.version_info < (3, 13):
        return False
    positions = list(code.co_positions())
    return positions[instruction // 2] == positions[instruction // 2 - 1]


def waits_for_work(frame: types.FrameType) -> bool:
    """Whether a frame is in the ``wait()`` of a torch.distributed Work."""
    node = _node_at(frame.f_code, frame.f_lasti)
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr != "wait":
        return False
    return isinstance(_value_of(function.value, frame), Work)


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
        return ast.parse(b"(" + text + b")", mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        pass
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    return body[0] if len(body) == 1 else None


def _value_of(node: ast.expr, frame: types.FrameType) -> Any:
    """The value of a name, an attribute or an item of a list, where looking it up runs no code."""
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


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
