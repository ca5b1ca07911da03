"""What a run of the tests says of itself, and what it does not take over from the shell that it
runs in.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import tiers_left_out

# Of the tests of the stop button: in the tests' own process, and in a kernel.
PRESSED = (
    "tests/core/controller/test_run.py",
    "tests/mesh/test_kernel.py::test_the_stop_button_gets_ranks_out_of_a_collective",
)


def test_tiers_that_did_not_run_are_named_with_what_makes_them_run() -> None:
    def of(*tiers: str) -> Any:
        return [SimpleNamespace(nodeid=f"tests/{tier}/test_one.py::test") for tier in tiers]

    reports = {
        "passed": of("core", "gpu"),
        "error": of("mesh"),
        "skipped": of("browser", "gpu", "gpu"),
    }
    assert tiers_left_out(reports, ["browser", "compat", "core", "gpu", "mesh", "pair"]) == [
        "tests/browser did not run: apt-get install chromium && .venv/bin/pytest tests/browser",
        "tests/compat did not run: make compat",
        "tests/gpu: 2 skipped: make gpu, on a machine with a GPU",
        "tests/pair did not run: .venv/bin/pytest -rs tests/pair",
    ]


def test_the_stop_button_works_where_the_shell_ignores_sigint() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PRESSED]
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
