"""What cellmesh sets out to reach on two cores, as figures that a run meets or misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .figures import Figures
from .units import MEGABYTES, MICROSECONDS, SECONDS, TIMES, Unit


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


def _to_torchrun(part: str, measure: str) -> Callable[[Figures], float]:
    return _ratio((part, measure), (part, "torchrun_s"))


def _cost_of_a_rank_s(figures: Figures) -> float:
    return (figures[_CALL_64] - figures[_CALL]) / (64 - 8)


_IMPORT = ("torch-import", "start_s")
_CALL, _CALL_64 = ("cellmesh", "call_s"), ("cellmesh-64", "call_s")
_CELL = ("cellmesh-cells", "cell_s")
_LEAN = ("lean-call", "call_s")
_STEP, _SCRIPT = ("cellmesh-step", "step_s"), ("cellmesh-step", "script_s")

TARGETS = (
    Target(
        "first step in a kernel / one `import torch`",
        _ratio(("cellmesh-step", "kernel_s"), _IMPORT),
        "most",
        0.6,
    ),
    Target(
        "first step of a script / torchrun's",
        _ratio(_SCRIPT, ("torchrun-step", "script_s")),
        "most",
        0.19,
    ),
    Target("first step: Monarch / cellmesh", _ratio(("monarch-step", "step_s"), _STEP), "least", 5),
    Target(
        "first step: ipyparallel / cellmesh",
        _ratio(("ipyparallel-step", "step_s"), _STEP),
        "least",
        5,
    ),
    Target(
        "imports of transformers in a second notebook",
        _own("imports_s", "cellmesh-step"),
        "most",
        0.15,
        SECONDS,
    ),
    Target(
        "start of 8 / one `import torch`", _ratio(("cellmesh", "start_s"), _IMPORT), "most", 1.45
    ),
    Target(
        "start of 64 / one `import torch`", _ratio(("cellmesh-64", "start_s"), _IMPORT), "most", 2.3
    ),
    Target(
        "memory of the tree, 64 ranks", _own("pss_bytes", "cellmesh-64"), "most", 1000e6, MEGABYTES
    ),
    Target("start of 256", _own("start_s", "cellmesh-256"), "most", 12, SECONDS),
    Target("no-op call on 8 / lean call", _ratio(_CALL, _LEAN), "most", 1.4),
    Target(
        "CPU time of a no-op call on 8 / of a lean call",
        _ratio(("cellmesh", "call_cpu_s"), ("lean-call", "call_cpu_s")),
        "most",
        1.7,
    ),
    Target(
        "no-op call on 8: Monarch / cellmesh", _ratio(("monarch", "call_s"), _CALL), "least", 3.8
    ),
    Target(
        "no-op call on 8: ipyparallel / cellmesh",
        _ratio(("ipyparallel", "call_s"), _CALL),
        "least",
        28,
    ),
    Target("cell `pass` on 8, in a kernel / lean call", _ratio(_CELL, _LEAN), "most", 2.1),
    Target(
        "cell `pass` on 8: `%%px` / cellmesh", _ratio(("ipyparallel", "cell_s"), _CELL), "least", 24
    ),
    Target(
        "pipelined no-op calls: cellmesh / Monarch",
        _ratio(("cellmesh", "calls_per_s"), ("monarch", "calls_per_s")),
        "least",
        6,
    ),
    Target(
        "a rank more: (call on 64 - call on 8) / 56", _cost_of_a_rank_s, "most", 20e-6, MICROSECONDS
    ),
    Target(
        "8 x 128 MB gathered, first / one write",
        _ratio(("cellmesh-bulk", "gather_first_s"), ("memory", "memfd_write_1gb_s")),
        "most",
        1.5,
    ),
    Target(
        "8 x 128 MB gathered, again / one memcpy",
        _ratio(("cellmesh-bulk", "gather_warm_s"), ("memory", "memcpy_1gb_s")),
        "most",
        2,
    ),
)

# Of `benchmarks.training`.
_PROGRAMS = ("ddp", "fsdp2", "tp")
TRAINING_TARGETS = (
    *(
        Target(
            f"{name}, loop in a cell: CPU time / torchrun's",
            _own("loop_ratio", name),
            "most",
            1.01,
        )
        for name in _PROGRAMS
    ),
    *(
        Target(
            f"{name}, one step a cell: CPU time more a rank and step",
            _own("cell_extra_s", name),
            "most",
            200e-6,
            MICROSECONDS,
        )
        for name in _PROGRAMS
    ),
)

# Of `benchmarks.hosts`.
HOSTS_TARGETS = (
    Target(
        "2 x 128 MB to two hosts / through bare CURVE",
        _ratio(("hosts", "again_s"), ("hosts", "curve_s")),
        "most",
        1.2,
    ),
)

# Of `benchmarks.scripts`.
_FSDP2 = "fsdp2-8"
SCRIPTS_TARGETS = (
    *(
        Target(f"{title}, {ranks} ranks / torchrun", _to_torchrun(name, measure), "most", bound)
        for name, ranks in (("ddp-4", 4), ("ddp-8", 8))
        for title, measure, bound in (
            ("DDP script: first `cellmesh run`", "first_s", 0.4),
            ("DDP script: again, new ranks", "again_s", 0.08),
            ("DDP script: again, `--on`", "on_s", 0.05),
        )
    ),
    Target(
        "DDP script and 20 s of imports: again / torchrun",
        _to_torchrun("imports-4", "again_s"),
        "most",
        0.1,
    ),
    Target("FSDP2 step: first / torchrun", _to_torchrun(_FSDP2, "first_s"), "most", 0.3),
    Target("FSDP2 step: again / torchrun", _to_torchrun(_FSDP2, "again_s"), "most", 0.08),
    Target(
        "steps per second in a loop / torchrun's",
        _ratio(("loop", "steps"), ("loop", "torchrun_steps")),
        "least",
        0.99,
    ),
    Target("`cellmesh exec NAME pass`", _own("exec_s", "exec"), "most", 0.25, SECONDS),
    Target(
        "the same - 1.3 x `python -c 'import zmq'`",
        lambda figures: figures["exec", "exec_s"] - 1.3 * figures["exec", "zmq_s"],
        "most",
        0.1,
        SECONDS,
    ),
)

# Of `benchmarks.actors`.
_ACTORS = "cellmesh-actors"
_RUN, _METHOD, _SENDS = (_ACTORS, "run_s"), (_ACTORS, "method_s"), (_ACTORS, "sends_s")
ACTORS_TARGETS = (
    *(
        Target(
            f"second mesh in a {where}",
            _own(f"{where}_s", "cellmesh-second"),
            "most",
            0.15,
            SECONDS,
        )
        for where in ("script", "notebook")
    ),
    Target("no-op call on 8 / lean call", _ratio((_ACTORS, "call_s"), _LEAN), "most", 1.4),
    Target("method on 8 / `mesh.run`", _ratio(_METHOD, _RUN), "most", 1.1),
    *(
        Target(f"method on 8: {name} / cellmesh", _ratio((peer, "method_s"), _METHOD), "least", at)
        for name, peer, at in (("Monarch", "monarch-actors", 2.5), ("Ray", "ray-actors", 4))
    ),
    *(
        Target(
            f"{title} beside waiting calls / without",
            _ratio((_ACTORS, f"{name}_beside_s"), (_ACTORS, f"{name}_s")),
            "most",
            1.3,
        )
        for title, name in (("method", "method"), ("`mesh.run`", "run"))
    ),
    Target(
        "1,000 sends: Monarch / cellmesh",
        _ratio(("monarch-actors", "sends_s"), _SENDS),
        "least",
        2,
    ),
    Target(
        "rank to rank / Ray's actor to actor",
        _ratio((_ACTORS, "other_s"), ("ray-actors", "other_s")),
        "most",
        0.1,
    ),
    Target("memcpys / copy to whole models", _own("whole_share", "cellmesh-copy"), "least", 0.4),
    Target("memcpys / copy to TP", _own("parallel_share", "cellmesh-copy"), "least", 0.4),
    *(
        Target(title, _own(measure, _ACTORS), "most", 0.5, SECONDS)
        for title, measure in (
            ("heal beside waiting calls", "heal_s"),
            ("killed, made again with weights", "restart_s"),
        )
    ),
)
