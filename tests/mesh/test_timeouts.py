"""Time-outs that users give their groups end as they do under torchrun."""

from __future__ import annotations

import cellmesh as cm

# Rank 3 never comes. Ranks that give up close their connections, which others of them may meet
# first.
GIVE_UP = """
from datetime import timedelta

impatient = dist.new_group(timeout=timedelta(seconds=1))
outcome = ""
if rank != 3:
    try:
        dist.all_reduce(torch.ones(1), group=impatient)
    except RuntimeError as error:
        outcome = "gave up"
dist.barrier()
"""


def test_ranks_that_give_up_get_the_error_that_torch_raises(mesh: cm.Mesh) -> None:
    for _ in range(3):
        mesh.cell(GIVE_UP)
        assert mesh.pull("outcome") == {0: "gave up", 1: "gave up", 2: "gave up", 3: ""}
        mesh.cell("x = torch.ones(1)\ndist.all_reduce(x, group=impatient)\nassert x.item() == 4")
