"""``%dist_export``: what a notebook ran on its mesh, as one script for torchrun. Pure.

A script does what the ranks did, in the same order and with the same numbers: `device`, `mesh`, process
group and threads are made as `workers/rank.py` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import MeshUsageError
from ..wire.ranks import describe_ranks
from .history import Aside, Beginning, Entry, History, NotebookCell, Push, RankCell, Reshape, Seed, Value
from .script import (
    CannotRewriteError,
    as_coroutine,
    awaits,
    comment,
    free_name,
    names_in,
    only_on,
    show_last,
    split_future,
    without_margin,
)
from .script_ipython import to_python

# Magics that have no trace in a script.
_SILENT = (
    "%load_ext", "%reload_ext", "%dist_start", "%dist_stop", "%dist_attach", "%dist_detach", "%dist_restart",
    "%dist_auto", "%dist_export", "%dist_mesh", "%dist_seed",
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """A script, and what to say of it.

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


def export(history: History, path: Path, with_locals: bool, overwrite: bool) -> str:
    """Write the script into a file.

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
    path.write_text(script.text, encoding="utf-8")
    num_ranks = math.prod(history.beginning.dims.values())
    cells = "1 cell" if script.num_cells == 1 else f"{script.num_cells} cells"
    left = ", ".join(f"In [{count}]" for count in script.left_out)
    left = f", {len(script.left_out)} left out ({left})" if left else ""
    lines = [f"{path}: {cells}{left}; run it with `torchrun --nproc-per-node {num_ranks} {path}`"]
    if history.beginning.attached:
        lines.append("only cells of this notebook are in it: what others ran on this mesh is not known here")
    return "\n".join([*lines, *(f"- {warning}" for warning in script.warnings)])


@dataclass
class _Draft:
    """What comes up while cells are written, and stands elsewhere in the script."""

    names: set[str]
    with_locals: bool
    modules: set[str] = field(default_factory=lambda: {"os"})
    futures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    num_cells: int = 0
    shows: bool = False
    awaits: bool = False
    has_numpy: bool = False


def write_script(history: History, filename: str, *, with_locals: bool = False) -> Script:
    """Write the script.

    Args:
        history: of a notebook that has, or had, a mesh.
        filename: the script's, for its docstring.
        with_locals: run the notebook's own cells on rank 0.
    """
    beginning = history.beginning
    assert beginning is not None
    cells = list(history.cells())
    sources = [
        to_python(entry.source).source
        for cell in cells
        for entry in cell.entries
        if isinstance(entry, RankCell)
    ]
    names = set().union(*map(names_in, sources)) if sources else set()
    draft = _Draft(names, with_locals, has_numpy=any("numpy" in source for source in sources))
    show, loop = free_name("show", names), free_name("loop", names)
    body = _fold(list(_write_cells(cells, draft, show, loop)))
    head = _head(beginning, filename, draft, show, loop)
    text = "\n".join([head, *body, _tail(draft, loop)])
    return Script(text, draft.num_cells, tuple(draft.left_out), tuple(draft.warnings))


# ---- before and after the cells


def _head(beginning: Beginning, filename: str, draft: _Draft, show: str, loop: str) -> str:
    num_ranks = math.prod(beginning.dims.values())
    modules = sorted(draft.modules | ({"asyncio"} if draft.awaits else set()))
    others = "".join("# Only cells that ran in this notebook are here.\n" if beginning.attached else "")
    parts = [
        f'"""{Path(filename).stem}: the cells that a notebook ran on {num_ranks} ranks, in their order.\n\n'
        f'    torchrun --nproc-per-node {num_ranks} {filename}\n"""\n\n',
        "".join(f"from __future__ import {name}\n" for name in dict.fromkeys(draft.futures)),
        "\n" if draft.futures else "",
        "".join(f"import {module}\n" for module in modules),
        "\nimport torch\nimport torch.distributed as dist\n",
        "from IPython.display import display\n" if "display" in draft.names else "",
        "from torch.distributed.device_mesh import init_device_mesh\n\n",
        others,
        f"torch.set_num_threads({beginning.num_threads})\n" if beginning.num_threads else "",
        'rank = int(os.environ["RANK"])\n'
        'local_rank = int(os.environ["LOCAL_RANK"])\n'
        'world_size = int(os.environ["WORLD_SIZE"])\n',
        _device(beginning.backend),
        f"mesh = {_mesh(beginning.dims)}\n",
        f"{loop} = asyncio.new_event_loop()\n" if draft.awaits else "",
        _SHOW.format(show=show) if draft.shows else "",
    ]
    return "".join(parts)


_SHOW = '''

def {show}(value: object) -> None:
    """Print the value of a cell's last expression, as a notebook shows it."""
    if value is not None:
        print(f"[{{rank}}] {{value!r}}")

'''


def _device(backend: str) -> str:
    if backend == "gloo":  # there was no GPU
        backend = "cpu:gloo,cuda:nccl"
    spread = "local_rank" if "nccl" in backend else "local_rank % torch.cuda.device_count()"
    return (
        "if torch.cuda.is_available():\n"
        f'    device = torch.device("cuda", {spread})\n'
        "    torch.cuda.set_device(device)\n"
        f'    dist.init_process_group("{backend}")\n'
        "else:\n"
        '    device = torch.device("cpu")\n'
        '    dist.init_process_group("gloo")\n'
    )


def _mesh(dims: Mapping[str, int]) -> str:
    sizes = ", ".join(map(str, dims.values())) + ("," if len(dims) == 1 else "")
    if len(dims) == 1:
        sizes = "world_size,"
    names = ", ".join(f'"{name}"' for name in dims) + ("," if len(dims) == 1 else "")
    return f"init_device_mesh(device.type, ({sizes}), mesh_dim_names=({names}))"


