"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from cellmesh import __version__


def describe_machine() -> dict[str, str]:
    """Facts without which a figure means nothing, by name."""
    load_1min, _, _ = os.getloadavg()
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "CPU": _cpu_model(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "torch": version("torch"),
        "cellmesh": f"{__version__}, {describe_commit(Path(__file__).parents[1])}",
        "load before": f"{load_1min:.1f} runnable processes in the minute before",
    }


def describe_commit(root: Path) -> str:
    """The commit that is measured, and whether the code differs from it; results that were written
    do not.

    Args:
        root: of the checkout.
    """
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changes = _git(
            root, "status", "--porcelain", "--", "cellmesh", "benchmarks", ":!benchmarks/*.md"
        )
    except (OSError, subprocess.CalledProcessError):
        return "of no commit"  # carried here without its history
    return f"commit {head}{' + changes' if changes else ''}"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
