"""Run as ``python launching.py NUM_RANKS SCRIPT FOLDER [SCRIPT FOLDER ...]``: runs scripts, keeps losses.

It is what torchrun does (its elastic agent, on one host), but that the ranks are forked from a process which
has imported what takes long: on two cores, importing it in each of eight ranks takes longer than training.
``tests/mesh/test_export.py`` runs exported scripts by torchrun's own command.

Each rank leaves ``FOLDER/RANK.json``: the script's `losses`, exactly, as `float.hex` writes them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main() -> None:
    """Run the scripts, one after the other."""
    num_ranks, *pairs = sys.argv[1:]
    for script, folder in zip(pairs[::2], pairs[1::2], strict=True):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=int(num_ranks),
            run_id=Path(script).stem,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder) / "logs")),
        )
        elastic_launch(config, run)(Path(script), Path(folder))


def run(script: Path, folder: Path) -> None:
    """On each rank: run the script as if it had been given to torchrun itself."""
    sys.argv[:] = [str(script)]
    sys.path[0] = str(script.parent)
    names = runpy.run_path(str(script), run_name="__main__")
    losses = [float(loss).hex() for loss in names["losses"]]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
