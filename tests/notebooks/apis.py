"""Writes docs/apis.md: which notebook shows which API of PyTorch Distributed, and what was run on what.

The notebooks are read, not run: the names that their code cells load are resolved through the cells' imports,
and a cell counts as run when it has an execution count. ``python -m tests.notebooks.apis --write`` writes the
page; without ``--write`` it only says whether the page is up to date.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from tests.notebooks.catalogue import OVERVIEW_DATE, OVERVIEW_URL, SECTIONS, Api, Section

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "apis.md"
# What every rank's namespace has from the start.
ON_RANKS = {"torch": "torch", "dist": "torch.distributed"}


class How(IntEnum):
    """How a name was used, the best last."""

    NOT_RUN = 0
    FAILS = 1  # in a cell that is there to show errors
    GPU = 2  # only where there are GPUs
    RUN = 3


@dataclass
class Uses:
    """What the code of one notebook uses.

    Attributes:
        paths: dotted names, as the imports resolve them, and how each was used at best.
        methods: names of attributes of anything else.
    """

    paths: dict[str, How] = field(default_factory=dict)
    methods: dict[str, How] = field(default_factory=dict)

    @cached_property
    def canonical(self) -> dict[str, How]:
        """The paths under the names that `canonical` gives them."""
        resolved: dict[str, How] = {}
        for path, how in self.paths.items():
            _keep_best(resolved, canonical(path), how)
        return resolved


class _Reader(ast.NodeVisitor):
    """Collects the names that a cell loads, resolved through the imports met so far."""

    def __init__(self, uses: Uses, names: dict[str, str], how: How) -> None:
        self.uses, self.names, self.how = uses, names, how

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.names[name] = alias.name if alias.asname else name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self.names:
            self._note(self.names[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            chain.append(root.attr)
            root = root.value
        if isinstance(root, ast.Name) and root.id in self.names:
            path = self.names[root.id]
            self._note(path)
            for attribute in reversed(chain):
                path = f"{path}.{attribute}"
                self._note(path)
            return
        _keep_best(self.uses.methods, node.attr, self.how)
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._branches(node.test, node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branches(node.test, [node.body], [node.orelse])

    def _branches(self, test: ast.expr, body: Iterable[ast.AST], orelse: Iterable[ast.AST]) -> None:
        self.visit(test)
        source = ast.unparse(test)
        about_gpus = "cuda" in source or "nccl" in source
        negated = "!=" in source or source.startswith("not ")
        self._each(body, gpu=about_gpus and not negated)
        self._each(orelse, gpu=about_gpus and negated)

    def _each(self, nodes: Iterable[ast.AST], *, gpu: bool) -> None:
        before, self.how = self.how, min(self.how, How.GPU) if gpu else self.how
        for node in nodes:
            self.visit(node)
        self.how = before

    def _note(self, path: str) -> None:
        if path.startswith("torch"):
            _keep_best(self.uses.paths, path, self.how)


def _keep_best(uses: dict[str, How], name: str, how: How) -> None:
    uses[name] = max(how, uses.get(name, how))


def read(notebook: NotebookNode) -> Uses:
    """What a notebook's code uses.

    Args:
        notebook: in nbformat 4.

    Returns:
        The names; prose, comments and strings do not count.

    Raises:
        SyntaxError: a cell does not parse.
    """
    uses = Uses()
    on_ranks, here = dict(ON_RANKS), dict[str, str]()
    auto = False
    lines = TransformerManager()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        magic, source = _split_magic(cell.source)
        if magic not in (None, "%%dist", "%%local"):
            continue
        ranks = magic == "%%dist" or (magic is None and auto)
        tags = cell.metadata.get("tags", [])
        shows_errors = "raises-exception" in tags or "shows-errors" in tags
        how = How.NOT_RUN if cell.execution_count is None else How.FAILS if shows_errors else How.RUN
        tree = ast.parse(lines.transform_cell(source))
        _Reader(uses, on_ranks if ranks else here, how).visit(tree)
        auto = ("%dist_auto on" in source) or (auto and "%dist_auto off" not in source)
    return uses


def _split_magic(source: str) -> tuple[str | None, str]:
    first, _, rest = source.partition("\n")
    return (first.split()[0], rest) if first.startswith("%%") else (None, source)


def find(path: str) -> object:
    """What a dotted path names in the installed torch; None where it has no such thing."""
    parts = path.split(".")
    thing: object = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for position, part in enumerate(parts):
            if hasattr(thing, part):
                thing = getattr(thing, part)
                continue
            try:
                thing = importlib.import_module(".".join(parts[: position + 1]))
            except ImportError:
                return None
    return thing


@cache
def canonical(path: str) -> str:
    """One name for all the paths by which a thing can be imported.

    Args:
        path: dotted, from a module on.

    Returns:
        Where the thing was defined; the path itself where it cannot tell, or this torch has no such thing.
    """
    thing = find(path)
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else path


def where(api: Api, section: Section, notebooks: Mapping[str, Uses]) -> dict[str, How]:
    """Which notebooks use an API.

    Args:
        api: a method counts by its name, in a notebook that uses something else of its section.
        section: of the API.
        notebooks: by name.

    Returns:
        Notebook -> how, only those that use it.
    """
    wanted = canonical(api.path)
    family = {canonical(other.path) for other in section.apis if not other.is_method}
    found = {}
    for name, uses in notebooks.items():
        how = uses.canonical.get(wanted)
        if how is None and api.is_method and not family.isdisjoint(uses.canonical):
            how = uses.methods.get(api.path.rpartition(".")[2])
        if how is not None:
            found[name] = how
    return found


def load(directory: Path = ROOT / "notebooks") -> dict[str, Uses]:
    """What each notebook of a directory uses, in the order of their names."""
    paths = sorted(directory.glob("*.ipynb"))
    return {path.name: read(nbformat.read(path, as_version=4)) for path in paths}


def without_notebook(notebooks: Mapping[str, Uses]) -> list[str]:
    """The APIs that no notebook shows, and of which the catalogue does not say why."""
    return [
        api.path
        for section in SECTIONS
        for api in section.apis
        if not api.reason and not where(api, section, notebooks)
    ]


def render(notebooks: Mapping[str, Uses]) -> str:
    """The page, as Markdown."""
    return "\n".join(_lines(notebooks))


def _lines(notebooks: Mapping[str, Uses]) -> Iterator[str]:
    yield "# PyTorch Distributed, API by API"
    yield ""
    yield "<!-- Written by `python -m tests.notebooks.apis --write`; a test compares. -->"
    yield ""
    yield (
        f"The APIs of the [Distributed Overview]({OVERVIEW_URL}), as last updated on {OVERVIEW_DATE}, of "
        "the pages that it links to, and of the tutorials beside it, with the notebooks whose code uses them."
    )
    yield ""
    yield "- **CPU, gloo**: *run* means that the tests run it, on 2 to 8 ranks of one machine."
    yield "- **GPU, NCCL**: the notebooks are written for GPUs too; we have not run them on GPUs so far."
    yield ""
    yield (
        "What a cell uses is read from its code, through its imports; a method counts by its name, in a "
        "notebook that uses something else of its section."
    )
    found = {api: where(api, section, notebooks) for section in SECTIONS for api in section.apis}
    best = {api: max(uses.values(), default=None) for api, uses in found.items()}
    num_shown = sum(how is not None for how in best.values())
    num_run = sum(how is How.RUN for how in best.values())
    yield ""
    yield f"{len(found)} APIs; {num_shown} are in notebooks, {num_run} of them run on CPU."
    for section in SECTIONS:
        yield ""
        yield f"## {section.title}"
        yield ""
        yield f"[Reference]({section.url}){'. ' + section.remark if section.remark else ''}"
        yield ""
        yield "| API | notebooks | CPU, gloo | GPU, NCCL |"
        yield "|---|---|---|---|"
        for api in section.apis:
            shown_in = ", ".join(f"[{name[:2]}]" for name in found[api]) or api.reason or "?"
            yield f"| `{api.shown}` | {shown_in} | {_on_cpu(best[api])} | {_on_gpu(best[api])} |"
    yield ""
    for name in notebooks:
        yield f"[{name[:2]}]: ../notebooks/{name}"
    yield ""


def _on_cpu(best: How | None) -> str:
    if best is How.RUN:
        return "run"
    if best is How.FAILS:
        return "tried: fails, as shown"
    if best is How.GPU:
        return "needs a GPU"
    return "not run" if best is not None else "–"


def _on_gpu(best: How | None) -> str:
    return "–" if best is None else "not run"


def main(arguments: list[str] | None = None) -> int:
    """Compare the page with the notebooks, or write it.

    Args:
        arguments: of the command line.

    Returns:
        Exit code: 1 if the page is out of date or an API has neither notebook nor reason.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.notebooks.apis", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/apis.md")
    options = parser.parse_args(arguments)
    notebooks = load()
    text = render(notebooks)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    missing = without_notebook(notebooks)
    for path in missing:
        print(
            f"{path}: no notebook uses it, and tests/notebooks/catalogue.py gives no reason", file=sys.stderr
        )
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if stale:
        print("docs/apis.md is out of date: python -m tests.notebooks.apis --write", file=sys.stderr)
    return int(stale or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
