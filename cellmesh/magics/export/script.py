"""``%dist_export``: writes the cells that a notebook ran on its mesh as one script for torchrun.

A script runs the same code as the ranks, in the same order and with the same numbers: it sets up
`device`, `mesh`, process group and threads like `workers/rank/main.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import MeshUsageError
from ...wire.ranks import describe_ranks
from .recording import (
    Aside,
    Beginning,
    Checkpoint,
    NotebookCell,
    PageHistory,
    Push,
    RankCell,
    Reshape,
    Seed,
)
from .rewriting import (
    MAIN,
    CannotRewriteError,
    at_top_level,
    awaits,
    comment,
    free_name,
    names_bound,
    names_in,
    only_defines,
    parse,
    show_last,
    to_python,
    under,
    without_margin,
)

# Names by which a cell may call `sys.exit`: Python's, and those of libraries.
_EXITS = ("exit", "quit", "SystemExit", "click", "typer", "unittest")
_MAKES_GROUPS = re.compile(r"\b(?:init|destroy)_process_group\b")
_NAMES_A_STORE = re.compile(
    r"""MASTER_PORT(?:["']\s*\])?\s*=(?!=)|["']MASTER_PORT["']\s*:|tcp://"""
)
_SPAWNS = re.compile(r"\b(?:spawn|forkserver)\b")
# Magics without an effect in a script, or with code of their own.
_TRACELESS = (
    "%load_ext %reload_ext %unload_ext %matplotlib %dist_start %dist_stop %dist_attach "
    "%dist_detach %dist_restart %dist_auto %dist_export %dist_mesh %dist_seed %dist_push "
    "%dist_reload %dist_save %dist_load"
)


def export(history: PageHistory, path: Path, overwrite: bool, actors: Iterable[str] = ()) -> str:
    """Write the script for torchrun into a file.

    Args:
        history: history of the notebook.
        path: path of the file.
        overwrite: whether to overwrite an existing file.
        actors: names of the mesh's actors.

    Returns:
        A summary of the script, and its limitations.

    Raises:
        MeshUsageError: nothing has run on ranks, the file exists, or the script would not be
            valid Python.
    """
    if history.beginning is None:
        raise MeshUsageError(
            "there is nothing to export: `%dist_start 4` starts a mesh, %%dist runs a cell on it"
        )
    if path.exists() and not overwrite:
        raise MeshUsageError(f"{path} exists: `%dist_export {path} --force` overwrites it")
    script = write_script(history, path.name)
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
    for name, counts in history.elsewhere.items():
        others = ", ".join(f"In [{count}]" for count in counts)
        lines.append(
            f"what ran on {name} is not in it ({others}): `%dist_export FILE --on {name}` writes "
            "that, as a script of its own"
        )
    lines += [
        f"- `{name}` is an actor that the notebook has made: the script must make its object"
        for name in sorted((script.names - script.bound).intersection(actors))
    ]
    return "\n".join([*lines, *(f"- {warning}" for warning in script.warnings)])


@dataclass(frozen=True)
class PagePart:
    """A piece of the exported script, with the numbers of the cells that it is written from.

    Attributes:
        counts: numbers n of the cells ``In [n]`` that it is written from.
        title: rest of the comment above it.
        text: code, or comments.
        can_repeat: whether repetitions of it may be written as a loop.
    """

    counts: tuple[int, ...]
    title: str
    text: str
    can_repeat: bool = False

    def render(self) -> str:
        """Return the piece as text."""
        cells = ", ".join(f"In [{count}]" for count in self.counts[:1] + self.counts[1:][-1:])
        if len(self.counts) > 2:
            cells = cells.replace(", ", " to ")
        return f"# {cells}{self.title}\n{self.text}"


