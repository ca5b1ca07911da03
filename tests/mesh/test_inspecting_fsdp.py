"""Looks at what FSDP2 frees and gathers anew, again and again, while it trains."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import cellmesh as cm
from cellmesh.controller.inspect import look
from cellmesh.wire.inspect import (
    AnyRequest,
    Digests,
    Elements,
    Histogram,
    Overview,
    Picture,
)

MODELS = """
import os
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
def sharded(reshard):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])
    for module in model: fully_shard(module, reshard_after_forward=reshard)
    return fully_shard(model)
freeing, keeping = sharded(True), sharded(False)
batch = torch.randn(16, 512)
own = torch.zeros(9 << 20)  # too much for the heap: what is freed is unmapped at once
"""
TRAIN = """
done = torch.zeros(1)
while not done:
    own.untyped_storage().resize_(36 << 20)
    freeing(batch).sum().backward()
    own.untyped_storage().resize_(0)
    keeping(batch).sum().backward()
    done.fill_(os.path.exists({path!r}))
    dist.all_reduce(done)
"""
PART: dict[str, Any] = {
    "dims": (0, 1), "rows": (0, 128), "cols": (0, 512), "height": 60, "width": 60
}  # fmt: skip
SUBJECTS: tuple[AnyRequest, ...] = (
    Overview("freeing"),
    Overview("keeping"),
    Overview("freeing[1]"),
    Overview("own"),
    Overview("keeping", grads=True),
    Picture("freeing", "2.weight", **PART),
    Picture("keeping", "1.weight", **PART, reduction="absmax"),
    Histogram("own", low=0.0, high=1.0, num_bins=4),
    Digests("own", parts=((0, 4 << 20), (4 << 20, 9 << 20))),
    Elements("own", parts=((5, 10_000), (6 << 20, (6 << 20) + 10_000))),
)
NUM_LOOKS = 50


def test_looks_at_a_model_that_fsdp_trains_harm_nothing(mesh: cm.Mesh, tmp_path: Path) -> None:
    mesh.cell(MODELS)
    idle = mesh.inspect("freeing")
    assert len(idle.paths) == 6
    done = tmp_path / "done"
    run = mesh.submit_cell(TRAIN.format(path=str(done)))
    told, refused = 0, set()
    for subject in itertools.islice(itertools.cycle(SUBJECTS), NUM_LOOKS):
        looked = look(mesh.rank_set, subject, is_beside=True)
        told += len(looked.answers)
        refused |= {refusal.text for refusal in looked.refusals.values()}
    done.touch()
    assert run.wait(60)
    run.result()  # raises what a rank has raised, or that it died
    assert told > NUM_LOOKS, refused  # the others are refused: memory is freed half of the time
    mesh.cell("keeping(batch).sum().backward()")
    assert mesh.inspect("freeing").paths == idle.paths
