"""The names that a cell binds that has not run: what can be completed before it does."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from typing import Any

from ..inspect.static_eval import Unknown
from .inference import Known, Lookup, Value, annotated, attribute, find_name, resolve

# Lines of IPython's own, and what stands in for them.
_NO_PYTHON = re.compile(r"^([ \t]*)[%!?].*$|^([ \t]*).*\?$", re.MULTILINE)
_BINDS = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]+)?=[^=])",
    re.MULTILINE,
)


def names_in(code: str, cursor: int, namespace: Mapping[str, Any]) -> tuple[dict[str, str], Lookup]:
    """What a cell's own lines bind.

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
    binder = _Binder(above.count("\n") + 1)
    binder.visit(tree)
    return binder.kinds, _Scope(binder, namespace).look_up


class _Binder(ast.NodeVisitor):
    """Collects the names that code binds.

    Args:
        line: values are kept of what stands above it.
    """

    def __init__(self, line: int) -> None:
        self._line = line
        self.kinds: dict[str, str] = {}
        self.values: dict[str, ast.AST] = {}

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.kinds.setdefault(node.id, "instance")

    def visit_arg(self, node: ast.arg) -> None:
        self.kinds.setdefault(node.arg, "param")
        if node.annotation is not None and node.lineno <= self._line:
            self.values[node.arg] = node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._define(node, "function")

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._define(node, "function")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node, "class")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._keep(target.id, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and node.value is not None:
            self._keep(node.target.id, node.value)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.kinds[name] = "module"
            self._keep(name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                name = alias.asname or alias.name
                self.kinds.setdefault(name, "instance")
                self._keep(name, node)

    def _define(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, kind: str
    ) -> None:
        self.kinds[node.name] = kind
        self._keep(node.name, node)
        self.generic_visit(node)

    def _keep(self, name: str, node: ast.AST) -> None:
        if getattr(node, "lineno", 0) < self._line:
            self.values[name] = node


class _Scope:
    """What names stand for in a cell: by its own lines, else on the rank."""

    def __init__(self, binder: _Binder, namespace: Mapping[str, Any]) -> None:
        self._values = binder.values
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
                return _loaded(full if is_whole else full.partition(".")[0])
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                return attribute(
                    _loaded(module), next(a.name for a in aliases if name in (a.asname, a.name))
                )
            case ast.arg(annotation=ast.expr() as annotation):
                known = resolve(annotation, self.look_up)
                return annotated(known.value if isinstance(known, Value) else None, self._namespace)
            case ast.expr():
                return resolve(node, self.look_up)
        raise Unknown


def _loaded(name: str) -> Known:
    module = sys.modules.get(name)
    if module is None:
        raise Unknown
    return Value(module)
