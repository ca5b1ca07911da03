"""The selection of `make compat`: pytest refuses the whole run for one wrong name."""

from __future__ import annotations

import subprocess
import sys

from tests.compat.__main__ import ROOT, SELECTION


def test_selection_names_tests_that_exist() -> None:
    collect = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", f"@{SELECTION}"]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
