"""What cellmesh sets out to reach on two cores, as figures that a run meets or misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .figures import Figures
from .units import MEGABYTES, MILLISECONDS, PER_SECOND, SECONDS, TIMES, Unit


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

    def judge(self, figures: Figures) -> tuple[float | None, Literal["met", "missed", "not measured"]]:
        """The figure, and how it compares."""
        try:
            value = self.figure(figures)
        except KeyError:
            return None, "not measured"
        met = value <= self.bound if self.at == "most" else value >= self.bound
        return value, "met" if met else "missed"


def _own(measure: str, contestant: str = "cellmesh") -> Callable[[Figures], float]:
    return lambda figures: figures[contestant, measure]


def _ratio(measure: str, above: str, below: str = "cellmesh") -> Callable[[Figures], float]:
    return lambda figures: figures[above, measure] / figures[below, measure]


TARGETS = (
    Target("start of 8 / one `import torch`", _ratio("start_s", "cellmesh", "torch-import"), "most", 1.5),
    Target("start of 8: Monarch / cellmesh", _ratio("start_s", "monarch"), "least", 4),
    Target("restart of 8", _own("restart_s"), "most", 0.3, SECONDS),
    Target("no-op call on 8", _own("call_s"), "most", 0.6e-3, MILLISECONDS),
    Target("no-op call on 8 / bare ZeroMQ hop", _ratio("call_s", "cellmesh", "zeromq-hop"), "most", 1.8),
    Target("no-op call on 8: Monarch / cellmesh", _ratio("call_s", "monarch"), "least", 4),
    Target("no-op call on 8: ipyparallel / cellmesh", _ratio("call_s", "ipyparallel"), "least", 20),
    Target("cell `pass` on 8, in a kernel", _own("cell_s", "cellmesh-cells"), "most", 1.5e-3, MILLISECONDS),
    Target(
        "cell `pass` on 8: ipyparallel / cellmesh",
        _ratio("cell_s", "ipyparallel", "cellmesh-cells"),
        "least",
        10,
    ),
    Target("pipelined no-op calls on 8", _own("calls_per_s"), "least", 6000, PER_SECOND),
    Target("memory of the tree, 8 ranks", _own("pss_bytes"), "most", 450e6, MEGABYTES),
    Target("memory of the tree: Monarch / cellmesh", _ratio("pss_bytes", "monarch"), "least", 4),
    Target("start of 64", _own("start_s", "cellmesh-64"), "most", 3, SECONDS),
    Target("no-op call on 64", _own("call_s", "cellmesh-64"), "most", 4e-3, MILLISECONDS),
    Target("memory of the tree, 64 ranks", _own("pss_bytes", "cellmesh-64"), "most", 1000e6, MEGABYTES),
)

# Of `benchmarks.training`.
TRAINING_TARGETS = (
    *(
        Target(f"{name}, loop in a cell: speed / torchrun's", _own("loop_ratio", name), "least", 0.98)
        for name in ("ddp", "fsdp2", "tp")
    ),
    *(
        Target(
            f"{name}, one step a cell: more a step", _own("cell_extra_s", name), "most", 2e-3, MILLISECONDS
        )
        for name in ("ddp", "fsdp2", "tp")
    ),
    Target("step after an edit: torchrun from scratch / cellmesh", _own("edit_ratio", "edit"), "least", 20),
)
