"""Rewrites cells as parts of an exported script. Pure: source in, source out."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import symtable
import textwrap
import tokenize
from collections.abc import Iterable

_NOTHING = "lambda **values: None"
# What a script needs that has a stand-in for the module.
IMPORT = "from types import SimpleNamespace"


def without_cellmesh(source: str) -> str:
    """Return a cell in which imports of cellmesh's `log` are replaced by a definition of a `log`
    that does nothing.

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
    """Return the source that replaces an import of `cellmesh`; "" if the import stays."""
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


INDENT = "    "
# The head of an ``if`` for what processes that import the script are not to run.
MAIN = 'if __name__ == "__main__"'
# Calls of functions or methods with these names return None.
_SILENT = (
    "print",
    "display",
    "append",
    "extend",
    "clear",
    "backward",
    "barrier",
    "zero_grad",
    "manual_seed_all",
)
# And of these of torch.distributed, if they wait, and of these methods, by what they are called on.
_COLLECTIVES = re.compile(
    r"all_|reduce|broadcast|gather|scatter|send|destroy_process_group|init_process_group"
)
_STEPPERS = re.compile(r"opt|sched", re.IGNORECASE)


class CannotRewriteError(Exception):
    """Raised if a cell contains code that cannot be moved to where the script needs it; names the
    code.
    """


def parse(source: str) -> ast.Module | None:
    """Parse the source of a cell, which may await at top level; return None if it is not Python."""
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        tree = compile(source, "cell", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError):
        return None
    assert isinstance(tree, ast.Module)
    return tree


def awaits(source: str) -> bool:
    """Return whether a cell awaits at top level."""
    code = compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return bool(code.co_flags & inspect.CO_COROUTINE)


def names_in(source: str) -> set[str]:
    """Return all names that a cell uses or binds, at any depth."""
    tree = parse(source)
    found: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                found.add(name)
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name.partition(".")[0])
    return found


def names_bound(source: str) -> set[str]:
    """Return the global names that a cell binds: at its top level, or as ``global`` in a
    function.
    """
    try:
        tree = _Generators().visit(ast.parse(_as_function(source, "cell")))
        table = symtable.symtable(ast.unparse(tree), "cell", "exec").get_children()[0]
    except (SyntaxError, CannotRewriteError):
        return set()
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()} | {
        name
        for node in ast.walk(ast.parse(_as_function(source, "cell")))
        if isinstance(node, ast.Global)
        for name in node.names
    }


def without_globals(source: str) -> str:
    """Return a cell without ``global`` statements at its top level, where they have no effect.

    In the script, such a statement would be a syntax error below a line that binds the same name.
    """
    found: list[ast.Global] = []
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    nodes: list[ast.AST] = [parse(source) or ast.Module([], [])]
    while nodes:
        node = nodes.pop()
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, scopes)]
        if isinstance(node, ast.Global):
            found.append(node)
    for statement in sorted(found, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        source = _without(source, statement)
    return source


def _without(source: str, statement: ast.stmt) -> str:
    """Remove a statement's lines or, where they hold other code too, replace it by ``pass``."""
    begin = offset(source, statement.lineno, statement.col_offset)
    end = offset(source, statement.end_lineno, statement.end_col_offset)
    is_alone = statement.col_offset == 0 and source[end : end + 1] in ("", "\n")
    return source[:begin] + (source[end + 1 :] if is_alone else f"pass{source[end:]}")


def guard(source: str) -> str:
    """Put statements of a cell under an ``if``, so that spawned processes run only its definitions.

    Raises:
        CannotRewriteError: a part of it cannot stand under an ``if``.
    """
    tree = parse(source)
    lines = _lines(source)
    parts: list[tuple[bool, str]] = []  # whether it only defines, and its lines
    end = 0
    for node in tree.body if tree is not None else ():
        last = node.end_lineno or node.lineno
        if node.lineno <= end:  # it begins on the line on which the one before ends
            parts[-1] = (False, parts[-1][1] + "".join(lines[end:last]))
        else:
            parts.append((_only_defines(node), "".join(lines[end:last])))
        end = last
    pieces = []
    for defines, texts in itertools.groupby(parts, lambda part: part[0]):
        text = "".join(text for _, text in texts)
        pieces.append(text if defines else under(MAIN, _ended(text)))
    return "".join([*pieces, *lines[end:]])


def _only_defines(node: ast.stmt) -> bool:
    match node:
        case (
            ast.Import()
            | ast.ImportFrom()
            | ast.FunctionDef()
            | ast.AsyncFunctionDef()
            | ast.ClassDef()
        ):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign() | ast.AnnAssign() | ast.Expr(value=ast.Constant()):
            return not any(isinstance(each, ast.Call | ast.Await) for each in ast.walk(node))
    return False


class _Generators(ast.NodeTransformer):
    """Turns all comprehensions into generators: from Python 3.12 on, a symbol table lists names
    bound in other comprehensions as names of the enclosing function.
    """

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """Return a name like the wanted one that is not among the taken ones."""
    taken = set(taken)
    name = wanted
    while name in taken:
        name += "_"
    return name


def indent(source: str) -> str:
    """Indent a cell by one level, but not the insides of strings.

    Raises:
        CannotRewriteError: it means something else when it is indented.
    """
    lines = _lines(source)
    inside: set[int] = set()  # lines that begin inside a string
    open_strings: list[int] = []
    for token in _tokens(source):
        kind = tokenize.tok_name[token.type]
        if kind in ("FSTRING_START", "TSTRING_START"):
            open_strings.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(open_strings.pop() + 1, token.end[0] + 1))
        elif token.type == tokenize.STRING:
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    moved = "".join(
        line if number in inside or not line.strip() else INDENT + line.lstrip("\f")
        for number, line in enumerate(lines, 1)
    )
    _check_same(source, moved)
    return moved


