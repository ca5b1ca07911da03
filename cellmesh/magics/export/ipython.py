"""Rewrites IPython's syntax in a cell (``!ls``, ``%time f()``) as Python, where Python can do
the same. Pure.
"""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass, field

from IPython.core.inputtransformer2 import TransformerManager

from .rewriting import parse


@dataclass
class Plain:
    """A cell rewritten as Python, without IPython's syntax.

    Attributes:
        source: the Python.
        imports: lines that it needs, beside what the cell imports.
        left_out: what it had that a script cannot do.
    """

    source: str
    imports: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)


def to_python(source: str) -> Plain:
    """Rewrite a cell with IPython's syntax as Python.

    Args:
        source: as typed.
    """
    if parse(source) is not None:
        return Plain(source)
    transformed = TransformerManager().transform_cell(source)  # type: ignore[no-untyped-call]
    tree = parse(transformed)
    if tree is None:  # a magic without its %, as `cd /tmp`
        return Plain(
            "".join(f"# left out: {line}\n" for line in source.splitlines()),
            set(),
            [source.strip()],
        )
    plain = Plain(transformed)
    lines = transformed.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr | ast.Assign) and (call := magic_of(node.value)) is not None:
            old = lines[node.lineno - 1]
            margin = old[: len(old) - len(old.lstrip())]
            target = ast.unparse(node.targets[0]) + " = " if isinstance(node, ast.Assign) else ""
            text = _replace(plain, call, target, is_nested=bool(margin))
            lines[node.lineno - 1] = "".join(
                f"{margin}{line}\n" if line.strip() else "\n" for line in text.splitlines()
            )
    plain.source = "".join(lines)
    return plain


def magic_of(value: ast.expr) -> tuple[str, list[str]] | None:
    """Return the method and the texts of a call ``get_ipython().method("text", ...)``."""
    match value:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Name(id="get_ipython"), args=[]), attr=method
            ),
            args=args,
        ):
            return method, [
                arg.value
                for arg in args
                if isinstance(arg, ast.Constant) and type(arg.value) is str
            ]
    return None


def _replace(plain: Plain, call: tuple[str, list[str]], target: str, is_nested: bool) -> str:
    match call:
        case ("system", [command]):
            plain.imports.add("import subprocess")
            return f"{target}subprocess.run({_command(command)}, shell=True)"
        case ("getoutput", [command]):
            plain.imports.add("import subprocess")
            run = f"subprocess.run({_command(command)}, shell=True, capture_output=True, text=True)"
            return f"{target}{run}.stdout.splitlines()"
        case ("run_line_magic", ["time", statement]) if statement.strip():
            return _inner(plain, target + statement)
        case ("run_line_magic", ["cd", directory]) if directory and not directory.startswith("-"):
            plain.imports.add("import os")
            return f"os.chdir(os.path.expanduser({directory.strip()!r}))"
        case ("run_line_magic", ["run", line]) if (script := _run_script(line)) is not None:
            plain.imports |= {"import runpy", "import sys"}
            return script
        case ("run_cell_magic", ["time" | "capture" | "prun", _, body]) if not is_nested:
            return _inner(plain, body)
        case ("run_cell_magic", ["bash" | "sh" as shell, "", body]):
            plain.imports.add("import subprocess")
            return f"subprocess.run([{shell!r}, '-c', {body!r}])"
        case ("run_line_magic", [name, rest]):
            return _leave_out(plain, f"{target}%{name} {rest}".strip(), is_nested)
        case ("run_cell_magic", [name, line, body]):
            return _leave_out(plain, f"%%{name} {line}".strip() + f"\n{body}", is_nested)
    return _leave_out(plain, f"get_ipython().{call[0]}(...)", is_nested)


def _run_script(line: str) -> str | None:
    """Write ``%run [-i] script.py arguments`` as Python; None if it has other options."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    in_namespace = words[:1] == ["-i"]
    words = words[in_namespace:]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-") or words[0].endswith((".ipy", ".ipynb")):
        return None
    name, *arguments = words
    if not is_module:
        name = name if name.endswith(".py") else f"{name}.py"
    run, names = ("run_module", "alter_sys=True, ") if is_module else ("run_path", "")
    names += "init_globals=globals(), " if in_namespace else ""
    return (
        "try:\n"
        f"    sys.argv[:] = [{', '.join(map(repr, (name, *arguments)))}]\n"
        f"    names = runpy.{run}({name!r}, {names}run_name='__main__')\n"
        "    globals().update({k: v for k, v in names.items() if not k.startswith('__')})\n"
        "except SystemExit as end:  # of that script only\n"
        "    if end.code:\n"
        "        raise\n"
        "finally:\n"
        "    sys.argv[:] = [__file__]\n"
    )


def _inner(plain: Plain, source: str) -> str:
    inner = to_python(source)
    plain.imports |= inner.imports
    plain.left_out += inner.left_out
    return inner.source


def _leave_out(plain: Plain, what: str, is_nested: bool) -> str:
    plain.left_out.append(what.partition("\n")[0])
    text = "\n".join(f"# left out: {line}" for line in what.splitlines())
    return f"pass\n{text}" if is_nested else text


def _command(command: str) -> str:
    """Write a shell command as Python; IPython fills in its ``{expressions}``."""
    return f"f{command!r}" if "{" in command else repr(command)
