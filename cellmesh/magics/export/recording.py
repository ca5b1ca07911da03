"""Records the cells and magics that a notebook ran on its mesh, in order, for `%dist_export`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from ...controller.arguments import CellSyntaxError, read_argv
from ...controller.mesh import Mesh
from ...controller.meshes import own_meshes
from ...controller.run import Run
from ...errors import MeshUsageError, did_you_mean
from ...wire.mesh_dims import parse_mesh
from ...wire.ranks import parse_ranks
from ..auto import read_cell
from ..options import unquote

_MAX_ITEMS, _MAX_DEPTH, _MAX_LITERAL = 100, 4, 10_000
_BEGINNINGS = ("dist_start", "dist_restart", "dist_attach")
# Magics that change the ranks in a way that a script cannot repeat.
_CHANGES = ("dist_sync", "dist_heal", "dist_debug", "dist_interrupt", "dist_load")
# Magics that do not matter for a script.
_PASSED_OVER = ("dist_stop", "dist_detach", "dist_auto", "dist_export")


@dataclass
class RankCell:
    """Record of a cell that ran on ranks.

    Attributes:
        source: source as typed, without the line of ``%%dist``.
        ranks: ranks that ran it; None for all.
        quiet: whether the value of its last expression is hidden.
        run: run of the cell until it has ended; then None.
        failed: ranks on which it failed.
        argv: arguments in `sys.argv`, after the program's name, if the cell had any.
    """

    source: str
    ranks: tuple[int, ...] | None = None
    quiet: bool = False
    run: Run[Any] | None = None
    failed: tuple[int, ...] = ()
    argv: tuple[str, ...] | None = None

    def settle(self) -> None:
        """Record the ranks on which the cell's run has failed, if the run has ended."""
        run = self.run
        if run is not None and run.done():
            self.failed = tuple(run.failed_ranks())
            self.run = None


@dataclass(frozen=True)
class PageValue:
    """Record of a value that was sent from the notebook's own process to ranks.

    Attributes:
        literal: Python literal of the value; "" if it has none.
        description: description of the value for users.
    """

    literal: str
    description: str


@dataclass(frozen=True)
class Push:
    """Record of values that the notebook pushed to ranks (None: to all)."""

    values: Mapping[str, PageValue]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reshape:
    """Record of a change of the dims of the ranks' ``mesh``."""

    dims: Mapping[str, int]


@dataclass(frozen=True)
class Seed:
    """Record of a seeding of the ranks' random generators."""

    seed: int
    per_rank: bool


@dataclass(frozen=True)
class Checkpoint:
    """Record of a save or load of named variables; with no names, of all variables of the
    checkpoint."""

    action: Literal["save", "load"]
    names: tuple[str, ...]
    path: str


@dataclass(frozen=True)
class Aside:
    """Record of a magic that the exported script leaves out, because it has no counterpart there.

    Attributes:
        line: the magic as typed.
        changes: whether it changed values on ranks.
    """

    line: str
    changes: bool = False


Entry = RankCell | Push | Reshape | Seed | Checkpoint | Aside


@dataclass
class NotebookCell:
    """Record of one cell of the notebook and of its actions on the mesh.

    Attributes:
        count: n of the cell ``In [n]``.
        source: source as typed.
        entries: actions on the mesh, in order.
        failed: whether it raised an exception.
    """

    count: int
    source: str = ""
    entries: list[Entry] = field(default_factory=list)
    failed: bool = False

    def is_on_ranks(self) -> bool:
        """Return whether the cell ran on ranks, not in the notebook."""
        return any(isinstance(entry, RankCell) for entry in self.entries)


@dataclass(frozen=True)
class Beginning:
    """Record of the start of the mesh's present ranks.

    Attributes:
        dims: dims of the DeviceMesh.
        backend: backend as given to ``init_process_group``.
        num_threads: number of torch's threads on each rank; 0 if it was not set.
        attached: whether the notebook attached to a running mesh; cells of other kernels are
            unknown.
    """

    dims: Mapping[str, int]
    backend: str
    num_threads: int
    attached: bool = False


