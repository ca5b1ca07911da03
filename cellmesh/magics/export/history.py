"""Records what a notebook ran on its mesh, in order, for `%dist_export`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

_MAX_ITEMS = 100
_MAX_LITERAL = 10_000


class Outcome(Protocol):
    """Protocol of what the history needs of a run: whether it ended, and which ranks failed
    (`controller.run.Run` has it).
    """

    def done(self) -> bool: ...

    def failed_ranks(self) -> list[int]: ...


@dataclass
class RankCell:
    """Record of a cell that ran on ranks.

    Attributes:
        source: as typed, without the line of ``%%dist``.
        ranks: who ran it, None for all.
        quiet: its last expression is not shown.
        run: how it ends; dropped when it has.
        failed: the ranks on which it failed.
        argv: what `sys.argv` had behind the program's name, if the cell was given that.
    """

    source: str
    ranks: tuple[int, ...] | None = None
    quiet: bool = False
    run: Outcome | None = None
    failed: tuple[int, ...] = ()
    argv: tuple[str, ...] | None = None

    def settle(self) -> None:
        """Note how the cell's run has ended, if it has."""
        run = self.run
        if run is not None and run.done():
            self.failed = tuple(run.failed_ranks())
            self.run = None


@dataclass(frozen=True)
class PageValue:
    """Record of a value of the notebook's own process that was sent to ranks.

    Attributes:
        literal: Python that makes it, "" where there is none.
        description: what it is, for people.
        is_temporary: it is a path among temporary files.
    """

    literal: str
    description: str
    is_temporary: bool = False


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
class Held:
    """Record of what kind of object a name was bound to when it was saved or loaded.

    Attributes:
        name: of the ranks.
        kind: what.
        model: an optimizer's, by name.
        by_rank: each rank has its own of it.
    """

    name: str
    kind: Literal["model", "optimizer", "stateful", "tensor", "value"]
    model: str = ""
    by_rank: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """Record of a save or load of variables."""

    action: Literal["save", "load"]
    items: tuple[Held, ...]
    path: str


@dataclass(frozen=True)
class Aside:
    """Record of a magic that the exported script leaves out, because it has no counterpart there.

    Attributes:
        line: as typed.
        changes: whether it changed what ranks hold.
    """

    line: str
    changes: bool = False


Entry = RankCell | Push | Reshape | Seed | Checkpoint | Aside


@dataclass
class NotebookCell:
    """Record of one cell of the notebook, and of what it did on the mesh.

    Attributes:
        count: its ``In [n]``.
        source: as typed.
        entries: what it did with the mesh, in order.
        failed: whether it raised.
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
    """Record of how the mesh's present ranks were started.

    Attributes:
        dims: of the DeviceMesh.
        backend: as given to ``init_process_group``.
        num_threads: torch's, on each rank; 0 if it was not set.
        attached: the mesh was found; what other kernels ran on it is not known.
    """

    dims: Mapping[str, int]
    backend: str
    num_threads: int
    attached: bool = False


class PageHistory:
    """Records the cells of one notebook, and what each did on the mesh."""

    def __init__(self) -> None:
        self.beginning: Beginning | None = None
        self._cells: list[NotebookCell] = []
        self._open: NotebookCell | None = None

    def begin(self, beginning: Beginning) -> None:
        """Drop what earlier ranks ran, as the ranks are new and hold nothing of it."""
        self.beginning = beginning
        self._cells = [cell for cell in self._cells if not cell.is_on_ranks()]
        for cell in (*self._cells, *((self._open,) if self._open else ())):
            cell.entries.clear()

    def add(self, count: int, entry: Entry) -> None:
        """Add a record of what the running cell did on the mesh."""
        if self._open is None:
            self._open = NotebookCell(count)
        self._open.entries.append(entry)

    def close(self, count: int, source: str, failed: bool) -> None:
        """Note that the running cell has ended, its source, and whether it failed."""
        cell = self._open or NotebookCell(count)
        self._open = None
        cell.count, cell.source, cell.failed = count, source, failed
        self._cells.append(cell)

    def cells(self) -> Iterator[NotebookCell]:
        """Yield all cells' records in order; the running one is the last, without its source."""
        yield from self._cells
        if self._open is not None:
            yield self._open


def value_of(value: Any) -> PageValue:
    """Return a record of a value: its Python literal, or else a description."""
    try:
        literal = _literal(value, depth=0)
    except ValueError:
        literal = ""
    is_temporary = isinstance(value, str) and value.startswith(f"{tempfile.gettempdir()}/")
    return PageValue(literal if len(literal) <= _MAX_LITERAL else "", describe(value), is_temporary)


def _literal(value: Any, depth: int) -> str:
    kind = type(value)
    if kind is str:
        return quote(value)
    if value is None or kind in (bool, int, bytes, complex):
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f'float("{value!r}")'
    if kind not in (list, tuple, dict, set) or len(value) > _MAX_ITEMS or depth > 4:
        raise ValueError("no literal")
    if kind is dict:
        pairs = [
            f"{_literal(key, depth + 1)}: {_literal(item, depth + 1)}"
            for key, item in value.items()
        ]
        return f"{{{', '.join(pairs)}}}"
    items = [_literal(item, depth + 1) for item in value]
    if kind is tuple:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if kind is set:
        return f"{{{', '.join(sorted(items))}}}" if items else "set()"
    return f"[{', '.join(items)}]"


def quote(text: str) -> str:
    """Write text as a Python literal, in double quotes if it contains none."""
    literal = repr(text)
    return literal if '"' in literal else f'"{literal[1:-1]}"'


def describe(value: Any) -> str:
    """Describe a value in a few words: type, shape, and dtype or length."""
    words = [type(value).__name__]
    try:
        return " ".join([*words, *_size(value)])
    except Exception:  # what it has to say of itself is not to be relied on
        return words[0]


def _size(value: Any) -> list[str]:
    words: list[str] = []
    shape = getattr(value, "shape", None)
    if isinstance(shape, Sequence):
        words.append(f"of shape {tuple(shape)}")
        if getattr(value, "dtype", None) is not None:
            words.append(str(value.dtype))
    elif hasattr(value, "__len__"):
        words.append(f"of length {len(value)}")
    return words
