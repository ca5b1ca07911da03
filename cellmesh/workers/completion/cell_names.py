"""Finds the names that a cell will bind, so that they can be completed before it runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from ..inspect.static_eval import Unknown
from .inference import (
    InferredValue,
    Known,
    Lookup,
    annotated,
    attribute,
    find_name,
    loaded,
    resolve,
)

# Lines of IPython's own, and what stands in for them.
_NO_PYTHON = re.compile(r"^([ \t]*)[%!?].*$|^([ \t]*).*\?$", re.MULTILINE)
_BINDS = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]+)?=[^=])",
    re.MULTILINE,
)


def names_in(code: str, cursor: int, namespace: Mapping[str, Any]) -> tuple[dict[str, str], Lookup]:
    """Return what a cell's own lines bind.

    Args:
        code: the cell.
        cursor: where it is being written, in characters: that line is passed over.
        namespace: of the rank.

    Returns:
        Each name and what kind it is; and what names stand for in this cell, so far as can be told.
    """
    begin, end = code.rfind("\n", 0, cursor) + 1, code.find("\n", cursor)
    line = code[begin : end if end >= 0 else len(code)]
    indent = line[: len(line) - len(line.lstrip())]
    above = code[:begin]
    tree = None
    for rest in (code[begin + len(line) :], ""):  # all of it, or what is above
        text = _NO_PYTHON.sub(
            lambda match: f"{match[1] or match[2] or ''}pass", f"{above}{indent}pass{rest}"
        )
        try:
            tree = ast.parse(text)
            break
        except (SyntaxError, ValueError, RecursionError):
            continue
    if tree is None:
        found = {def_ or name: "instance" for def_, name in _BINDS.findall(above)}
        return found, lambda name: find_name(name, namespace)
    kinds, values = _bindings(tree, above.count("\n") + 1)
    return kinds, _Scope(values, namespace).look_up


def _bindings(tree: ast.AST, line: int) -> tuple[dict[str, str], dict[str, ast.AST]]:
    """Yield the names that code binds, the kind of each, and the expression bound to it."""
    kinds: dict[str, str] = {}
    values: dict[str, ast.AST] = {}

    def keep(name: str, value: ast.stmt | ast.expr) -> None:
        if value.lineno < line:
            values[name] = value

    for node in sorted(ast.walk(tree), key=lambda each: getattr(each, "lineno", 0)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                kinds.setdefault(name, "instance")
            case ast.arg(arg=name):
                kinds.setdefault(name, "param")
                if node.annotation is not None and node.lineno <= line:
                    values[name] = node
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                kinds[name] = "function"
                keep(name, node)
            case ast.ClassDef(name=name):
                kinds[name] = "class"
                keep(name, node)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for name in {_bound_by(alias) for alias in aliases} - {"*"}:
                    kinds[name] = "module" if isinstance(node, ast.Import) else "instance"
                    keep(name, node)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        keep(target.id, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                keep(name, value)
    return kinds, values


def _bound_by(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


class _Scope:
    """Looks names up in a cell's own lines, else on the rank."""

    def __init__(self, values: Mapping[str, ast.AST], namespace: Mapping[str, Any]) -> None:
        self._values = values
        self._namespace = namespace
        self._visiting: set[str] = set()

    def look_up(self, name: str) -> Known:
        node = self._values.get(name)
        if node is None or name in self._visiting:
            return find_name(name, self._namespace)
        self._visiting.add(name)
        try:
            return self._read(name, node)
        except Unknown:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                raise  # it will not be what the rank has now
            return find_name(name, self._namespace)
        finally:
            self._visiting.discard(name)

    def _read(self, name: str, node: ast.AST) -> Known:
        match node:
            case ast.Import(names=aliases):
                full = next(a.name for a in aliases if name in (a.asname, a.name.partition(".")[0]))
                is_whole = any(name == a.asname for a in aliases)
                return loaded(full if is_whole else full.partition(".")[0])
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                return attribute(
                    loaded(module), next(a.name for a in aliases if name in (a.asname, a.name))
                )
            case ast.arg(annotation=ast.expr() as annotation):
                known = resolve(annotation, self.look_up)
                return annotated(
                    known.value if isinstance(known, InferredValue) else None, self._namespace
                )
            case ast.expr():
                return resolve(node, self.look_up)
        raise Unknown
