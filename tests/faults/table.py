"""The table: which cells, run one after the other on as few meshes as may be, written as
Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .cells import Result, run_cell
from .rig import Losses, Rig, measure_losses, open_rig
from .rows import DOINGS, FAULTS, Doing, Fault, doing_named, fault_named, outcome_of

Pair = tuple[Fault, Doing]

# Faults that end a process: how soon the notebook reports each of them is measured.
KILLS = ("os._exit", "SIGKILL", "segmentation fault")


def in_order(pairs: Iterable[Pair]) -> list[Pair]:
    """Column by column, as many as may be on one mesh; those of which a mesh dies last."""
    return sorted(
        pairs,
        key=lambda pair: (
            outcome_of(*pair) == "ended",
            DOINGS.index(pair[1]),
            FAULTS.index(pair[0]),
        ),
    )


class Table:
    """Runs cells and keeps what came of them; `tell` is called with each result."""

    def __init__(
        self, losses: Losses, tell: Callable[[Result], None] = lambda result: None
    ) -> None:
        self._losses = losses
        self._tell = tell
        self._stack = contextlib.ExitStack()
        self._rig: Rig | None = None
        self.results: list[Result] = []

    def run(self, fault: Fault, doing: Doing, is_serving: bool = False) -> Result:
        """Run one cell; whatever goes wrong is in its result."""
        try:
            if self._rig is None:
                self._rig = self._stack.enter_context(open_rig(self._losses))
            result = run_cell(self._rig, fault, doing, is_serving=is_serving)
        except (Exception, KeyboardInterrupt) as error:
            result = Result(
                fault.name, doing.name, "failed", failure=f"{type(error).__name__}: {error}"
            )
        if result.failure or result.outcome == "ended":
            try:
                self.close()
            except (Exception, KeyboardInterrupt) as error:
                text = f"{result.failure}\nafter its end: {type(error).__name__}: {error}".strip()
                result = Result(fault.name, doing.name, "failed", failure=text)
        self.results.append(result)
        self._tell(result)
        return result

    def close(self) -> None:
        """End the mesh that cells have shared."""
        stack, self._stack, self._rig = self._stack, contextlib.ExitStack(), None
        stack.close()


def as_markdown(results: Sequence[Result]) -> str:
    """Rows are faults, columns what ranks did: seconds until the report, until all was back."""
    found = {(result.fault, result.doing): result for result in results}
    doings = [doing.name for doing in DOINGS if any(key[1] == doing.name for key in found)]
    lines = ["| fault | the run | " + " | ".join(doings) + " |", "|---" * (len(doings) + 2) + "|"]
    for fault in FAULTS:
        if any(key[0] == fault.name for key in found):
            row = (_as_text(fault, found.get((fault.name, doing))) for doing in doings)
            lines.append(f"| {fault.name} | {fault.outcome} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _as_text(fault: Fault, result: Result | None) -> str:
    if result is None:
        return ""
    if result.failure:
        return "**failed**"
    mark = "" if result.outcome == fault.outcome else f"{result.outcome} "
    back = "" if result.outcome == "ended" else f" · {result.back_s:.2f}"
    return f"{mark}{result.report_s:.2f}{back}"


def describe(results: Sequence[Result], took_s: float) -> str:
    """When and on what machine the results came, and how they sum up."""
    failed = [result for result in results if result.failure]
    heals = sorted(result.heal_s for result in results if result.heal_s)
    deaths = sorted(
        result.report_s for result in results if result.fault in KILLS and not result.failure
    )
    stops = sorted(result.report_s for result in results if result.outcome == "stopped")
    lines = [f"{describe_machine()}: {len(results)} cells in {took_s:.0f} s, {len(failed)} failed."]
    for what, times in (
        ("Deaths reported", deaths),
        ("Runs stopped", stops),
        ("Heals with a new rank, nothing copied,", heals),
    ):
        if times:
            lines.append(
                f"{what} in {statistics.median(times):.2f} s (median; at most {times[-1]:.2f} s, "
                f"{len(times)} of them)."
            )
    return "\n".join(lines) + "\n"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe_machine() -> str:
    """The day, and what it ran on."""
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({_cpu_name()}), Python "
        f"{platform.python_version()}, torch {importlib.metadata.version('torch')}, gloo"
    )


def write_into(path: Path, mark: str, text: str) -> None:
    """Write a text to a file, or between two marks in it, if it has them."""
    old = path.read_text() if path.exists() else ""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    if begin in old and end in old:
        text = f"{old[: old.index(begin)]}{begin}\n{text}{old[old.index(end) :]}"
    path.write_text(text)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="The table of faults."
    )
    parser.add_argument("--full", action="store_true", help="all cells")
    parser.add_argument(
        "--fault", action="append", default=[], help="only this row (may be repeated)"
    )
    parser.add_argument(
        "--doing", action="append", default=[], help="only this column (may be repeated)"
    )
    parser.add_argument("--serving", action="store_true", help="while calls wait on every rank")
    parser.add_argument("--list", action="store_true", help="name rows and columns")
    parser.add_argument("--output", type=Path, help="write the table here (between its marks)")
    given = parser.parse_args(arguments)
    if given.list or not (given.full or given.fault or given.doing):
        print("faults:", ", ".join(fault.name for fault in FAULTS))
        print("doings:", ", ".join(doing.name for doing in DOINGS))
        return 0
    # A shell that starts this in the background has it ignore the stop button.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faults = {fault_named(name) for name in given.fault} or set(FAULTS)
    doings = {doing_named(name) for name in given.doing} or set(DOINGS)
    pairs = in_order((fault, doing) for fault in faults for doing in doings)
    began = time.monotonic()
    table = Table(measure_losses(), tell=_print_result)
    try:
        for fault, doing in pairs:
            table.run(fault, doing, given.serving)
    finally:
        table.close()
        text = f"{describe(table.results, time.monotonic() - began)}\n{as_markdown(table.results)}"
        if given.output:
            write_into(given.output, "faults", text)
        print(text)
    return any(result.failure for result in table.results)


def _print_result(result: Result) -> None:
    print(
        f"{result.fault} x {result.doing}: {result.outcome}, report {result.report_s:.2f} s, back "
        f"{result.back_s:.2f} s" + (f"\n{result.failure}" if result.failure else ""),
        flush=True,
    )
