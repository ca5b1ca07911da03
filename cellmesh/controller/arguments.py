"""Checks and pickles what users send to ranks; an error names the part that is wrong."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import MeshUsageError
from ..wire import payload
from ..wire.codec import Frame
from ..wire.modules import loaded


def dump_call(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Frame]]:
    """Pickle a function and its arguments.

    Raises:
        UnpicklableError: one of them cannot be pickled; says which.
    """
    try:
        return payload.dumps((function, args, kwargs), name, loaded.reducer(), not (args or kwargs))
    except MeshUsageError:
        payload.dumps(function, name, loaded.reducer())  # say which part it was
        for position, value in enumerate(args):
            payload.dumps(value, f"argument {position} of {name}", loaded.reducer())
        for key, value in kwargs.items():
            payload.dumps(value, f"argument {key} of {name}", loaded.reducer())
        raise


def dump_names(
    names: Mapping[str, Any], reducer: payload.Reducer | None = None
) -> tuple[Any, list[Frame]]:
    """Pickle values with their names.

    Args:
        names: name -> value.
        reducer: instead of the one that knows the notebook's modules; see `payload.dumps`.

    Raises:
        UnpicklableError: one of them cannot be pickled; says which.
    """
    reducer = reducer or loaded.reducer()
    try:
        return payload.dumps(dict(names), "push", reducer)
    except MeshUsageError:
        for name, value in names.items():  # say which one it was
            payload.dumps(value, name, reducer)
        raise


def read_argv(argv: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Read the arguments that a cell finds in `sys.argv`: a text, split as a shell does, or a list.

    Raises:
        MeshUsageError: it is neither.
    """
    if argv is None:
        return None
    try:
        words = shlex.split(argv) if isinstance(argv, str) else list(argv)
    except (TypeError, ValueError) as e:
        raise MeshUsageError(
            f"argv {argv!r} cannot be read as arguments ({e}): write it as in a shell"
        ) from None
    for word in words:
        if not isinstance(word, str):
            raise MeshUsageError(f"argv has {word!r}, which is no text: write {str(word)!r}")
    return tuple(words)


def check_expression(expression: str) -> None:
    """Check that a text is a Python expression.

    Raises:
        MeshUsageError: it does not parse.
    """
    try:
        ast.parse(expression.strip(), mode="eval")
    except SyntaxError as e:
        raise MeshUsageError(f"{expression!r} is no expression: {e.msg}") from e
