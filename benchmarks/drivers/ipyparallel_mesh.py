"""ipyparallel: a controller and an engine for each rank on this host, calls by a view, cells by
`%%px`.
"""

from __future__ import annotations

import time
from typing import Any

from ..processes import own_tree_pss_bytes
from .bulk import Seen, time_push
from .kernel import time_cells
from .protocol import SMALL_ARGUMENT, Counts, Sample, calls_per_s, main, measure_calls

_began = time.perf_counter()
import ipyparallel  # type: ignore[import-not-found]  # noqa: E402

_IMPORT_S = time.perf_counter() - _began


def noop() -> None:
    """What every rank is asked to do."""


def take(argument: bytes) -> None:
    """The same, with an argument."""


def see(array: Any) -> Seen:
    """The array is in memory of this engine's own."""
    return array.nbytes, float(array[-1])


def import_torch() -> None:
    """Ready means that torch is there."""
    import torch  # noqa: F401


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Ready means: torch imported in every engine, each of which has answered. There is no process
    group.
    """
    began = time.perf_counter()
    cluster = ipyparallel.Cluster(n=num_ranks, log_level=40)
    client = cluster.start_and_connect_sync()
    view = client[:]
    view.apply_sync(import_torch)
    start_s = time.perf_counter() - began
    sample = {
        "import_s": _IMPORT_S,
        "start_s": start_s,
        **measure_calls(lambda: view.apply_sync(noop), counts),
        "pss_bytes": own_tree_pss_bytes(),
        "calls_per_s": calls_per_s(
            lambda: view.apply_async(noop), lambda answer: answer.get(), counts
        ),
        "calls_1kb_per_s": calls_per_s(
            lambda: view.apply_async(take, SMALL_ARGUMENT), lambda answer: answer.get(), counts
        ),
        **time_push(lambda array: view.apply_sync(see, array), num_ranks, counts),
    }
    sample.update(
        time_cells(
            setup=(
                "import ipyparallel\nclient = "
                f"ipyparallel.Cluster.from_file({cluster.cluster_file!r})"
                ".connect_client_sync()\nview "
                "= client[:]\nview.block = True\nview.activate()"
            ),
            magic="px",
            teardown="client.close()",
            counts=counts,
        )
    )
    client.close()
    cluster.stop_cluster_sync()
    return sample


if __name__ == "__main__":
    main(measure)
