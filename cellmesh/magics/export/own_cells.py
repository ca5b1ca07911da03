"""Writes cells of the notebook's own process into a script: as comments, or for rank 0. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from IPython.core.inputtransformer2 import TransformerManager

from ..options import parse as parse_options
from .frame import Draft, PagePart, condition
from .history import NotebookCell
from .ipython import magic_of, to_python
from .rewriting import CannotRewriteError, awaits, comment, names_bound, names_in, parse, under

# Magics that have no trace in a script, or one of their own.
_TRACELESS = (
    "%load_ext", "%reload_ext", "%unload_ext", "%dist_start", "%dist_stop", "%dist_attach",
    "%dist_detach",
    "%dist_restart", "%dist_auto", "%dist_export", "%dist_mesh", "%dist_seed", "%dist_push",
    "%dist_reload",
    "%dist_save",
    "%dist_load", "%matplotlib",
)  # fmt: skip
# What every script has; a cell of the notebook that binds one of them would take it from rank 0.
_FRAME = {"rank", "local_rank", "world_size", "device", "mesh", "torch", "dist", "os"}


def write_comment(cell: NotebookCell) -> Iterator[PagePart]:
    """Write a cell of the notebook's own process as a comment."""
    lines = [line.strip() for line in source_of(cell).splitlines() if line.strip()]
    told = [line for line in lines if line.split()[0] not in _TRACELESS]
    if not told:
        return
    if all(line.startswith("%dist_") for line in told):
        yield PagePart((cell.count,), f" is left out: {'; '.join(told)}", "")
    else:
        yield PagePart(
            (cell.count,), " ran in the notebook's own process:", comment(source_of(cell), depth=1)
        )


def source_of(cell: NotebookCell) -> str:
    """Return a cell without its ``%%local`` line."""
    first, _, rest = cell.source.lstrip("\n").partition("\n")
    return rest if first.split()[:1] == ["%%local"] else cell.source


def write_on_rank_0(cell: NotebookCell, draft: Draft) -> Iterator[PagePart]:
    """Write a cell of the notebook's own process for rank 0; `%dist_pull` becomes a gather from
    the ranks.
    """
    problem = _find_problem(cell, draft)
    if problem:
        draft.warnings.append(f"In [{cell.count}] of the notebook is left out: {problem}")
        yield from write_comment(cell)
        return
    text = "".join(_pieces(cell, draft))
    if text:
        yield PagePart((cell.count,), ", in the notebook's own process", text)


def _find_problem(cell: NotebookCell, draft: Draft) -> str:
    """Return why a cell cannot run on rank 0; "" if it can."""
    if cell.failed:
        return "it failed"
    plain = to_python(source_of(cell)).source
    if parse(plain) is None or awaits(plain):
        return "it awaits"
    if "mesh" in names_in(plain):
        return "it uses the notebook's handle of the ranks"
    bound = names_bound(plain)
    for statement in _statements(cell):
        match _dist_magic(statement):
            case ("dist_pull", line):
                expression, target, everyone = _read_pull(line)
                if target and (everyone or target != expression):
                    bound.add(target)
    taken = sorted(bound & (_FRAME | draft.names))
    return (
        f"it binds {', '.join(f'`{name}`' for name in taken)}, which ranks use as well"
        if taken
        else ""
    )


def _statements(cell: NotebookCell) -> list[ast.stmt]:
    tree = parse(_transform(cell))
    return tree.body if tree is not None else []


def _transform(cell: NotebookCell) -> str:
    return str(TransformerManager().transform_cell(source_of(cell)))  # type: ignore[no-untyped-call]


def _dist_magic(statement: ast.stmt) -> tuple[str, str] | None:
    """Return the name and the line of cellmesh's line magic that a statement calls."""
    match magic_of(statement.value) if isinstance(statement, ast.Expr) else None:
        case ("run_line_magic", [name, line]) if name.startswith("dist_"):
            return name, line
    return None


def _pieces(cell: NotebookCell, draft: Draft) -> Iterator[str]:
    lines = _transform(cell).splitlines(keepends=True)
    begin = 0
    for statement in _statements(cell):
        magic = _dist_magic(statement)
        if magic is not None:
            yield _on_rank_0("".join(lines[begin : statement.lineno - 1]), cell.count, draft)
            begin = statement.end_lineno or statement.lineno
            if magic[0] == "dist_pull":
                yield _pull(magic[1])
    yield _on_rank_0("".join(lines[begin:]), cell.count, draft)


def _on_rank_0(source: str, count: int, draft: Draft) -> str:
    plain = to_python(source.strip("\n") + "\n")
    tree = parse(plain.source)
    if tree is None or not tree.body:
        return ""
    draft.imports.update(plain.imports)
    draft.warnings += [f"In [{count}]: a script cannot do `{what}`" for what in plain.left_out]
    try:
        return under(condition(draft, 0), plain.source)
    except CannotRewriteError as e:
        draft.warnings.append(f"In [{count}] cannot stand in a script: {e}")
        return comment(source, depth=1)


def _read_pull(line: str) -> tuple[str, str, bool]:
    """Read a `%dist_pull` line: the expression, the name that gets its value in the notebook ("" if
    none does), and whether values of several ranks are pulled.
    """
    options = parse_options("dist_pull", line)
    expression = " ".join(options["expression"])
    target = options["target"] or (expression if expression.isidentifier() else "")
    return expression, target, bool(options["all"] or options["rank"])


def _pull(line: str) -> str:
    """Write a `%dist_pull`: each rank evaluates the expression, rank 0 gets the value or values."""
    expression, target, of_others = _read_pull(line)
    options = parse_options("dist_pull", line)
    if not target or (target == expression and not of_others):
        return ""
    if not of_others:
        return f"{target} = {expression}\n"
    text = f"{target} = [None] * world_size\ndist.all_gather_object({target}, {expression})\n"
    if options["all"]:
        return f"{text}{target} = dict(enumerate({target}))\n"
    return f"{text}{target} = {target}[{options['rank']}]\n"