@dataclass
class Draft:
    """An exported script, with remarks and data that are collected while its parts are written.

    Attributes:
        sources: sources of the ranks' cells, as Python.
        imports: import lines for the head of the script.
        futures: features that cells import from ``__future__``.
        warnings: limitations of the script, and data that the user must supply.
        left_out: numbers n of the cells ``In [n]`` that are left out.
        num_cells: number of the ranks' cells in the script.
        text: the whole script, once it is written.
        shows: whether a cell shows its last value.
        has_checkpoints: whether the notebook saved or loaded a checkpoint.
    """

    sources: list[str]
    imports: set[str] = field(
        default_factory=lambda: {"import os", "import torch", "import torch.distributed as dist"}
    )
    futures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    num_cells: int = 0
    text: str = ""
    shows: bool = False
    has_checkpoints: bool = False

    def __post_init__(self) -> None:
        text = "\n".join(self.sources)
        self.names = set().union(*map(names_in, self.sources))
        self.bound = set().union(*map(names_bound, self.sources))
        self.makes_groups = _MAKES_GROUPS.search(text) is not None
        self.names_a_store = _NAMES_A_STORE.search(text) is not None
        self.spawns = _SPAWNS.search(text) is not None
        self.show = free_name("show", self.names)
        self.checkpoint = free_name("checkpoint", self.names)
        # A function that may exit adds its own name to the names by which a cell may exit.
        self.exits = set(_EXITS)
        for source in self.sources:
            tree = parse(source)
            for node in tree.body if tree is not None else ():
                if isinstance(node, ast.FunctionDef) and self.may_exit(ast.unparse(node)):
                    self.exits.add(node.name)

    def may_exit(self, source: str) -> bool:
        """Return whether a cell may call `sys.exit`."""
        return bool(self.exits.intersection(re.findall(r"[^\W\d]\w*", source)))

    def own(self, name: str) -> str:
        """Return the name of a variable that the script itself defines (`rank`, `device`), or the
        name of a copy of it if a cell binds that name.
        """
        return free_name(f"own_{name}", self.names) if name in self.bound else name

    def guard(self, text: str) -> str:
        """Put code under an ``if`` if spawned processes, which import the script for its
        definitions, must not run it.
        """
        return under(MAIN, text) if self.spawns and not only_defines(text) else text

    def on_ranks(self, ranks: tuple[int, ...] | None, text: str) -> str:
        """Put code under an ``if`` that is true on these ranks; None for all ranks."""
        if ranks is None:
            return text
        among = f"== {ranks[0]}" if len(ranks) == 1 else f"in {ranks}"
        return under(f"if {self.own('rank')} {among}", text)


def write_script(history: PageHistory, filename: str) -> Draft:
    """Write the script for torchrun, with remarks.

    Args:
        history: history of a notebook that has, or had, a mesh.
        filename: name of the script's file, for its docstring.
    """
    beginning = history.beginning
    assert beginning is not None
    cells = list(history.cells())
    entries = [entry for cell in cells for entry in cell.entries]
    ran = [entry for entry in entries if isinstance(entry, RankCell)]
    draft = Draft([at_top_level(to_python(entry.source).source)[1] for entry in ran])
    parts = [part.render() for part in _fold(_write_cells(cells, draft), draft)]
    head = _write_head(beginning, filename, draft)
    draft.text = "\n".join([head, *parts, _write_tail(draft)])
    return draft


def _write_cells(cells: Iterable[NotebookCell], draft: Draft) -> Iterator[PagePart]:
    for cell in cells:
        if not cell.is_on_ranks():
            yield from _write_own(cell)
        for entry in cell.entries:
            if isinstance(entry, RankCell):
                yield _write_cell(cell.count, entry, draft)
            elif isinstance(entry, Aside):
                if entry.changes:
                    draft.warnings.append(
                        f"In [{cell.count}]: a script has nothing like `{entry.line}`"
                    )
            else:
                title, text = _write_magic(cell.count, entry, draft)
                yield PagePart((cell.count,), f": %dist_{title}", draft.guard(text))


def _write_own(cell: NotebookCell) -> Iterator[PagePart]:
    """Write a cell of the notebook's own process as a comment."""
    first, _, rest = cell.source.lstrip("\n").partition("\n")
    source = rest if first.split()[:1] == ["%%local"] else cell.source
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    told = [line for line in lines if line.split()[0] not in _TRACELESS.split()]
    if told and all(line.startswith("%dist_") for line in told):
        yield PagePart((cell.count,), f" is left out: {'; '.join(told)}", "")
    elif told:
        text = comment(source, depth=1)
        yield PagePart((cell.count,), " ran in the notebook's own process:", text)


