"""What cellmesh sets out to reach on two cores, as figures that a run meets or misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .figures import Figures
from .units import MEGABYTES, MILLISECONDS, SECONDS, TIMES, Unit


@dataclass(frozen=True)
class Target:
    """One figure and its bound.

    Args:
        what: the figure, in words.
        figure: takes it from the medians.
        bound: in the figure's base unit.
        unit: how it is shown.
        at: whether the bound is an upper or a lower one.
    """

    what: str
    figure: Callable[[Figures], float]
    at: Literal["most", "least"]
    bound: float
    unit: Unit = TIMES

    def judge(
        self, figures: Figures
    ) -> tuple[float | None, Literal["met", "missed", "not measured"]]:
        """The figure, and how it compares."""
        try:
            value = self.figure(figures)
        except KeyError:
            return None, "not measured"
        met = value <= self.bound if self.at == "most" else value >= self.bound
        return value, "met" if met else "missed"


def _own(measure: str, contestant: str = "cellmesh") -> Callable[[Figures], float]:
    return lambda figures: figures[contestant, measure]


def _ratio(above: tuple[str, str], below: tuple[str, str]) -> Callable[[Figures], float]:
    """A measure of one contestant by a measure of another one."""
    return lambda figures: figures[above] / figures[below]


_IMPORT = ("torch-import", "start_s")
_START, _START_64 = ("cellmesh", "start_s"), ("cellmesh-64", "start_s")
_CALL, _CALL_64 = ("cellmesh", "call_s"), ("cellmesh-64", "call_s")
_CELL = ("cellmesh-cells", "cell_s")
_LEAN = ("lean-call", "call_s")
_RATE = ("cellmesh", "calls_per_s")
_WRITE = ("memory", "memfd_write_1gb_s")
_COPY = ("memory", "memcpy_1gb_s")


def _bulk(measure: str) -> tuple[str, str]:
    return "cellmesh-bulk", measure


TARGETS = (
    Target("no-op call on 8 / lean call", _ratio(_CALL, _LEAN), "most", 1.5),
    Target("no-op call on 8: Monarch / cellmesh", _ratio(("monarch", "call_s"), _CALL), "least", 5),
    Target(
        "no-op call on 8: ipyparallel / cellmesh",
        _ratio(("ipyparallel", "call_s"), _CALL),
        "least",
        30,
    ),
    Target("cell `pass` on 8, in a kernel / lean call", _ratio(_CELL, _LEAN), "most", 2.2),
    Target(
        "cell `pass` on 8: `%%px` / cellmesh", _ratio(("ipyparallel", "cell_s"), _CELL), "least", 25
    ),
    Target(
        "pipelined no-op calls: cellmesh / Monarch",
        _ratio(_RATE, ("monarch", _RATE[1])),
        "least",
        8,
    ),
    Target("start of 8 / one `import torch`", _ratio(_START, _IMPORT), "most", 1.4),
    Target("start of 8: Monarch / cellmesh", _ratio(("monarch", "start_s"), _START), "least", 4),
    Target(
        "`%dist_start 8`, import hidden / one `import torch`",
        _ratio(("cellmesh-starts", "hidden_start_s"), _IMPORT),
        "most",
        0.3,
    ),
    Target(
        "`%dist_start 8` after a stop / one `import torch`",
        _ratio(("cellmesh-starts", "kept_start_s"), _IMPORT),
        "most",
        0.3,
    ),
    Target("start of 64 / one `import torch`", _ratio(_START_64, _IMPORT), "most", 2.5),
    Target("no-op call on 64 / on 8", _ratio(_CALL_64, _CALL), "most", 4),
    Target(
        "memory of the tree, 64 ranks", _own("pss_bytes", "cellmesh-64"), "most", 1000e6, MEGABYTES
    ),
    Target("memory of the tree, 8 ranks", _own("pss_bytes"), "most", 400e6, MEGABYTES),
    Target(
        "128 MB to all 8, first: Ray / cellmesh",
        _ratio(("ray", "push_first_s"), _bulk("push_first_s")),
        "least",
        2,
    ),
    Target(
        "128 MB to all 8, first: Monarch / cellmesh",
        _ratio(("monarch", "push_first_s"), _bulk("push_first_s")),
        "least",
        6,
    ),
    Target(
        "128 MB to all 8, warm / one memcpy of it",
        _ratio(_bulk("push_warm_s"), ("memory", "memcpy_128mb_s")),
        "most",
        2,
    ),
    Target(
        "1 GB sharded, first / one write of it", _ratio(_bulk("shard_first_s"), _WRITE), "most", 1.5
    ),
    Target(
        "1 GB sharded, warm / one memcpy of it", _ratio(_bulk("shard_warm_s"), _COPY), "most", 2
    ),
    Target(
        "8 x 128 MB gathered, first / one write",
        _ratio(_bulk("gather_first_s"), _WRITE),
        "most",
        1.5,
    ),
    Target(
        "8 x 128 MB gathered, again / one memcpy", _ratio(_bulk("gather_warm_s"), _COPY), "most", 2
    ),
    Target(
        "pipelined calls with 1 KB / without",
        _ratio(("cellmesh", "calls_1kb_per_s"), _RATE),
        "least",
        0.8,
    ),
)

# Of `benchmarks.training`.
TRAINING_TARGETS = (
    *(
        Target(
            f"{name}, loop in a cell: speed / torchrun's", _own("loop_ratio", name), "least", 0.98
        )
        for name in ("ddp", "fsdp2", "tp")
    ),
    *(
        Target(
            f"{name}, one step a cell: more a step",
            _own("cell_extra_s", name),
            "most",
            1.5e-3,
            MILLISECONDS,
        )
        for name in ("ddp", "fsdp2", "tp")
    ),
    Target(
        "step after an edit: torchrun from scratch / cellmesh",
        _own("edit_ratio", "edit"),
        "least",
        20,
    ),
)

# Of `benchmarks.hosts`.
_HOSTS_START = ("hosts", "start_s")
HOSTS_TARGETS = (
    Target(
        "start of 2 x 4 by ssh / one `import torch`",
        _ratio(_HOSTS_START, ("hosts", "import_s")),
        "most",
        2.5,
    ),
    Target(
        "no-op call on 1 x 8 over TCP with CURVE / over ipc",
        _ratio(("hosts", "one_call_s"), ("hosts", "local_call_s")),
        "most",
        1.5,
    ),
    Target(
        "no-op call on 2 x 4 over TCP with CURVE / over ipc",
        _ratio(("hosts", "call_s"), ("hosts", "local_call_s")),
        "most",
        1.5,
    ),
    Target("cut host reported after", _own("silent_s", "hosts"), "most", 3.0, SECONDS),
    Target(
        "heal with a new host / start of 2 x 4",
        _ratio(("hosts", "heal_s"), _HOSTS_START),
        "most",
        2,
    ),
)
