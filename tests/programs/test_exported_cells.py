"""Scripts that `%dist_export` writes of cells that make process groups or processes, run as
torchrun does.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from cellmesh.magics.export.recording import Beginning, PageHistory, RankCell
from cellmesh.magics.export.script import export
from tests.exactness.comparing import Losses
from tests.exactness.launching import Job

IMPORTS = "import os\nimport torch.distributed as dist\nlosses = []\n"
SETUP = (
    "def setup(rank, world_size):\n"
    "    os.environ['MASTER_ADDR'] = 'localhost'\n"
    "    os.environ['MASTER_PORT'] = '12355'\n"
    "    dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
    "def cleanup():\n"
    "    dist.destroy_process_group()\n"
)
SUM = (
    "x = torch.ones(3) * (dist.get_rank() + 1)\ndist.all_reduce(x)\nlosses.append(x.sum().item())\n"
)
MAIN = (
    "def main():\n    setup(rank, world_size)\n" + textwrap.indent(SUM, "    ") + "    cleanup()\n"
)
SPAWNED = (
    "import os, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
    "scale = 2\n"
    "def work(rank, world_size, store, queue):\n"
    "    dist.init_process_group('gloo', store, rank=rank, world_size=world_size)\n"
    "    x = torch.ones(scale) * (rank + 1)\n"
    "    dist.all_reduce(x)\n"
    "    queue.put(x.sum().item())\n"
    "    dist.destroy_process_group()\n"
    "losses = []\n"
)
SPAWN = (
    "queue = mp.get_context('spawn').SimpleQueue()\n"
    "mp.spawn(work, args=(2, f'file://{os.getcwd()}/spawned', queue), nprocs=2)\n"
    "losses += [queue.get(), queue.get()]\n"
)

# Cells, alone or with the ranks that run them -> the losses that each rank of two is left with.
CELLS = {
    "main twice": ([IMPORTS + SETUP + MAIN, *["main()"] * 12], [9] * 12),
    "mesh after a new group": (
        [IMPORTS + SETUP + MAIN, "main()", "setup(rank, world_size)",
         "losses.append(mesh.get_group().size())"],
        [9, 2],
    ),
    "from import": (
        [IMPORTS, "from torch.distributed import init_process_group as init, destroy_process_group",
         "destroy_process_group()\ninit(backend='gloo')", SUM],
        [9],
    ),
    "globals": (
        [IMPORTS, "global rank, world_size\nrank = int(os.environ['RANK'])\ndevice = 'cpu'",
         "for i in range(2):\n    global total\n    total = i", "losses.append(total + rank * 0)",
         "def rename():\n    global rank\n    rank = 'main'\nrename()", ("losses.append(7)", 0, 1)],
        [1, 7],
    ),
    "spawn": (
        [SPAWNED, (SPAWN, 0), "box = [losses]\ndist.broadcast_object_list(box)\nlosses = box[0]"],
        [6, 6],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_an_exported_script_computes_what_the_cells_do(
    name: str, launch: Callable[[Job], Losses], tmp_path: Path
) -> None:
    cells, losses = CELLS[name]
    history = PageHistory()
    history.begin(Beginning({"dp": 2}, "gloo", 1))
    for count, cell in enumerate(cells, 2):
        source, *ranks = (cell,) if isinstance(cell, str) else cell
        history.add(count, RankCell(source, tuple(ranks) or None))
        history.close(count, f"%%dist\n{source}", failed=False)
    script = tmp_path / "exported.py"
    assert "left out" not in export(history, script, overwrite=False)
    assert launch(Job(str(script), str(tmp_path), 2, in_folder=True)) == {0: losses, 1: losses}
