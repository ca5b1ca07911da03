"""Which modules of the package import which, read from their source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import cellmesh

PACKAGE = Path(cellmesh.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements within a module, a function or a class, however deep."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)


@functools.cache
def _statements_of(path: Path) -> list[ast.AST]:
    return list(statements(ast.parse(path.read_text())))


def imported_by(path: Path, is_run: bool = False) -> Iterator[str]:
    """The full names that a module of ours imports, at its top or in functions.

    Args:
        path: the module's file.
        is_run: leave out imports that only type checkers read.
    """
    package = ("cellmesh", *path.relative_to(PACKAGE).parts[:-1])
    found = _statements_of(path)
    skipped = {
        within
        for node in found
        if is_run and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for within in statements(ast.Module(node.body, []))
    }
    for node in (each for each in found if each not in skipped):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*base, *((node.module or "").split(".") if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def name_of(path: Path) -> str:
    """The full name of a module of ours."""
    name = ".".join(("cellmesh", *path.relative_to(PACKAGE).with_suffix("").parts))
    return name.removesuffix(".__init__")


@functools.cache
def imports_of_modules(is_run: bool = False) -> dict[str, set[str]]:
    """The modules of ours that each module of ours imports; see `imported_by`."""
    names = {name_of(path) for path in MODULES}

    def module_of(imported: str) -> str:  # `from ..package import module`, or a name in a module
        return imported if imported in names else imported.rpartition(".")[0]

    return {
        name_of(path): {module_of(name) for name in imported_by(path, is_run)}
        & names - {name_of(path)}
        for path in MODULES
    }


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules each of which imports, through others, all of its set; the largest first."""
    reached = {name: _reached_from(name, imports) for name in imports}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return sorted((list(circle) for circle in found), key=lambda circle: (-len(circle), circle))


def _reached_from(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    open_names = [name]
    while open_names:
        new = imports[open_names.pop()] - reached
        reached |= new
        open_names += new
    return reached
