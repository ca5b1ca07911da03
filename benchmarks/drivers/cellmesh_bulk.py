"""cellmesh and large values: an array to all ranks, a tensor in parts, parts gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .bulk import ARRAY_BYTES, WHOLE_BYTES, Seen, check_seen, first_and_warm, time_push
from .protocol import Counts, Sample, elapsed_s, main

if TYPE_CHECKING:
    import cellmesh


def measure(num_ranks: int, counts: Counts) -> Sample:
    """What goes out is timed until every rank has told its size and last element, read from what it
    has.

    What is gathered is timed until an element of each part was read from the whole, here. Names are
    bound again and again, as in a notebook: what they were bound to before is freed meanwhile.
    """
    import cellmesh

    def push(array: Any) -> Sequence[Seen]:
        mesh.push(x=array)
        return list(mesh.pull("x.nbytes, float(x[-1])").values())

    with cellmesh.start(num_ranks) as mesh:
        sample = time_push(push, num_ranks, counts)
        mesh.cell("del x")
        sample |= _time_shard(mesh, counts)
        mesh.cell("del x")
        return sample | _time_gather(mesh, counts)


def _time_shard(mesh: cellmesh.Mesh, counts: Counts) -> Sample:
    """A float tensor of 1 GiB, an equal part to each rank."""
    import torch

    num_ranks = len(mesh)
    parts = torch.rand(num_ranks, WHOLE_BYTES // 4 // num_ranks)

    def transfer_s(number: int) -> float:
        parts[:, -1] = torch.arange(num_ranks) + number
        seen: list[Seen] = []

        def shard() -> None:
            mesh.push(x=parts.view(-1), shard=0)
            seen.extend(mesh.pull("x.nbytes, float(x[-1])").values())

        taken_s = elapsed_s(shard)
        check_seen(seen, [(parts[0].nbytes, float(rank + number)) for rank in range(num_ranks)])
        return taken_s

    return first_and_warm("shard", transfer_s, counts)


def _time_gather(mesh: cellmesh.Mesh, counts: Counts) -> Sample:
    """A float tensor of 128 MiB of each rank, as one tensor here.

    The notebook has imported torch before, which its first tensor would make it do.
    """
    import torch  # noqa: F401

    num_ranks = len(mesh)
    mesh.cell(f"x = torch.rand({ARRAY_BYTES // 4})")

    def transfer_s(number: int) -> float:
        mesh.cell(f"x[0] = rank + {number}")
        seen: list[float] = []
        kept = []  # freeing it is not counted

        def gather() -> None:
            kept.append(mesh.pull("x", gather=True))
            seen.extend(kept[0][:: ARRAY_BYTES // 4].tolist())

        taken_s = elapsed_s(gather)
        check_seen(
            [kept[0].nbytes, *seen], [num_ranks * ARRAY_BYTES, *range(number, number + num_ranks)]
        )
        return taken_s

    return first_and_warm("gather", transfer_s, counts)


if __name__ == "__main__":
    main(measure)
