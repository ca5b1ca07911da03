"""Lets functions that were sent by value use names of the rank that were not sent along."""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

_CONTAINERS = (tuple, list, set, frozenset)


def bind_missing_names(value: Any, namespace: Mapping[str, Any]) -> None:
    """Bind, in each function of a value, the missing names to the rank's current values.

    Args:
        value: a function, or what holds functions: helpers among its globals and in its closure,
            methods, partials, containers.
        namespace: the rank's.
    """
    seen: set[int] = set()
    todo = [value]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, types.FunctionType):
            module = sys.modules.get(part.__module__)
            if module is None or vars(module) is not part.__globals__:  # it was sent by value
                todo += _bind(part, namespace)
        elif isinstance(part, types.MethodType):
            todo += [part.__func__, type(part.__self__)]
        elif isinstance(part, functools.partial):
            todo += [part.func, part.args, part.keywords]
        elif isinstance(part, type):
            if part.__module__ == "__main__" or "<locals>" in part.__qualname__:
                todo += [v for v in vars(part).values() if isinstance(v, types.FunctionType)]
        elif isinstance(part, dict):
            todo += part.values()
        elif isinstance(part, _CONTAINERS):
            todo += part


def _bind(function: types.FunctionType, namespace: Mapping[str, Any]) -> list[Any]:
    """Bind a function's own missing names; returns the objects that it refers to."""
    known, names = function.__globals__, _names_of(function.__code__)
    parts = []
    for name in names:
        if name not in known and name in namespace and not hasattr(builtins, name):
            known[name] = namespace[name]
        if name in known:
            parts.append(known[name])
    for cell in function.__closure__ or ():
        if _is_bound(cell):
            parts.append(cell.cell_contents)
    return parts


def _is_bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names_of(code: types.CodeType) -> tuple[str, ...]:
    names = code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_of(constant)
    return names
