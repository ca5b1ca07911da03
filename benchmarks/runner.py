"""Runs one driver in a process of its own, and sees to it that nothing of it is left."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .contestants import Contestant
from .drivers.protocol import Sample
from .processes import MARK, find_marked, kill, wait_for_end

_ROOT = Path(__file__).parents[1]
_DRIVER_S = 600.0
_LEAVE_S = 5.0


class DriverFailed(Exception):
    """A driver gave no sample; says what it printed."""


@dataclass(frozen=True)
class Outcome:
    """A driver's sample, and how many of its processes had not ended five seconds after it."""

    sample: Sample
    num_left_behind: int


def run_driver(
    contestant: Contestant, python: Path | str = sys.executable, quick: bool = False
) -> Outcome:
    """Measure one contestant once.

    Args:
        contestant: whom.
        python: the interpreter of its environment.
        quick: with fewer repetitions.

    Raises:
        DriverFailed: it failed, took too long or said nothing.
    """
    _warm(contestant, python)
    mark = secrets.token_hex(8)
    command = [
        str(python),
        "-m",
        f"benchmarks.drivers.{contestant.driver}",
        str(contestant.num_ranks),
    ]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
        # Files, not pipes: what a driver leaves behind would hold a pipe open, and us with it.
        out, err = Path(scratch, "stdout"), Path(scratch, "stderr")
        environment = {
            **os.environ,
            MARK: mark,
            "IPYTHONDIR": f"{scratch}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{scratch}/jupyter",
            "TMPDIR": scratch,
        }
        with out.open("wb") as stdout, err.open("wb") as stderr:
            driver = subprocess.Popen(
                [*command, *(["--quick"] if quick else [])],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        try:
            status: int | str = driver.wait(_DRIVER_S)
        except subprocess.TimeoutExpired:
            status = f"none after {_DRIVER_S:.0f} s"
        finally:
            left = find_marked(mark)
            if driver.poll() is not None:
                left = wait_for_end(left, _LEAVE_S)
            kill(left)
            driver.wait()
        lines = out.read_text(errors="replace").splitlines()
        if status != 0 or not lines:
            said = err.read_text(errors="replace")[-3000:]
            raise DriverFailed(f"{contestant.name}: exit status {status}\n{said}".strip())
        return Outcome(json.loads(lines[-1]), len(left))


def _warm(contestant: Contestant, python: Path | str) -> None:
    """A machine that reclaims what lies idle would else have the start measure its disk."""
    try:
        subprocess.run(
            [str(python), "-c", f"import {contestant.imports}"], check=True, capture_output=True
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace")[-3000:]
        raise DriverFailed(
            f"{contestant.name}: cannot import {contestant.imports}\n{said}"
        ) from error
