"""Ends a start of a mesh at a step of it: by the notebook's death, or by the stop button."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

import cellmesh as cm
from tests.conftest import LEFTOVER_S, processes_of

_SESSION = "cellmesh.controller.session"
# What a start is about to do once its engine has given nodes.
STEPS = {
    "start agents": f"{_SESSION}.launch.commands.HostCommands._run",
    "wait for ranks": f"{_SESSION}.session.Session.wait_until_ready",
    "let agents go": f"{_SESSION}.launch.commands.HostCommands.let_go",
}
_KILLED = """
import json, os, signal, sys
from unittest import mock
import cellmesh as cm
step, options = sys.argv[1:]
mock.patch(step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)).start()
cm.start(**json.loads(options))
"""


def die_at(step: str, **options: Any) -> None:
    """Have a process start a mesh that is killed at a step of `STEPS`."""
    words = [sys.executable, "-c", _KILLED, STEPS[step], json.dumps(options)]
    assert subprocess.run(words, timeout=100).returncode == -signal.SIGKILL


def interrupt_at(step: str, **options: Any) -> None:
    """Start a mesh, and press the stop button at a step of `STEPS`."""
    with mock.patch(STEPS[step], side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        cm.start(**options)


def die_with_mesh(**options: Any) -> None:
    """Have a process start a mesh, bind `kept` in its ranks, and be killed."""
    script = (
        "import json, os, signal, sys\n"
        "import cellmesh as cm\n"
        "mesh = cm.start(**json.loads(sys.argv[1]))\n"
        "mesh.cell('kept = rank + 5')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", script, json.dumps(options)]
    assert subprocess.run(words, timeout=100).returncode == -signal.SIGKILL


def remove_dead(*directories: Path) -> None:
    """Wait for the end of the processes of meshes under these directories, and remove their files,
    as `cellmesh ps` does.
    """
    for directory in directories:
        psutil.wait_procs(processes_of(directory), timeout=LEFTOVER_S)
    subprocess.run([sys.executable, "-m", "cellmesh", "ps"], check=True, capture_output=True)
