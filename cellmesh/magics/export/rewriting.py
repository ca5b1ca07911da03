"""Rewrites the source of cells for an exported script: removes IPython's syntax, indents code, and
shows last values.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType

from IPython.core.inputtransformer2 import TransformerManager

INDENT = "    "
# The head of an ``if`` for code that processes that import the script must not run.
MAIN = 'if __name__ == "__main__"'
# Calls of functions or methods with these names return None.
_SILENT = {
    *("print", "display", "append", "extend", "clear", "backward", "barrier", "zero_grad"),
    "manual_seed_all",
}
_AWAITS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class CannotRewriteError(Exception):
    """Raised if a cell contains code that cannot stand in a script; the message names the code."""


# Analysis of cells.


def parse(source: str) -> ast.Module | None:
    """Parse the source of a cell, which may await at top level; return None if it is not Python."""
    try:
        tree = compile(source, "cell", "exec", _AWAITS | ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError):
        return None
    assert isinstance(tree, ast.Module)
    return tree


def awaits(source: str) -> bool:
    """Return whether a cell awaits at top level."""
    code = compile(source, "cell", "exec", _AWAITS, dont_inherit=True)
    return bool(code.co_flags & inspect.CO_COROUTINE)


def names_in(source: str) -> set[str]:
    """Return all names that a cell uses or binds, at any depth."""
    return {
        name.partition(".")[0]
        for node in ast.walk(parse(source) or ast.Module([], []))
        if not isinstance(node, ast.keyword)
        for part in ("id", "arg", "name", "asname")
        if isinstance(name := getattr(node, part, None), str)
    }


def names_bound(source: str) -> set[str]:
    """Return the global names that a cell binds at top level, or as ``global`` in a function."""
    try:
        code = compile(source, "cell", "exec", _AWAITS, dont_inherit=True)
    except SyntaxError:
        return set()
    bound: set[str] = set()
    codes = [code]
    for each in codes:
        codes += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
        kinds = ["GLOBAL", "NAME"] if each is code else ["GLOBAL"]
        binding = {f"{verb}_{kind}" for verb in ("STORE", "DELETE") for kind in kinds}
        bound |= {each.argval for each in dis.get_instructions(each) if each.opname in binding}
    return {name for name in bound if not name.startswith("__")}


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """Return the wanted name, or a similar one if it is taken."""
    taken = set(taken)
    while wanted in taken:
        wanted += "_"
    return wanted


# Moving a cell.


def at_top_level(source: str) -> tuple[list[str], str]:
    """Return the features that a cell imports from ``__future__``, and the cell without statements
    that are valid only at the begin of a module: these imports, and ``global`` at top level.
    """
    features: list[str] = []
    found: list[ast.stmt] = []
    nodes: list[ast.AST] = [parse(source) or ast.Module([], [])]
    for node in nodes:
        nodes += [each for each in ast.iter_child_nodes(node) if not isinstance(each, _SCOPES)]
        if isinstance(node, ast.Global):
            found.append(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            features += [alias.name for alias in node.names]
            found.append(node)
    for statement in sorted(found, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        begin, end = span(source, statement)
        source = f"{source[:begin]}pass{source[end:]}"
    return features, source


def span(source: str, node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Return the begin and end of a node of the syntax tree in the text, in characters; columns of
    the tree count UTF-8 bytes.
    """
    # Python's line ends only: `str.splitlines` splits at other characters, too.
    lines = re.findall(r"[^\n]*\n|[^\n]+", source)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def only_defines(source: str) -> bool:
    """Return whether a cell only has imports, definitions, and assignments without calls."""
    return all(map(_defines, (parse(source) or ast.Module([], [])).body))


def _defines(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return True
        case ast.ClassDef() | ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign() | ast.AnnAssign() | ast.Expr(value=ast.Constant()) | ast.Pass():
            return not any(isinstance(each, ast.Call | ast.Await) for each in ast.walk(node))
    return False


def under(head: str, source: str) -> str:
    """Return a cell as the body of an ``if``, a loop or a function with this head.

    If indentation would change the meaning, as in a string of several lines, the body is written
    from its syntax tree, without comments.

    Raises:
        CannotRewriteError: the cell is not Python.
    """
    tree = parse(source)
    if tree is None:
        raise CannotRewriteError("it is no Python when it is indented")
    ended = source if source.endswith("\n") else source + "\n"
    body = textwrap.indent(ended, INDENT) + ("" if tree.body else f"{INDENT}pass\n")
    moved = parse(f"if 1:\n{body}")
    block = ast.If(ast.Constant(1), tree.body or [ast.Pass()], [])
    if moved is None or ast.dump(moved) != ast.dump(ast.Module([block], [])):
        body = ast.unparse(block).partition("\n")[2] + "\n"
    return f"{head}:\n{body}"


def show_last(source: str, show: str) -> str:
    """Return a cell that passes its last expression to `show`, unless it ends in ``;``."""
    tree = parse(source)
    last = tree.body[-1] if tree is not None and tree.body else None
    if not isinstance(last, ast.Expr) or _is_silent(last.value):
        return source
    begin, end = span(source, last)
    if source[end:].lstrip(" \t\n)").startswith(";"):
        return source
    expression = source[begin:end]
    call = ast.parse(f"async def _():\n ({show}({expression}))").body[0].body[0].value  # type: ignore[attr-defined]
    if [*map(ast.dump, call.args)] != [ast.dump(last.value)]:  # several arguments, as for ``a, b``
        expression = f"({expression})"
    return f"{source[:begin]}{show}({expression}){source[end:]}"


def _is_silent(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=None):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _SILENT
    return False


def comment(source: str, depth: int = 0) -> str:
    """Return source text as a Python comment."""
    lines = source.strip("\n").splitlines()
    return "".join(f"#{' ' * (4 * depth + 1)}{line}".rstrip() + "\n" for line in lines)


def without_margin(source: str) -> str:
    """Remove blank lines around a cell and its common indentation, and end it with a line feed."""
    text = source.strip("\n").rstrip()
    return (text if parse(text) is not None else textwrap.dedent(text)) + "\n"


# IPython's syntax.


@dataclass
class Plain:
    """A cell rewritten as Python, without IPython's syntax.

    Attributes:
        source: Python source.
        imports: import lines that it needs in addition to the cell's own.
        left_out: parts of the cell that a script cannot contain.
    """

    source: str
    imports: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)