def _write_cell(count: int, entry: RankCell, draft: Draft) -> PagePart:
    entry.settle()
    where = f" on {describe_ranks(entry.ranks)}" if entry.ranks is not None else ""
    plain, why = to_python(entry.source), ""
    if entry.run is not None:
        why = "has not ended and is left out"
    elif entry.failed:
        why = f"failed on {describe_ranks(entry.failed)} and is left out"
    else:
        try:
            text = _write_body(plain.source, entry, draft)
        except CannotRewriteError as e:
            draft.warnings.append(f"In [{count}] cannot stand in a script: {e}")
            why = f"is left out, as {e}"
    if why:
        draft.left_out.append(count)
        return PagePart((count,), f"{where} {why}:", comment(entry.source, depth=1))
    draft.imports |= plain.imports
    draft.warnings += [f"In [{count}]: a script cannot do `{what}`" for what in plain.left_out]
    if "get_ipython" in names_in(plain.source):
        draft.warnings.append(f"In [{count}] calls get_ipython(), which a script has not")
    draft.num_cells += 1
    if entry.argv is not None:
        draft.imports.add("import sys")
        text = f"sys.argv[1:] = {list(entry.argv)!r}\n{text.rstrip()}\nsys.argv[1:] = []\n"
    return PagePart((count,), where, text, can_repeat=True)


def _write_body(source: str, entry: RankCell, draft: Draft) -> str:
    features, text = at_top_level(without_margin(source))
    if awaits(text):
        raise CannotRewriteError("it awaits at top level: call asyncio.run in the cell")
    draft.futures += features
    if not entry.quiet:
        shown = show_last(text, draft.show)
        draft.shows |= shown != text
        text = shown
    may_exit = draft.may_exit(source) and not only_defines(text)
    text = draft.guard(text)
    if may_exit:
        ends = "except SystemExit as end:  # of this cell only"
        text = f"{under('try', text)}{ends}\n    if end.code:\n        raise\n"
    return draft.on_ranks(entry.ranks, text)


def _fold(parts: Iterable[PagePart], draft: Draft) -> Iterator[PagePart]:
    """Write cells that were run several times in the same order as one loop."""
    for _, group in itertools.groupby(parts, lambda part: (part.text, part.title)):
        alike = [*group]
        if len(alike) > 1 and alike[0].can_repeat:
            counts = tuple(count for part in alike for count in part.counts)
            loop = under(f"for {free_name('_', draft.names)} in range({len(alike)})", alike[0].text)
            alike = [dataclasses.replace(alike[0], counts=counts, text=loop)]
        yield from alike


# Magics that change the ranks, written as plain torch.


def _write_magic(
    count: int, entry: Push | Reshape | Seed | Checkpoint, draft: Draft
) -> tuple[str, str]:
    """Return a magic's line without ``%dist_``, and Python that does the same."""
    match entry:
        case Push(values):
            return f"push {' '.join(values)}", _write_push(count, entry, draft)
        case Reshape(dims):
            line = " ".join(f"{name}={size}" for name, size in dims.items())
            return f"mesh {line}", f"mesh = {_make_mesh(dims, draft)}\n"
        case Seed(seed, per_rank):
            value = f"{seed} + {draft.own('rank')}" if per_rank else str(seed)
            generators = ["random.seed", "torch.manual_seed"]
            if any("numpy" in source for source in draft.sources):
                generators.insert(1, "numpy.random.seed")
            draft.imports |= {f"import {each.partition('.')[0]}" for each in generators}
            text = "".join(f"{each}({value})\n" for each in generators)
            return f"seed {seed}{' --per-rank' if per_rank else ''}", text
        case Checkpoint(action, names, path):
            draft.imports |= {"import functools", "import torch.distributed.checkpoint as dcp"}
            draft.imports.add("import torch.distributed.checkpoint.state_dict as dcp_state")
            draft.imports.add("from torch.distributed.tensor import DTensor")
            draft.has_checkpoints = True
            words = " ".join([action, *names, path])
            return words, f"{draft.checkpoint}({action!r}, {[*names]!r}, {path!r})\n"


