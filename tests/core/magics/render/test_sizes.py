"""What views leave in a notebook's file: 60 kB at most, at 8 and at 64 ranks.

That of a timeline is in `test_timeline`.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from cellmesh.controller.inspect import Inspection, Spread
from cellmesh.controller.metrics import Metrics, Plot
from cellmesh.magics.render.inspections import list_items, static_of
from cellmesh.magics.render.plots import draw_html
from cellmesh.magics.views.inspector.view_model import summarise
from cellmesh.wire.codec import Parcel
from cellmesh.wire.inspect import TensorSummary, ValueSummary
from cellmesh.wire.verbs import Logged

MAX_BYTES = 60_000
NAMES = [f"module.layers.{index}.attention.query.weight" for index in range(400)]
at_8_and_64 = pytest.mark.parametrize("num_ranks", [8, 64])


def part(rank: int, name: str, num_ranks: int) -> TensorSummary:
    """A rank's part of a parameter, with numbers of its own."""
    rows = 4096 // num_ranks
    return TensorSummary(
        kind="torch.nn.parameter.Parameter", path=name, shape=(4096, 1024),
        local_shape=(rows, 1024), offset=(rank * rows, 0), strides=(1024, 1), dtype="bfloat16",
        device=f"cuda:{rank}", placements="S(0)", requires_grad=True, mesh_dim_names=("dp",),
        coordinate=(rank,), num_elements=rows * 1024, num_bytes=rows * 2048,
        min=-1.2345 - rank, max=1.2345 + rank, mean=rank / 7, std=1 / (rank + 3), norm=rank * 1.7,
        num_nan=rank, digest=str(rank), shard=(rank,), note=f"note {rank}"
    )  # fmt: skip


@at_8_and_64
def test_an_inspector_with_all_that_it_can_show(num_ranks: int) -> None:
    ranks = range(num_ranks)
    parts = {rank: tuple(part(rank, name, num_ranks) for name in NAMES) for rank in ranks}
    found = {rank: ValueSummary("m.Model", "Model", items) for rank, items in parts.items()}
    bins = {rank: tuple(at * rank * 7919 % 1000 for at in range(40)) for rank in ranks}
    inspection = Inspection("model", found, spreads={NAMES[0]: Spread(-1.0, 1.0, bins)})
    assert len(static_of(inspection, NAMES[0]).html.encode()) < MAX_BYTES
    # In the widget's state, which nbclient keeps in the notebook.
    summary = summarise(inspection, list_items(inspection), 1, "")
    assert len(json.dumps(summary)) < MAX_BYTES


@at_8_and_64
def test_a_plot(num_ranks: int) -> None:
    metrics, steps = Metrics(), tuple(map(float, range(2000)))
    random = np.random.default_rng(0)
    for rank in range(num_ranks):
        values = (*random.random(1999).tolist(), math.nan)
        metrics.take(1, (rank,), Parcel(Logged(1, ("loss",), steps, (values,))))
    page = draw_html(Plot(metrics, ("loss",), tuple(range(num_ranks))))
    assert len(page.encode()) < MAX_BYTES
