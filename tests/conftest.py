"""What all tiers share: a runtime directory of the tests' own, and the check that nothing is left over."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from traitlets.config import Config

LEFTOVER_S = 15.0


@contextlib.contextmanager
def own_runtime_dir() -> Iterator[Path]:
    """A runtime directory for one mesh or test; a short path, as a socket's address holds 108 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="cm", dir="/tmp"))
    before = os.environ.get("JUPYTER_RUNTIME_DIR")
    os.environ["JUPYTER_RUNTIME_DIR"] = str(directory)
    try:
        yield directory
    finally:
        if before is None:
            del os.environ["JUPYTER_RUNTIME_DIR"]
        else:
            os.environ["JUPYTER_RUNTIME_DIR"] = before
        shutil.rmtree(directory, ignore_errors=True)


def kernel_config() -> Config:
    """What a kernel's manager is to be given: its sockets have names in the runtime directory.

    Ports are chosen before the kernel binds them, and what else runs may be given one of them meanwhile.
    """
    name = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"kernel-{uuid.uuid4().hex[:8]}"
    return Config({"KernelManager": {"transport": "ipc", "ip": str(name)}})


@pytest.fixture(scope="session", autouse=True)
def _no_runtime_dir_of_the_users() -> Iterator[None]:
    with own_runtime_dir():
        yield


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory of the test's own; see `check_nothing_left`."""
    with own_runtime_dir() as directory:
        yield directory


def processes_of(directory: Path) -> list[psutil.Process]:
    """Processes of meshes under a directory: the ticket is in their command lines, or, of ranks and what they
    forked, the directory in their environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        with contextlib.suppress(psutil.Error):  # it has just ended, or is not ours
            if any(f"{directory}/" in word for word in words) or (
                words[0].startswith("cellmesh-r")
                and process.environ().get("JUPYTER_RUNTIME_DIR") == str(directory)
            ):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def processes_named(directory: Path, name: str) -> list[psutil.Process]:
    """Of these the ones of that name: ``cellmesh-agent``, ``cellmesh-zygote``, ``cellmesh-store``."""
    found = []
    for process in processes_of(directory):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if process.name() == name:
                found.append(process)
    return found


def process_named(directory: Path, name: str) -> psutil.Process:
    """The one of that name."""
    (found,) = processes_named(directory, name)
    return found


def check_nothing_left(directory: Path) -> None:
    """Fail if a mesh under a directory has a process or a file after `LEFTOVER_S`."""
    _, alive = psutil.wait_procs(processes_of(directory), timeout=LEFTOVER_S)
    assert not alive, f"still running: {[(p.pid, p.name(), p.status()) for p in alive]}"
    files = sorted(directory.glob("cellmesh/*"))
    assert not files, f"left behind: {files}"