def _write_push(count: int, push: Push, draft: Draft) -> str:
    """Write values that have a Python literal; leave a place to fill in for the others."""
    lines, missing = "", ""
    for name, value in push.values.items():
        said = f"In [{count}] pushed `{name}`, a"
        if not value.literal:
            missing += f"# {name} = ...  # supply it: {value.description}\n"
            draft.warnings.append(f"{said} {value.description}: the script must be given it")
            continue
        lines += f"{name} = {value.literal}\n"
    return missing + (draft.on_ranks(push.ranks, lines) if lines else "")


# The code before and after the cells.


def _make_mesh(dims: Mapping[str, int], draft: Draft | None = None) -> str:
    """Return the source of the call that makes a DeviceMesh."""
    device, size = (draft.own(each) if draft else each for each in ("device", "world_size"))
    sizes = f"({size},)" if len(dims) == 1 else f"({', '.join(map(str, dims.values()))})"
    names = "".join(f'"{name}", ' for name in dims)
    names = f"({names[:-1]})" if len(dims) == 1 else f"({names[:-2]})"
    return f"init_device_mesh({device}.type, {sizes}, mesh_dim_names={names})"


def _write_head(beginning: Beginning, filename: str, draft: Draft) -> str:
    """Write everything in the script that precedes the first cell."""
    num_ranks = math.prod(beginning.dims.values())
    # A mesh without GPUs used gloo.
    backend = "cpu:gloo,cuda:nccl" if beginning.backend == "gloo" else beginning.backend
    index = "local_rank" if "nccl" in backend else "local_rank % torch.cuda.device_count()"
    groups = _GROUPS.format(index=index, backend=backend, mesh=_make_mesh(beginning.dims))
    if draft.makes_groups:
        draft.imports.add("import itertools")
        has_mesh = "mesh" in draft.names - draft.bound
        groups += _ADOPTION.replace("# mesh\n", _ADOPTED_MESH if has_mesh else "")
    if draft.names_a_store:
        groups += _OWN_STORE
    imports, stub = draft.imports, ""
    modules = {each for source in draft.sources for each in _imported(source)}
    if {each for each in modules if each.partition(".")[0] == "cellmesh"} == {"cellmesh"}:
        imports, stub = imports | {"import sys", "import types"}, _STUB
    if "display" in draft.names - draft.bound:
        imports = imports | {"from IPython.display import display"}
    copied = [name for name in ("rank", "world_size", "device") if name in draft.bound]
    parts = [
        f'"""{Path(filename).stem}: the cells that a notebook ran on {num_ranks} ranks, in their '
        f"order.\n\n    torchrun --nproc-per-node "
        f'{num_ranks} {filename}\n"""\n\n',
        "".join(f"from __future__ import {name}\n" for name in dict.fromkeys(draft.futures)),
        _sort_imports(imports),
        stub,
        f"torch.set_num_threads({beginning.num_threads})\n" if beginning.num_threads else "",
        "".join(f'{name.lower()} = int(os.environ["{name}"])\n' for name in _VARIABLES),
        draft.guard(groups),
        *(f"{draft.own(name)} = {name}\n" for name in copied),
        _SHOW.format(show=draft.show, rank=draft.own("rank")) if draft.shows else "",
        _CHECKPOINT.format(checkpoint=draft.checkpoint, rank=draft.own("rank"))
        if draft.has_checkpoints
        else "",
    ]
    return "".join(parts)


