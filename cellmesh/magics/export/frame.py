"""Writes the code before and after the cells of an exported script, and names that its parts share.
Pure.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .history import Beginning
from .process_groups import GroupUse, write_group_use
from .rewriting import MAIN, free_name, under


@dataclass
class Draft:
    """The helper functions and imports that an exported script needs, collected while its parts are
    written.

    Attributes:
        names: that ranks' cells use or bind.
        bound: that they bind.
        groups: what cells do with process groups.
        imports: lines for the head of the script.
        futures: features that cells import from ``__future__``.
        warnings: what the script cannot do, or must be given.
        left_out: the counts of cells that are not in it.
        num_cells: how many are.
        shows, awaits: whether a cell shows its last value, awaits.
    """

    names: set[str]
    bound: set[str] = field(default_factory=set)
    groups: GroupUse = field(default_factory=GroupUse)
    imports: set[str] = field(default_factory=lambda: {"import os"})
    futures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    num_cells: int = 0
    shows: bool = False
    awaits: bool = False

    def own(self, name: str) -> str:
        """Return the name of a variable of the script itself (`rank`, `device`), or of a copy of it
        if cells bind that name.
        """
        return free_name(f"own_{name}", self.names) if name in self.bound else name

    @property
    def rank(self) -> str:
        """The expression for a process's rank in the script, even if cells bind `rank`."""
        return self.own("rank")

    @property
    def show(self) -> str:
        """The name of the script's function that prints a value."""
        return free_name("show", self.names)

    @property
    def loop(self) -> str:
        """The name of the script's asyncio event loop."""
        return free_name("loop", self.names)


@dataclass(frozen=True)
class PagePart:
    """A piece of the exported script, with the numbers of the cells that it is written from.

    Attributes:
        counts: the cells that it comes from.
        title: what else stands in the comment above it.
        text: code, or comments.
        can_repeat: it may be run in a loop, if it comes again.
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


def condition(draft: Draft, *ranks: int) -> str:
    """Return the head of an ``if`` that is true on these ranks."""
    among = f"== {ranks[0]}" if len(ranks) == 1 else f"in ({', '.join(map(str, ranks))})"
    return f"if {draft.rank} {among}"


def make_mesh(dims: Mapping[str, int], draft: Draft) -> str:
    """Return the source of the call that makes a DeviceMesh."""
    names = ", ".join(f'"{name}"' for name in dims)
    kind = f"{draft.own('device')}.type"
    if len(dims) == 1:
        return f"init_device_mesh({kind}, ({draft.own('world_size')},), mesh_dim_names=({names},))"
    return (
        f"init_device_mesh({kind}, "
        f"({', '.join(map(str, dims.values()))}), "
        f"mesh_dim_names=({names}))"
    )


def write_head(beginning: Beginning, filename: str, draft: Draft) -> str:
    """Write everything in the script that precedes the first cell."""
    num_ranks = math.prod(beginning.dims.values())
    attached = (
        "\nThe ranks were attached to: what others ran on them before is not here.\n"
        if beginning.attached
        else ""
    )
    groups = f"{_device(beginning.backend)}mesh = {make_mesh(beginning.dims, Draft(set()))}\n"
    groups += write_group_use(draft.groups, "mesh" in draft.names - draft.bound)
    if draft.groups.makes:
        draft.imports.add("import itertools")
    copies = [
        f"{draft.own(name)} = {name}\n"
        for name in ("rank", "world_size", "device")
        if name in draft.bound
    ]
    parts = [
        f'"""{Path(filename).stem}: the cells that a notebook ran on {num_ranks} ranks, in their '
        f'order.\n{attached}\n    torchrun --nproc-per-node {num_ranks} {filename}\n"""\n\n',
        "".join(f"from __future__ import {name}\n" for name in dict.fromkeys(draft.futures)),
        "\n" if draft.futures else "",
        _imports(draft.imports | ({"import asyncio"} if draft.awaits else set())),
        "\n",
        f"torch.set_num_threads({beginning.num_threads})\n" if beginning.num_threads else "",
        'rank = int(os.environ["RANK"])\n'
        'local_rank = int(os.environ["LOCAL_RANK"])\n'
        'world_size = int(os.environ["WORLD_SIZE"])\n',
        under(MAIN, groups) if draft.groups.spawns else groups,
        *copies,
        f"{draft.loop} = asyncio.new_event_loop()\n" if draft.awaits else "",
        _SHOW.format(show=draft.show, rank=draft.rank) if draft.shows else "",
    ]
    return "".join(parts)


def _imports(lines: set[str]) -> str:
    """Write imports in the usual order; names of one module share a line."""
    others = lines | {"import torch", "import torch.distributed as dist"}
    others.add("from torch.distributed.device_mesh import init_device_mesh")
    own = {line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names}
    whole = sorted(line for line in others - own if line.startswith("import"))
    names: dict[str, list[str]] = {}
    for line in sorted(others - own - set(whole)):
        _, module, _, name = line.split()
        names.setdefault(module, []).append(name)
    parts = [f"from {module} import {', '.join(each)}" for module, each in names.items()]
    return "\n".join([*sorted(own), "", *whole, *parts, ""])


_SHOW = '''

def {show}(value: object) -> None:
    """Print the value of a cell's last expression, as a notebook shows it."""
    if value is not None:
        print(f"[{{{rank}}}] {{value!r}}")

'''


def _device(backend: str) -> str:
    if backend == "gloo":  # there was no GPU
        backend = "cpu:gloo,cuda:nccl"
    index = "local_rank" if "nccl" in backend else "local_rank % torch.cuda.device_count()"
    return (
        "if torch.cuda.is_available():\n"
        f'    device = torch.device("cuda", {index})\n'
        "    torch.cuda.set_device(device)\n"
        f'    dist.init_process_group("{backend}")\n'
        "else:\n"
        '    device = torch.device("cpu")\n'
        '    dist.init_process_group("gloo")\n'
    )


_PAUSE = """
from time import sleep

sleep(0.5)  # gloo's threads let go of their last tensors: in Python's shutdown, that would abort it
"""


def write_tail(draft: Draft) -> str:
    """Write everything in the script that follows the last cell.

    A script that raises does not come here, and need not: its process ends, and torchrun ends the
    others. Taking down a process group in which others wait could hang. Threads of gloo's groups
    that something still refers to (a model's, a mesh's) live on, and cannot be waited for: one that
    needs Python to let go of its last operation's tensors while Python shuts down aborts the
    process (``ProcessGroupGloo::runLoop``, ``AsyncWork``'s destructor; 8 of 24 runs of a short
    script on two busy cores, 1 of 25 with a barrier in place of the pause, none of 50 with it).
    """
    close = f"{draft.loop}.close()\n" if draft.awaits else ""
    # Cells, or a library that they use, may have destroyed it.
    destroy = under("if dist.is_initialized()", "dist.destroy_process_group()\n")
    end = f"{close}{destroy}{_PAUSE}"
    return under(MAIN, end) if draft.groups.spawns else end