def _tail(draft: _Draft, loop: str) -> str:
    close = f"{loop}.close()\n" if draft.awaits else ""
    return f"{close}dist.destroy_process_group()\n"


# ---- the cells


@dataclass(frozen=True)
class _Part:
    """What one entry of a cell becomes."""

    count: int
    title: str
    text: str

    def render(self) -> str:
        head = f"# In [{self.count}]{self.title}\n"
        return head + self.text


def _write_cells(cells: Iterable[NotebookCell], draft: _Draft, show: str, loop: str) -> Iterator[_Part]:
    for cell in cells:
        if not cell.is_on_ranks() and cell.source:
            yield from _local(cell, draft)
        for entry in cell.entries:
            yield from _write(cell, entry, draft, show, loop)


def _write(cell: NotebookCell, entry: Entry, draft: _Draft, show: str, loop: str) -> Iterator[_Part]:
    match entry:
        case RankCell():
            yield _rank_cell(cell.count, entry, draft, show, loop)
        case Push(values, ranks):
            yield _push(cell.count, values, ranks, draft)
        case Reshape(dims):
            yield _Part(cell.count, f": %dist_mesh {_dims(dims)}", f"mesh = {_mesh(dims)}\n")
        case Seed(seed, per_rank):
            yield _seed(cell.count, seed, per_rank, draft)
        case Aside(line, changes):
            if changes:
                draft.warnings.append(f"In [{cell.count}]: a script has nothing like `{line}`")
                yield _Part(cell.count, f" left out: {line}", "")


def _rank_cell(count: int, entry: RankCell, draft: _Draft, show: str, loop: str) -> _Part:
    entry.settle()
    where = f" on {describe_ranks(entry.ranks)}" if entry.ranks is not None else ""
    if entry.run is not None:
        return _left_out(count, f"{where} has not ended and is left out:", entry.source, draft)
    if entry.failed:
        return _left_out(
            count, f"{where} failed on {describe_ranks(entry.failed)} and is left out:", entry.source, draft
        )
    plain = to_python(entry.source)
    try:
        text = _body(plain.source, count, entry, draft, show, loop)
    except CannotRewriteError as e:
        draft.warnings.append(f"In [{count}] cannot stand in a script: {e}")
        return _left_out(count, f"{where} is left out, as {e}:", entry.source, draft)
    draft.modules |= plain.modules
    draft.warnings += [f"In [{count}]: a script cannot do `{what}`" for what in plain.left_out]
    draft.num_cells += 1
    return _Part(count, where, text)


def _body(source: str, count: int, entry: RankCell, draft: _Draft, show: str, loop: str) -> str:
    features, text = split_future(without_margin(source))
    draft.futures += features
    if not entry.quiet:
        shown = show_last(text, show)
        draft.shows |= shown != text
        text = shown
    if awaits(text):
        name = free_name(f"cell_{count}", draft.names)
        definition = as_coroutine(text, name)
        draft.awaits = True
        text = f"{loop}.run_until_complete({name}())\n"
        if entry.ranks is not None:
            text = only_on(_condition(entry.ranks), text)
        return f"{definition}\n\n{text}"
    return text if entry.ranks is None else only_on(_condition(entry.ranks), text)


def _condition(ranks: tuple[int, ...]) -> str:
    return f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in ({', '.join(map(str, ranks))})"


def _left_out(count: int, why: str, source: str, draft: _Draft) -> _Part:
    draft.left_out.append(count)
    return _Part(count, why, comment(source, depth=1))


def _push(count: int, values: Mapping[str, Value], ranks: tuple[int, ...] | None, draft: _Draft) -> _Part:
    lines, missing = [], []
    for name, value in values.items():
        if value.literal:
            lines.append(f"{name} = {value.literal}\n")
        else:
            missing.append(f"# {name} = ...  # supply it: {value.description}\n")
            draft.warnings.append(
                f"In [{count}] pushed `{name}`, a {value.description}: the script must be given it"
            )
    text = "".join(lines)
    if text and ranks is not None:
        text = only_on(_condition(ranks), text)
    return _Part(count, ": %dist_push", "".join(missing) + text)


def _seed(count: int, seed: int, per_rank: bool, draft: _Draft) -> _Part:
    value = f"{seed} + rank" if per_rank else str(seed)
    draft.modules.add("random")
    lines = [f"random.seed({value})\n"]
    if draft.has_numpy:
        draft.modules.add("numpy")
        lines.append(f"numpy.random.seed({value})\n")
    lines.append(f"torch.manual_seed({value})\n")
    return _Part(count, f": %dist_seed {seed}{' --per-rank' if per_rank else ''}", "".join(lines))


def _local(cell: NotebookCell, draft: _Draft) -> Iterator[_Part]:
    lines = [line for line in cell.source.splitlines() if line.strip()]
    if all(line.strip().split()[0] in _SILENT for line in lines):
        return
    if all(line.lstrip().startswith("%dist_") for line in lines):
        left = [line.strip() for line in lines if line.split()[0] not in ("%dist_push", *_SILENT)]
        if left:
            yield _Part(cell.count, f" left out: {'; '.join(left)}", "")
        return
    yield _Part(cell.count, " ran in the notebook's own process:", comment(cell.source, depth=1))


def _dims(dims: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in dims.items())


def _fold(parts: list[_Part]) -> list[str]:
    """The parts as text."""
    return [part.render() for part in parts]