def _imported(source: str) -> Iterator[str]:
    """Yield the modules that a cell imports, at any depth."""
    for node in ast.walk(parse(source) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _sort_imports(lines: set[str]) -> str:
    """Write imports in the usual order."""
    others = lines | {"from torch.distributed.device_mesh import init_device_mesh"}
    own = {line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names}
    ordered = sorted(others - own, key=lambda line: (line.startswith("from"), line))
    return "\n".join(["", *sorted(own), "", *ordered, "\n"])


_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_STUB = """\
sys.modules["cellmesh"] = types.ModuleType("cellmesh")  # cells log numbers for plots
sys.modules["cellmesh"].log = lambda **values: None
"""
_SHOW = '''

def {show}(value: object) -> None:
    """Print the value of a cell's last expression, as a notebook shows it."""
    if value is not None:
        print(f"[{{{rank}}}] {{value!r}}")

'''
# Ranks may hold different values under one name, except for parts of one model or tensor.
_CHECKPOINT = '''

def {checkpoint}(action: str, names: list[str], path: str) -> None:
    """Save or load variables (all that were saved, if none is named) as a checkpoint."""
    saved, states, restores = set(), {{}}, {{}}
    if action == "load":
        keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        saved = {{key.partition(".")[0] for key in keys}}
        names = names or sorted({{key.partition("@")[0] for key in saved}})
    modules = {{k: v for k, v in globals().items() if isinstance(v, torch.nn.Module)}}
    for name in names:
        value = owner = globals()[name]
        if name in modules:
            state = dcp_state.get_model_state_dict(value)
            restore = functools.partial(dcp_state.set_model_state_dict, value)
        elif isinstance(value, torch.optim.Optimizer):
            updated = {{p for group in value.param_groups for p in group["params"]}}
            held = {{k: {{*v.parameters()}} for k, v in modules.items()}}
            sizes = {{k: len(each) for k, each in held.items() if updated <= each}}
            owner = modules[min(sizes, key=lambda k: (k not in names, sizes[k]))]
            state = dcp_state.get_optimizer_state_dict(owner, value)
            restore = functools.partial(dcp_state.set_optimizer_state_dict, owner, value)
        elif hasattr(value, "load_state_dict"):
            state, restore = value.state_dict(), value.load_state_dict
        else:
            state, restore = value, functools.partial(globals().__setitem__, name)
        is_module = isinstance(owner, torch.nn.Module)
        parts = [*owner.modules(), *owner.parameters()] if is_module else [owner]
        is_shared = any(isinstance(p, DTensor) or "DataParallel" in type(p).__name__ for p in parts)
        is_one = name in saved if action == "load" else is_shared
        key = name if is_one else f"{{name}}@{{{rank}}}"
        states[key], restores[key] = state, restore
    if action == "save":
        dcp.save(states, checkpoint_id=path)
        return
    dcp.load(states, checkpoint_id=path)
    for key, restore in restores.items():
        restore(states[key])

'''
_GROUPS = """\
if torch.cuda.is_available():
    device = torch.device("cuda", {index})
    torch.cuda.set_device(device)
    dist.init_process_group("{backend}")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
mesh = {mesh}
"""
# torch numbers groups from 0 again after the default one was destroyed: the next one would read the
# addresses that the last one has left in torchrun's store, and some runs would fail.
_ADOPTION = '''

def adopt_process_group(rank: int, world_size: int) -> None:
    """Cells that make the process group find the one above, or make one after they destroyed it."""
    store, *_ = next(dist.rendezvous("env://"))
    make_group, numbers = dist.init_process_group, itertools.count()

    def init_process_group(backend=None, init_method=None, **options) -> None:
        if dist.is_initialized():
            return
        meeting = {"store": dist.PrefixStore(f"cells/{next(numbers)}", store)}
        make_group(backend, **{"rank": rank, "world_size": world_size, **meeting, **options})
# mesh

    dist.init_process_group = init_process_group


adopt_process_group(rank, world_size)
'''
_OWN_STORE = """\
os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # cells name a store, which rank 0 is to serve
"""
# The mesh must belong to the existing group.
_ADOPTED_MESH = """\
        global mesh
        mesh = init_device_mesh(mesh.device_type, mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
"""
_PAUSE = """
from time import sleep

sleep(0.5)  # gloo's threads let go of their last tensors: in Python's shutdown, that would abort it
"""


def _write_tail(draft: Draft) -> str:
    """Write everything in the script that follows the last cell.

    A script that raises does not reach this code, and need not: its process ends, and torchrun ends
    the others. Destroying a process group in which others wait could hang. Threads of gloo's groups
    that are still referenced (by a model or a mesh) keep running, and cannot be joined: a thread
    that needs Python to release the tensors of its last operation while Python shuts down aborts
    the process (``ProcessGroupGloo::runLoop``, ``AsyncWork``'s destructor; 8 of 24 runs of a short
    script on two busy cores, 1 of 25 with a barrier instead of the pause, none of 50 with it).
    """
    # Cells, or a library that they use, may have destroyed the process group.
    destroy = under("if dist.is_initialized()", "dist.destroy_process_group()\n")
    return draft.guard(f"{destroy}{_PAUSE}")