def to_python(source: str) -> Plain:
    """Rewrite a cell with IPython's syntax (``!ls``, ``%time f()``) as Python; leave out parts
    without an equivalent.
    """
    if parse(source) is not None:
        return Plain(source)
    transformed = TransformerManager().transform_cell(source)  # type: ignore[no-untyped-call]
    tree = parse(transformed)
    if tree is None:  # a magic without its %, as `cd /tmp`
        return Plain(_leave_out(source), left_out=[source.strip()])
    plain = Plain(transformed)
    lines = transformed.splitlines(keepends=True)
    for node, method, texts in _magics(tree):
        old = lines[node.lineno - 1]
        margin = old[: len(old) - len(old.lstrip())]
        target = f"{ast.unparse(node.targets[0])} = " if isinstance(node, ast.Assign) else ""
        text = _replace(plain, method, texts, target, is_nested=bool(margin))
        lines[node.lineno - 1] = textwrap.indent(text.rstrip("\n") + "\n", margin)
    plain.source = "".join(lines)
    return plain


def _magics(tree: ast.Module) -> Iterator[tuple[ast.Expr | ast.Assign, str, list[str]]]:
    """Yield statements that call ``get_ipython().method("text", ...)``, with method and texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value) | ast.Assign(value=value):
                match value:
                    case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), method), args):
                        values = [each.value for each in args if isinstance(each, ast.Constant)]
                        texts = [value for value in values if isinstance(value, str)]
                        yield node, method, texts


def _replace(plain: Plain, method: str, texts: list[str], target: str, is_nested: bool) -> str:
    """Return the Python source that replaces a call of IPython in the script."""
    imports, text = set[str](), ""
    match method, *texts:
        case "system", command:
            imports, text = {"import subprocess"}, f"subprocess.run({_shell(command)}, shell=True)"
        case "getoutput", command:
            run = f"subprocess.run({_shell(command)}, shell=True, capture_output=True, text=True)"
            imports, text = {"import subprocess"}, f"{run}.stdout.splitlines()"
        case "run_cell_magic", "bash" | "sh" as shell, "", body:
            imports, text = {"import subprocess"}, f"subprocess.run([{shell!r}, '-c', {body!r}])"
        case "run_line_magic", "cd", directory if directory and not directory.startswith("-"):
            imports = {"import os"}
            text = f"os.chdir(os.path.expanduser({directory.strip()!r}))"
        case "run_line_magic", "run", line if script := _run_script(line):
            imports, text = {"import runpy", "import sys"}, script
        case "run_line_magic", "time", statement if statement.strip():
            return _inner(plain, target + statement)
        case "run_cell_magic", "time" | "capture" | "prun", _, body if not is_nested:
            return _inner(plain, body)
        case "run_line_magic", name, rest:
            said = f"{target}%{name} {rest}".strip()
        case "run_cell_magic", name, line, body:
            said = f"%%{name} {line}".strip() + f"\n{body}"
        case _:
            said = f"get_ipython().{method}(...)"
    plain.imports |= imports
    if text:
        return text if text.startswith("try:") else target + text  # %run has no value
    plain.left_out.append(said.partition("\n")[0])
    return f"pass\n{_leave_out(said)}" if is_nested else _leave_out(said)


def _inner(plain: Plain, source: str) -> str:
    inner = to_python(source)
    plain.imports |= inner.imports
    plain.left_out += inner.left_out
    return inner.source


def _leave_out(said: str) -> str:
    return "".join(f"# left out: {line}\n" for line in said.splitlines())


def _shell(command: str) -> str:
    """Return a shell command as a Python string; IPython fills in its ``{expressions}``."""
    return f"f{command!r}" if "{" in command else repr(command)


def _run_script(line: str) -> str:
    """Return ``%run script.py arguments`` as Python; "" if it has options."""
    try:
        name, *arguments = shlex.split(line) or ["-"]
    except ValueError:
        return ""
    if name.startswith("-") or name.endswith((".ipy", ".ipynb")):
        return ""
    name = name if name.endswith(".py") else f"{name}.py"
    return (
        "try:\n"
        f"    sys.argv[:] = {[name, *arguments]!r}\n"
        f"    names = runpy.run_path({name!r}, run_name='__main__')\n"
        "    globals().update({k: v for k, v in names.items() if not k.startswith('__')})\n"
        "except SystemExit as end:  # of that script only\n"
        "    if end.code:\n"
        "        raise\n"
        "finally:\n"
        "    sys.argv[:] = [__file__]\n"
    )
