"""Run tests/gpu and write what was seen into a report: `make gpu`.

On a machine without a GPU the tests that need one are skipped, and the report says so.
"""

from __future__ import annotations

import argparse
import datetime
import io
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from benchmarks import group_overhead
from benchmarks.machine import describe_machine

from .conftest import NUM_GPUS

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 450  # of the tests; the benchmark after them takes some seconds


@dataclass
class Collected:
    """A pytest plugin that keeps the outcome of each test."""

    rows: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a row for a test that ran or was skipped, and for a fixture that failed."""
        if report.when != "call" and report.passed:
            return
        seen = tuple(str(text) for name, text in report.user_properties if name == "seen")
        if report.skipped and isinstance(report.longrepr, tuple):
            seen = (report.longrepr[2].removeprefix("Skipped: "),)
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = str(getattr(crash, "message", report.longrepr)).splitlines()
            seen = (*seen, lines[0] if lines else "")
        name = report.nodeid.partition("::")[2].removeprefix("TestOnGpu::").removeprefix("test_")
        self.rows.append((name.replace("_", " "), report.outcome, seen))


def describe_gpus() -> dict[str, str]:
    """Name, memory and driver of the GPUs, and the libraries that torch was built with."""
    if not NUM_GPUS:
        return {"GPU": "none"}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"GPU": "; ".join(listed), "CUDA": str(torch.version.cuda), "NCCL": nccl}


def measure_overhead() -> str:
    """What `benchmarks.group_overhead` prints for NCCL; the reason if there is no GPU."""
    if not NUM_GPUS:
        return "not measured: there is no GPU"
    printed = io.StringIO()
    with redirect_stdout(printed):
        group_overhead.main(["--nccl"])
    return printed.getvalue().rstrip()


HEAD = """\
# On a GPU

Written by `make gpu` (CONTRIBUTING.md says how to run it), as printed.

**{counts}.**{remark}

| | |
|---|---|
{facts}

| test | outcome | seen |
|---|---|---|
{rows}

An all_reduce over NCCL on one rank, through cellmesh's group object and without it:

```
{overhead}
```
"""


def render(rows: Iterable[tuple[str, str, tuple[str, ...]]], overhead: str) -> str:
    """The report, as Markdown."""
    rows = list(rows)
    outcomes = [outcome for _, outcome, _ in rows]
    counts = [f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped")]
    date = datetime.date.today().isoformat()
    facts = {"date": date, **describe_gpus(), **describe_machine()}
    seen = ["<br>".join(line.replace("|", "\\|") for line in lines) for _, _, lines in rows]
    return HEAD.format(
        counts=", ".join(counts),
        remark="" if NUM_GPUS else " This machine has no GPU: what needs none ran on the CPU.",
        facts="\n".join(f"| {name} | {text} |" for name, text in facts.items()),
        rows="\n".join(
            f"| {name} | {outcome} | {text} |"
            for (name, outcome, _), text in zip(rows, seen, strict=True)
        ),
        overhead=overhead,
    )


def main() -> int:
    """Run the tests and write the report; returns 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of gpu.md")
    options = parser.parse_args()
    collected = Collected()
    arguments = [str(ROOT / "tests" / "gpu"), "--timeout=120", f"--session-timeout={TIME_LIMIT_S}"]
    code = pytest.main(
        [*arguments, "-p", "no:cacheprovider", "--rootdir", str(ROOT)], plugins=[collected]
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.md").write_text(render(collected.rows, measure_overhead()))
    print(f"written: {options.out / 'gpu.md'}")
    return int(code != pytest.ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