def _check_same(source: str, moved: str) -> None:
    before, after = parse(source), parse(f"if True:\n{moved}\n{INDENT}pass")
    if before is None or after is None:
        raise CannotRewriteError("it is no Python when it is indented")
    (block,) = after.body
    assert isinstance(block, ast.If)
    if ast.dump(before) != ast.dump(ast.Module(block.body[:-1], [])):
        raise CannotRewriteError("it means something else when it is indented")
    if any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in before.body
    ):
        raise CannotRewriteError("`from __future__ import` must stand first in a file")


def _tokens(source: str) -> list[tokenize.TokenInfo]:
    try:
        return list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError) as e:
        raise CannotRewriteError(f"it cannot be read: {e}") from None


def under(head: str, source: str) -> str:
    """Return a cell as the body of an ``if`` or a loop with this head.

    Raises:
        CannotRewriteError: it cannot be one.
    """
    tree = parse(source)
    body = indent(source)
    if tree is not None and not tree.body:
        body = f"{body}{INDENT}pass\n"
    return f"{head}:\n{body}"


def as_coroutine(source: str, name: str) -> str:
    """Return a cell that awaits as an ``async def`` that binds the same global names.

    Raises:
        CannotRewriteError: something in it cannot stand in a function.
    """
    bound = sorted(names_bound(source))
    text = _as_function(source, name)
    if bound:
        head, _, body = text.partition("\n")
        text = f"{head}\n{INDENT}global {', '.join(bound)}\n{body}"
    try:
        compile(text, "cell", "exec", dont_inherit=True)
    except SyntaxError as e:
        raise CannotRewriteError(f"it awaits, and in an async function {e.msg}") from None
    return text


def _lines(source: str) -> list[str]:
    """Split text into lines as Python counts them, with their line feeds (`str.splitlines`
    splits at other characters, too).
    """
    return re.findall(r"[^\n]*\n|[^\n]+", source)


def _as_function(source: str, name: str) -> str:
    return under(f"async def {name}()", _ended(source))


def _ended(source: str) -> str:
    return source if source.endswith("\n") else source + "\n"


def show_last(source: str, show: str) -> str:
    """Write a cell so that its last expression is passed to `show`, unless it ends in ``;``."""
    tree = parse(source)
    if tree is None or not tree.body:
        return source
    last = tree.body[-1]
    if not isinstance(last, ast.Expr) or _is_silent(last.value) or _ends_quietly(source):
        return source
    start, end = (
        offset(source, last.lineno, last.col_offset),
        offset(source, last.end_lineno, last.end_col_offset),
    )
    expression = source[start:end]
    call = parse(f"{show}({expression})")
    match call.body if call is not None else None:
        case [ast.Expr(value=ast.Call(args=[argument], keywords=[]))] if ast.dump(
            argument
        ) == ast.dump(last.value):
            pass
        case _:
            expression = f"({expression})"
    return f"{source[:start]}{show}({expression}){source[end:]}"


def offset(source: str, line: int | None, column: int | None) -> int:
    """Return the position in the text of a node of the syntax tree, whose columns count UTF-8
    bytes.
    """
    assert line is not None
    assert column is not None
    lines = _lines(source)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def _is_silent(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=None):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _SILENT
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=args, keywords=keywords):
            of = owner.id if isinstance(owner, ast.Name) else ""
            waits = not any(keyword.arg in (None, "async_op") for keyword in keywords)
            is_collective = of == "dist" and _COLLECTIVES.match(name) is not None and waits
            is_step = name == "step" and not args and _STEPPERS.search(of) is not None
            return name in _SILENT or is_collective or is_step
    return False


def _ends_quietly(source: str) -> bool:
    passed_over = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    tokens = [token for token in _tokens(source) if token.type not in passed_over]
    return bool(tokens) and tokens[-1].string == ";"


def split_future(source: str) -> tuple[list[str], str]:
    """Return the features that a cell imports from ``__future__``, and the cell without these
    imports.
    """
    tree = parse(source)
    features: list[str] = []
    for node in reversed(tree.body if tree is not None else ()):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            features += [alias.name for alias in node.names]
            source = _without(source, node)
    return features, source


def comment(source: str, depth: int = 0) -> str:
    """Return source text as a Python comment."""
    return "".join(
        f"#{' ' * (4 * depth + 1)}{line}\n" if line.strip() else "#\n"
        for line in source.strip("\n").splitlines()
    )


def without_margin(source: str) -> str:
    """Remove blank lines around a cell and its common indentation, and end it with a line feed."""
    text = source.strip("\n").rstrip()
    tree = parse(text)
    return (text if tree is not None else textwrap.dedent(text)) + "\n"
