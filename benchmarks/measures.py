"""What is measured, in the tables that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .units import MEGABYTES, MILLISECONDS, PER_SECOND, SECONDS, Unit


@dataclass(frozen=True)
class Row:
    """A measure, and who has it.

    Args:
        title: what it is.
        measure: its name in samples.
        unit: how it is shown.
        own: who of ours has it.
        beside: the contestants of the group's columns that it is compared with, and what they call
            it; None for all of them, by the same name.
        more_is_better: what a ratio above 1 means; ratios are always "times better".
        has_ratios: whether ratios say anything.
    """

    title: str
    measure: str
    unit: Unit
    own: str = "cellmesh"
    beside: Mapping[str, str] | None = None
    more_is_better: bool = False
    has_ratios: bool = True

    def measure_of(self, contestant: str) -> str:
        """What a contestant calls it; empty if it is not compared with this one."""
        return self.measure if self.beside is None else self.beside.get(contestant, "")


@dataclass(frozen=True)
class Group:
    """A table of measures.

    Args:
        title: of the table.
        columns: the contestants beside cellmesh, floors first.
        rows: what was measured.
        note: what stands below.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str


def _bulk(title: str, measure: str, floor: str) -> Row:
    beside = {"memory": floor} | dict.fromkeys(("ray", "monarch", "ipyparallel"), measure)
    return Row(title, measure, MILLISECONDS, "cellmesh-bulk", beside)


def _step(title: str, measure: str, **beside: str) -> Row:
    others = {name.replace("_", "-"): other for name, other in beside.items()}
    return Row(title, measure, SECONDS, "cellmesh-step", others)


_BY_IMPORT = {"torch-import": "start_s"}
_LEAN = {"lean-call": "call_s", "ipyparallel": "cell_s"}
_LEAN_P99 = {"lean-call": "call_p99_s", "ipyparallel": "cell_p99_s"}

GROUPS = (
    Group(
        "The first step",
        ("torch-import", "torchrun-step", "monarch-step", "ipyparallel-step"),
        (
            _step(
                "`%dist_start 8` and the step, 10 s after `%load_ext`",
                "kernel_s",
                torch_import="start_s",
            ),
            _step("a script, from its call: first run", "script_first_s", torchrun_step="script_s"),
            _step("a script, from its call: later runs", "script_s", torchrun_step="script_s"),
            _step(
                "later runs, from the call that starts the ranks",
                "step_s",
                monarch_step="step_s",
                ipyparallel_step="step_s",
            ),
            _step("imports of transformers, a project's first notebook", "imports_first_s"),
            _step("imports of transformers, its second notebook", "imports_s"),
        ),
        "Eight ranks with one thread each build an MLP, shard it by FSDP2 and take a step, until "
        "its loss is there: the same source for all. Modules that a script's first run imports on "
        "each rank are imported once in later runs. The last two are the first cell of a kernel.",
    ),
    Group(
        "Starts and memory",
        ("torch-import", "monarch", "ipyparallel"),
        (
            Row("import of the package", "import_s", MILLISECONDS, has_ratios=False),
            Row("start of 8 ranks, torch imported", "start_s", SECONDS),
            Row(
                "`%dist_start 8`, import hidden",
                "hidden_start_s",
                SECONDS,
                "cellmesh-starts",
                _BY_IMPORT,
            ),
            Row(
                "`%dist_start 8` after a stop",
                "kept_start_s",
                SECONDS,
                "cellmesh-starts",
                _BY_IMPORT,
            ),
            Row("restart of 8 ranks", "restart_s", SECONDS),
            Row("start of 64 ranks", "start_s", SECONDS, "cellmesh-64", _BY_IMPORT),
            Row("restart of 64 ranks", "restart_s", SECONDS, "cellmesh-64", {}),
            Row("memory of the tree, 8 ranks (PSS)", "pss_bytes", MEGABYTES),
            Row("memory of the tree, 64 ranks (PSS)", "pss_bytes", MEGABYTES, "cellmesh-64", {}),
            Row("start of 256 ranks", "start_s", SECONDS, "cellmesh-256", _BY_IMPORT),
            Row("memory of the tree, 256 ranks (PSS)", "pss_bytes", MEGABYTES, "cellmesh-256", {}),
        ),
        "A start is from the call that starts, the package already imported, until every rank has "
        "answered with torch imported; for cellmesh the process group and the DeviceMesh are up "
        "then as well, the peers have none. `%dist_start` is timed in a kernel.",
    ),
    Group(
        "Calls and cells",
        ("lean-call", "zeromq-hop", "monarch", "ipyparallel"),
        (
            Row("no-op call on 8, median", "call_s", MILLISECONDS),
            Row("no-op call on 8, p99", "call_p99_s", MILLISECONDS),
            Row("no-op call on 8, CPU time of all processes", "call_cpu_s", MILLISECONDS),
            Row(
                "cell `pass` on 8 in a kernel, median",
                "cell_s",
                MILLISECONDS,
                "cellmesh-cells",
                _LEAN,
            ),
            Row(
                "cell `pass` on 8 in a kernel, p99",
                "cell_p99_s",
                MILLISECONDS,
                "cellmesh-cells",
                _LEAN_P99,
            ),
            Row("pipelined no-op calls on 8", "calls_per_s", PER_SECOND, more_is_better=True),
            Row(
                "the same with a 1 KB argument", "calls_1kb_per_s", PER_SECOND, more_is_better=True
            ),
            Row("no-op call on 64, median", "call_s", MILLISECONDS, "cellmesh-64", {}),
            Row("no-op call on 64, p99", "call_p99_s", MILLISECONDS, "cellmesh-64", {}),
            Row("pipelined no-op calls on 64", "calls_per_s", PER_SECOND, "cellmesh-64", {}),
        ),
        "Lean call: the floor of a call of cellmesh's design; bare ZeroMQ hop: a byte each way.",
    ),
    Group(
        "Bulk data",
        ("memory", "ray", "monarch", "ipyparallel"),
        (
            _bulk("128 MB array to all 8, first", "push_first_s", "memcpy_128mb_s"),
            _bulk("128 MB array to all 8, warm", "push_warm_s", "memcpy_128mb_s"),
            _bulk("1 GB tensor sharded 8 ways, first", "shard_first_s", "memfd_write_1gb_s"),
            _bulk("1 GB tensor sharded 8 ways, warm", "shard_warm_s", "memcpy_1gb_s"),
            _bulk(
                "8 x 128 MB gathered, first (torch imported)", "gather_first_s", "memfd_write_1gb_s"
            ),
            _bulk("8 x 128 MB gathered, again", "gather_warm_s", "memcpy_1gb_s"),
        ),
        "Memory: one copy of as many bytes into warm pages; for what is 1 GB and first, one "
        "`write` into a fresh memfd. MB and GB are MiB and GiB here.",
    ),
)