class PageHistory:
    """Records the cells of one notebook, and the actions of each on one mesh.

    Args:
        earlier: cells that the notebook ran before the mesh began.

    Attributes:
        beginning: start of the mesh's present ranks.
        elsewhere: name of another mesh -> numbers of the cells that ran on its ranks.
    """

    def __init__(self, earlier: Iterable[NotebookCell] = ()) -> None:
        self.beginning: Beginning | None = None
        self.elsewhere: dict[str, list[int]] = {}
        self._cells = list(earlier)
        self._open: NotebookCell | None = None

    def begin(self, beginning: Beginning) -> None:
        """Drop the records of earlier ranks, as the ranks are new and have no state."""
        self.beginning = beginning
        self._cells = [cell for cell in self._cells if not cell.is_on_ranks()]
        for cell in (*self._cells, *((self._open,) if self._open else ())):
            cell.entries.clear()

    def add(self, count: int, entry: Entry) -> None:
        """Add a record of an action of the running cell on the mesh."""
        if self._open is None:
            self._open = NotebookCell(count)
        self._open.entries.append(entry)

    def page_cells(self) -> list[NotebookCell]:
        """Return records of the cells that have ended and did not run on ranks."""
        own = [cell for cell in self._cells if not cell.is_on_ranks()]
        return [NotebookCell(cell.count, cell.source, [], cell.failed) for cell in own]

    @property
    def is_on_ranks(self) -> bool:
        """Whether the running cell has run on this mesh's ranks."""
        return self._open is not None and self._open.is_on_ranks()

    def close(self, count: int, source: str, failed: bool, elsewhere: Iterable[str] = ()) -> None:
        """Record the end of the running cell, its source, whether it failed, and the other meshes
        whose ranks it ran on.
        """
        for name in elsewhere:
            self.elsewhere.setdefault(name, []).append(count)
        if self._open is None and elsewhere:
            return
        cell = self._open or NotebookCell(count)
        self._open = None
        cell.count, cell.source, cell.failed = count, source, failed
        self._cells.append(cell)

    def cells(self) -> Iterator[NotebookCell]:
        """Yield the records of all cells in order; the running cell is last, without its source."""
        yield from self._cells
        if self._open is not None:
            yield self._open


def value_of(value: Any) -> PageValue:
    """Return a record of a value, with its Python literal if it has one."""
    literal = repr(value) if _is_literal(value) else ""
    return PageValue(literal if len(literal) <= _MAX_LITERAL else "", describe(value))


def _is_literal(value: Any, depth: int = 0) -> bool:
    """Return whether the ``repr`` of a value is a short Python literal of an equal value."""
    if type(value) in (list, tuple, dict, set):
        items = [*value, *value.values()] if type(value) is dict else value
        return (
            len(value) <= _MAX_ITEMS
            and depth < _MAX_DEPTH
            and all(_is_literal(each, depth + 1) for each in items)
        )
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str, bytes, complex)


def describe(value: Any) -> str:
    """Describe a value in a few words: type, shape, and dtype or length."""
    name = type(value).__name__
    try:
        if isinstance(getattr(value, "shape", None), Sequence):
            return f"{name} of shape {tuple(value.shape)} {getattr(value, 'dtype', '')}".rstrip()
        return f"{name} of length {len(value)}" if hasattr(value, "__len__") else name
    except Exception:  # attributes of user classes may raise anything
        return name


