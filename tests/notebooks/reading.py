"""What the code of a notebook uses of torch.

The notebooks are read, not run: the names that their code cells load are resolved through the
cells' imports. The tests execute every notebook. Code counts as run in a cell that was executed and
did not fail, outside of what catches errors and of what depends on an error that was caught.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, cached_property

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

# What every rank's namespace has from the start.
ON_RANKS = {"torch": "torch", "dist": "torch.distributed"}


class How(IntEnum):
    """How a name was used, the best last."""

    NOT_RUN = 0
    REFUSED = 1  # in a cell that fails or is there to show errors, or where an error is caught
    GPU = 2  # only where there are GPUs
    RUN = 3


@dataclass
class Uses:
    """The names that the code of one notebook uses, and how each was used at best."""

    paths: dict[str, How] = field(default_factory=dict)  # dotted, as the imports resolve them
    methods: dict[str, How] = field(default_factory=dict)  # attributes of anything else

    @cached_property
    def canonical(self) -> dict[str, How]:
        """The paths under the names that `canonical` gives them."""
        resolved: dict[str, How] = {}
        for path, how in self.paths.items():
            _keep_best(resolved, canonical(path), how)
        return resolved


class _Reader(ast.NodeVisitor):
    """Collects the names that a cell loads, resolved through the imports met so far."""

    def __init__(self, uses: Uses, names: dict[str, str], how: How, outcomes: set[str]) -> None:
        self.uses, self.names, self.how = uses, names, how
        self.outcomes = outcomes  # names that tell whether an error was caught

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

    def visit_Try(self, node: ast.Try) -> None:
        at_most = How.REFUSED if node.handlers else How.RUN
        for handler in node.handlers:
            self.outcomes |= _stored(handler)
        self._each([*node.body, *node.handlers, *node.orelse], at_most)
        self._each(node.finalbody)

    def visit_With(self, node: ast.With) -> None:
        catches = any("suppress(" in ast.unparse(item.context_expr) for item in node.items)
        self._each(node.items)
        self._each(node.body, How.REFUSED if catches else How.RUN)

    def _branches(self, test: ast.expr, body: Iterable[ast.AST], orelse: Iterable[ast.AST]) -> None:
        self.visit(test)
        names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
        if names & self.outcomes:
            self._each([*body, *orelse], How.REFUSED)
            return
        source = ast.unparse(test)
        about_gpus = "cuda" in source or "nccl" in source
        negated = "!=" in source or source.startswith("not ")
        self._each(body, How.GPU if about_gpus and not negated else How.RUN)
        self._each(orelse, How.GPU if about_gpus and negated else How.RUN)

    def _each(self, nodes: Iterable[ast.AST], at_most: How = How.RUN) -> None:
        before, self.how = self.how, min(self.how, at_most)
        for node in nodes:
            self.visit(node)
        self.how = before

    def _note(self, path: str) -> None:
        if path.startswith("torch"):
            _keep_best(self.uses.paths, path, self.how)


def _stored(node: ast.AST) -> set[str]:
    """The names that code assigns to."""
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _keep_best(uses: dict[str, How], name: str, how: How) -> None:
    uses[name] = max(how, uses.get(name, how))


def read(notebook: NotebookNode) -> Uses:
    """Return what the code of a notebook uses; comments and strings do not count."""
    uses = Uses()
    on_ranks, here = dict(ON_RANKS), dict[str, str]()
    outcomes = set[str]()
    auto = False
    lines = TransformerManager()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        magic, source = _split_magic(cell.source)
        if magic not in (None, "%%dist", "%%local"):
            continue
        ranks = magic == "%%dist" or (magic is None and auto)
        tree = ast.parse(lines.transform_cell(source))
        _Reader(uses, on_ranks if ranks else here, _how_it_went(cell), outcomes).visit(tree)
        auto = ("%dist_auto on" in source) or (auto and "%dist_auto off" not in source)
    return uses


def _how_it_went(cell: NotebookNode) -> How:
    if cell.execution_count is None:
        return How.NOT_RUN
    failed = any(output.output_type == "error" for output in cell.get("outputs", []))
    tags = cell.metadata.get("tags", [])
    shows_errors = "raises-exception" in tags or "shows-errors" in tags
    return How.REFUSED if failed or shows_errors else How.RUN


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


def origin(thing: object) -> tuple[str, str] | None:
    """The module that something was defined in, and its name there; None where it cannot tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated
        module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return (module, name) if isinstance(module, str) and isinstance(name, str) else None


@cache
def canonical(path: str) -> str:
    """Return one name for all the dotted paths by which a thing can be imported.

    It is where the thing was defined; the path itself if this torch has no such thing.
    """
    return ".".join(origin(find(path)) or (path,))
