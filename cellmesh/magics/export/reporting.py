"""Replaces ``cellmesh.log`` in a script, which must run without cellmesh. Pure."""

from __future__ import annotations

import ast

from .rewriting import offset, parse

_NOTHING = "lambda **values: None"
# What a script needs that has a stand-in for the module.
IMPORT = "from types import SimpleNamespace"


def without_cellmesh(source: str) -> str:
    """Return a cell in which imports of cellmesh's `log` are replaced by a function that does
    nothing.

    Imports of anything else of cellmesh stay as they are.
    """
    tree = parse(source)
    found: list[tuple[int, int, str]] = []
    for node in ast.walk(tree) if tree is not None else ():
        text = _stand_in(node)
        if text and isinstance(node, ast.stmt):
            begin = offset(source, node.lineno, node.col_offset)
            found.append((begin, offset(source, node.end_lineno, node.end_col_offset), text))
    for begin, end, text in sorted(found, reverse=True):
        source = f"{source[:begin]}{text}{source[end:]}"
    return source


def _stand_in(node: ast.AST) -> str:
    """Return the replacement of an import; "" if the import stays."""
    match node:
        case ast.Import(names) if any(alias.name == "cellmesh" for alias in names):
            others = [alias for alias in names if alias.name != "cellmesh"]
            pieces = [ast.unparse(ast.Import(others))] if others else []
            for alias in names:
                if alias.name == "cellmesh":
                    pieces.append(f"{alias.asname or alias.name} = SimpleNamespace(log={_NOTHING})")
            return "; ".join(pieces)
        case ast.ImportFrom(module="cellmesh", names=names, level=0):
            if all(alias.name == "log" for alias in names):
                return "; ".join(f"{alias.asname or alias.name} = {_NOTHING}" for alias in names)
    return ""