class Recorder:
    """Records the cells and magics of one notebook in a `PageHistory` for each mesh.

    Args:
        shell: shell of the notebook.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._page = PageHistory()  # of the cells before the first mesh
        self._of: dict[str, PageHistory] = {}  # name of a mesh -> its history; the last begun last

    def choose(self, name: str | None, in_use: str) -> PageHistory:
        """Return the history of a mesh: of this name, else of the one in use, else of the last.

        Raises:
            MeshUsageError: no mesh of this name has run cells of the notebook.
        """
        if name and name not in self._of:
            near = did_you_mean(name, self._of)
            raise MeshUsageError(f"this notebook has run nothing on a mesh {name!r}{near}")
        return self._of.get(name or in_use) or next(reversed(self._of.values()), self._page)

    def _begin(self, mesh: Mesh, attached: bool) -> None:
        """Begin the history of a mesh's new ranks, and drop those of meshes that have ended."""
        last = next(reversed(self._of.values()), self._page)
        living = own_meshes()
        self._of = {name: each for name, each in self._of.items() if name in living}
        if mesh.name not in self._of:
            self._of[mesh.name] = PageHistory(last.page_cells())
        self._of[mesh.name].begin(_beginning(mesh, attached))

    def cell(
        self,
        count: int,
        source: str,
        run: Run[Any],
        quiet: bool,
        mesh: Mesh,
        argv: str | None = None,
    ) -> None:
        """Record a cell that was sent to ranks as a run."""
        entry = RankCell(source, _unless_all(run.ranks, mesh), quiet, run, argv=read_argv(argv))
        self._add(count, entry, mesh)
        run.on_end(entry.settle)

    def magic(
        self, count: int, name: str, line: str, options: dict[str, Any], mesh: Mesh | None
    ) -> None:
        """Record a line magic that has ended."""
        if mesh is not None and name in _BEGINNINGS:
            self._begin(mesh, attached=name == "dist_attach")
        elif mesh is not None and name not in _PASSED_OVER:
            entry = self._entry(name, line, options, mesh)
            if entry is not None:
                self._add(count, entry, mesh)

    def _add(self, count: int, entry: Entry, mesh: Mesh) -> None:
        if mesh.name not in self._of:  # the user's code has started it
            self._begin(mesh, attached=True)
        self._of[mesh.name].add(count, entry)

    def close_cell(self, result: ExecutionResult | None) -> None:
        """Record the end of a cell of the notebook; handles IPython's event."""
        info = result.info if result is not None else None
        if (
            result is None
            or info is None
            or not info.store_history
            or result.execution_count is None
        ):
            return  # a cell inside another, or code of a front end
        if isinstance(result.error_in_exec, CellSyntaxError):
            return  # no rank has run anything
        if _asks_for_help(info.raw_cell or ""):
            return
        on_ranks = [name for name, history in self._of.items() if history.is_on_ranks]
        for own, history in self._of.items() or [("", self._page)]:
            history.close(
                result.execution_count,
                info.raw_cell or "",
                not result.success,
                [name for name in on_ranks if name != own],
            )

    def _entry(self, name: str, line: str, options: dict[str, Any], mesh: Mesh) -> Entry | None:
        match name:
            case "dist_push":
                namespace = self._shell.user_ns
                values = {each: value_of(namespace[each]) for each in options["names"]}
                ranks = parse_ranks(options["ranks"], len(mesh)) if options["ranks"] else mesh.ranks
                return Push(values, _unless_all(tuple(ranks), mesh))
            case "dist_mesh":
                return Reshape(parse_mesh(" ".join(options["dims"]))) if options["dims"] else None
            case "dist_seed":
                return Seed(options["seed"], options["per_rank"])
            case "dist_save":
                *names, path = options["names"]
                return Checkpoint("save", tuple(names), unquote(path))
            case "dist_load" if options["ranks"] is None:
                *names, path = options["names"]
                return Checkpoint("load", tuple(names), unquote(path))
        return Aside(f"%{name} {line}".strip(), name in _CHANGES)


def _asks_for_help(source: str) -> bool:
    """Return whether a cell only requests help: ``x?``, ``?x``, ``%magic?``."""
    cell = read_cell(source, is_auto=False)
    lines = [line.strip() for line in (cell.source if cell is not None else source).splitlines()]
    told = [line for line in lines if line and not line.startswith("#")]
    return len(told) == 1 and (told[0].startswith("?") or told[0].endswith("?"))


def _unless_all(ranks: tuple[int, ...], mesh: Mesh) -> tuple[int, ...] | None:
    return None if set(ranks) == set(mesh.ranks) else ranks


def _beginning(mesh: Mesh, attached: bool) -> Beginning:
    backends = sorted({info.backend for info in mesh.ready_ranks or mesh.report() if info.backend})
    told = os.environ.get("OMP_NUM_THREADS", "")  # as `workers.linux_process.num_threads_for`
    default = 1 if len(mesh) > 1 else 0
    num_threads = int(told) if told.isdecimal() else default
    return Beginning(mesh.dims, backends[0] if backends else "gloo", num_threads, attached)
