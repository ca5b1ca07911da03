"""``%dist_export``: writes what a notebook ran on its mesh as one script for torchrun. Pure.

A script does what the ranks did, in the same order and with the same numbers: `device`, `mesh`,
process group and threads are made as `workers/rank/main.py` makes them.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import MeshUsageError
from ...wire.ranks import describe_ranks
from .entries import describe_dims, write_checkpoint, write_push, write_seed
from .frame import Draft, PagePart, condition, make_mesh, write_head, write_tail
from .history import (
    Aside,
    Checkpoint,
    Entry,
    NotebookCell,
    PageHistory,
    Push,
    RankCell,
    Reshape,
    Seed,
)
from .ipython import to_python
from .own_cells import write_comment, write_on_rank_0
from .process_groups import find_group_use
from .rewriting import (
    IMPORT,
    INDENT,
    CannotRewriteError,
    as_coroutine,
    awaits,
    comment,
    free_name,
    guard,
    names_bound,
    names_in,
    parse,
    show_last,
    split_future,
    under,
    without_cellmesh,
    without_globals,
    without_margin,
)

_EXITS = ("exit", "quit", "SystemExit", "click", "typer", "unittest")


@dataclass(frozen=True)
class Script:
    """The text of an exported script, and remarks on it for the user.

    Attributes:
        text: the script.
        num_cells: how many cells ranks ran, and are in it.
        left_out: the counts of cells that are not.
        warnings: what it cannot do, or must be given.
    """

    text: str
    num_cells: int
    left_out: tuple[int, ...]
    warnings: tuple[str, ...]


def export(history: PageHistory, path: Path, with_locals: bool, overwrite: bool) -> str:
    """Write the script for torchrun into a file.

    Args:
        history: of the notebook.
        path: where.
        with_locals: run the notebook's own cells on rank 0.
        overwrite: whether the file may be there.

    Returns:
        What was written, and what it cannot do.

    Raises:
        MeshUsageError: nothing has run on ranks, or the file is there.
    """
    if history.beginning is None:
        raise MeshUsageError(
            "there is nothing to export: `%dist_start 4` starts a mesh, %%dist runs a cell on it"
        )
    if path.exists() and not overwrite:
        raise MeshUsageError(f"{path} exists: `%dist_export {path} --force` overwrites it")
    script = write_script(history, path.name, with_locals=with_locals)
    try:
        compile(script.text, path.name, "exec", dont_inherit=True)
    except SyntaxError as e:
        line = script.text.splitlines()[(e.lineno or 1) - 1].strip()
        raise MeshUsageError(
            f"{path} was not written, as it would be no Python: {e.msg}, at `{line}`; change or "
            "leave out the cell with this line, %dist_restart, run the cells again, and export "
            "them"
        ) from None
    path.write_text(script.text, encoding="utf-8")
    num_ranks = math.prod(history.beginning.dims.values())
    cells = "1 cell" if script.num_cells == 1 else f"{script.num_cells} cells"
    left = ", ".join(f"In [{count}]" for count in script.left_out)
    left = f", {len(script.left_out)} left out ({left})" if left else ""
    lines = [f"{path}: {cells}{left}; run it with `torchrun --nproc-per-node {num_ranks} {path}`"]
    if history.beginning.attached:
        lines.append(
            "only cells of this notebook are in it: what others ran on this mesh is not known here"
        )
    return "\n".join([*lines, *(f"- {warning}" for warning in script.warnings)])


def write_script(history: PageHistory, filename: str, *, with_locals: bool = False) -> Script:
    """Return the script for torchrun as text, with remarks.

    Args:
        history: of a notebook that has, or had, a mesh.
        filename: the script's, for its docstring.
        with_locals: run the notebook's own cells on rank 0.
    """
    beginning = history.beginning
    assert beginning is not None
    cells = list(history.cells())
    sources = [
        without_globals(to_python(entry.source).source)
        for cell in cells
        for entry in cell.entries
        if isinstance(entry, RankCell)
    ]
    bound = set().union(*map(names_bound, sources))
    exits = _names_that_exit(sources)
    draft = Draft(set().union(*map(names_in, sources)), bound, find_group_use(sources))
    if "display" in draft.names - bound:
        draft.imports.add("from IPython.display import display")
    uses_numpy = any("numpy" in source for source in sources)
    parts = _fold(_write_cells(cells, draft, exits, with_locals, uses_numpy), draft)
    body = [part.render() for part in parts]
    text = "\n".join([write_head(beginning, filename, draft), *body, write_tail(draft)])
    return Script(text, draft.num_cells, tuple(draft.left_out), tuple(draft.warnings))


def _write_cells(
    cells: Iterable[NotebookCell],
    draft: Draft,
    exits: set[str],
    with_locals: bool,
    uses_numpy: bool,
) -> Iterator[PagePart]:
    for cell in cells:
        if not cell.is_on_ranks() and not with_locals:
            yield from write_comment(cell)
        for entry in cell.entries:
            for part in _write(cell.count, entry, draft, exits, uses_numpy):
                guarded = draft.groups.spawns and not isinstance(entry, RankCell)
                yield dataclasses.replace(part, text=guard(part.text)) if guarded else part
            if isinstance(entry, Aside) and entry.changes:
                draft.warnings.append(
                    f"In [{cell.count}]: a script has nothing like `{entry.line}`"
                )
        if not cell.is_on_ranks() and with_locals:
            yield from write_on_rank_0(cell, draft)


def _names_that_exit(sources: Iterable[str]) -> set[str]:
    """Return the names by which a cell may call `sys.exit`: Python's, those of libraries, and
    functions of cells that use such names.
    """
    names = set(_EXITS)
    for source in sources:
        tree = parse(source)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.FunctionDef) and _words_in(ast.unparse(node)) & names:
                names.add(node.name)
    return names


def _words_in(source: str) -> set[str]:
    return set(re.findall(r"[^\W\d]\w*", source))


def _write(
    count: int, entry: Entry, draft: Draft, exits: set[str], uses_numpy: bool
) -> Iterator[PagePart]:
    match entry:
        case RankCell():
            yield _rank_cell(count, entry, draft, exits)
        case Push():
            yield write_push(count, entry, draft)
        case Reshape(dims):
            yield PagePart(
                (count,),
                f": %dist_mesh {describe_dims(dims)}",
                f"mesh = {make_mesh(dims, draft)}\n",
            )
        case Seed():
            yield write_seed(count, entry, uses_numpy, draft)
        case Checkpoint():
            yield write_checkpoint(count, entry, draft)


def _rank_cell(count: int, entry: RankCell, draft: Draft, exits: set[str]) -> PagePart:
    entry.settle()
    where = f" on {describe_ranks(entry.ranks)}" if entry.ranks is not None else ""
    if entry.run is not None:
        return _left_out(count, f"{where} has not ended and is left out:", entry.source, draft)
    if entry.failed:
        ranks = describe_ranks(entry.failed)
        return _left_out(count, f"{where} failed on {ranks} and is left out:", entry.source, draft)
    plain = to_python(entry.source)
    source = without_globals(without_cellmesh(plain.source))
    if "SimpleNamespace(" in source and "SimpleNamespace(" not in plain.source:
        draft.imports.add(IMPORT)
    try:
        text = _body(source, count, entry, draft, exits)
    except CannotRewriteError as e:
        draft.warnings.append(f"In [{count}] cannot stand in a script: {e}")
        return _left_out(count, f"{where} is left out, as {e}:", entry.source, draft)
    draft.imports.update(plain.imports)
    draft.warnings += [f"In [{count}]: a script cannot do `{what}`" for what in plain.left_out]
    if "get_ipython" in names_in(plain.source):
        draft.warnings.append(f"In [{count}] calls get_ipython(), which a script has not")
    draft.num_cells += 1
    if entry.argv is not None:
        draft.imports.add("import sys")
        text = f"sys.argv[1:] = {list(entry.argv)!r}\n{text.rstrip()}\nsys.argv[1:] = []\n"
    return PagePart((count,), where, text, can_repeat=True)


def _body(source: str, count: int, entry: RankCell, draft: Draft, exits: set[str]) -> str:
    features, text = split_future(without_margin(source))
    draft.futures += features
    if not entry.quiet:
        shown = show_last(text, draft.show)
        draft.shows |= shown != text
        text = shown
    definition = ""
    if awaits(text):
        name = free_name(f"cell_{count}", draft.names)
        definition = f"{as_coroutine(text, name)}\n\n"
        draft.awaits = True
        text = f"{draft.loop}.run_until_complete({name}())\n"
    may_exit = bool(_words_in(source) & exits) and guard(text) != text
    text = guard(text) if draft.groups.spawns else text
    if may_exit:
        ends = "except SystemExit as end:  # of this cell only"
        text = f"{under('try', text)}{ends}\n{INDENT}if end.code:\n{INDENT * 2}raise\n"
    text = definition + text
    return text if entry.ranks is None else under(condition(draft, *entry.ranks), text)


def _left_out(count: int, why: str, source: str, draft: Draft) -> PagePart:
    draft.left_out.append(count)
    return PagePart((count,), why, comment(source, depth=1))


def _fold(parts: Iterable[PagePart], draft: Draft) -> Iterator[PagePart]:
    """Write cells that were run several times in the same order as one loop."""
    for (text, title, can_repeat), alike in itertools.groupby(
        parts, lambda part: (part.text, part.title, part.can_repeat)
    ):
        first, *others = alike
        try:
            if not others or not can_repeat:
                raise CannotRewriteError("it is run once")
            counter = free_name("_", draft.names)
            text = under(f"for {counter} in range({1 + len(others)})", text)
        except CannotRewriteError:
            yield from (first, *others)
        else:
            counts = tuple(count for part in (first, *others) for count in part.counts)
            yield dataclasses.replace(first, counts=counts, title=title, text=text)
