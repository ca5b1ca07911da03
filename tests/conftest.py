"""What all tiers share: a runtime directory of the tests' own, and the check that nothing is left
over.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from traitlets.config import Config

from cellmesh.wire import marks

if TYPE_CHECKING:
    from tests.support.shared_prestart import SharedPrestart

LEFTOVER_S = 15.0
# How long output waits for its like of other ranks: on a machine with more to do than cores, what
# ranks say after a barrier is some tenths of a second apart.
FOLD = "cellmesh.controller.output.fold"
PATIENCE_S = {"HOLD_S": 1.0, "HOLD_RESULT_S": 3.0, "HOLD_DISPLAY_S": 2.0, "HOLD_TRACE_S": 2.0}
PRESTART = "cellmesh.controller.session.launch.prestart"
ROOT = Path(__file__).resolve().parents[1]
# By runtime directory, of meshes that were forked from a zygote which waited in another directory.
FORKED_MARKS: dict[Path, set[str]] = collections.defaultdict(set)
# Tiers in the order in which they run: the files that take longest begin first, those that keep a
# core busy not all at once, and small files are left to fill the end.
ORDER = ("exactness", "browser", "faults", "gpu", "notebooks", "programs", "mesh", "pair", "core")
# What makes a tier's tests run that did not.
TO_RUN = {
    "browser": "apt-get install chromium && .venv/bin/pytest tests/browser",
    "compat": "make compat",
    "gpu": "make gpu, on a machine with a GPU",
    "hosts": "sudo make hosts",
}

# How hypothesis runs: the same examples each time; `--hypothesis-profile search` looks for others.
settings.register_profile(
    "repeatable",
    deadline=None,
    max_examples=100,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("repeatable")

# A shell that runs a job in the background has it ignore SIGINT, and what the job starts: kernels,
# which Jupyter starts with the default, scripts and their children. Tests that press the stop
# button need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        tier = item.path.relative_to(ROOT / "tests").parts[0]
        return ORDER.index(tier) if tier in ORDER else len(ORDER)

    items.sort(key=place)


def tiers_left_out(
    reports: Mapping[str, Iterable[pytest.TestReport]], tiers: Iterable[str]
) -> list[str]:
    """A line for each tier of which some test did not run, with the command that makes it run.

    Args:
        reports: outcome -> what was reported of tests with that outcome.
        tiers: the folders of tests.
    """
    ran, skipped = (
        collections.Counter(
            report.nodeid.split("/")[1] for kind in kinds for report in reports.get(kind, ())
        )
        for kinds in (("passed", "failed", "error", "xfailed"), ("skipped",))
    )
    lines = []
    for tier in tiers:
        command = TO_RUN.get(tier, f".venv/bin/pytest -rs tests/{tier}")
        if not ran[tier]:
            lines.append(f"tests/{tier} did not run: {command}")
        elif skipped[tier]:
            lines.append(f"tests/{tier}: {skipped[tier]} skipped: {command}")
    return lines


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if [Path(argument).resolve() for argument in config.args] != [ROOT / "tests"]:
        return  # a part was asked for
    folders = [path for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists()]
    tiers = sorted(path.name for path in folders if path.name != "support")
    for line in tiers_left_out(terminalreporter.stats, tiers):
        terminalreporter.write_line(line, yellow=True)


def run_python(
    *arguments: object, check: bool = True, timeout: float = 100, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter to its end; fail with its error output unless its status is 0."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert not (check and done.returncode), done.stderr
    return done


@contextlib.contextmanager
def own_runtime_dir() -> Iterator[Path]:
    """A runtime directory for one mesh or test; a short path, as a socket's address holds 108
    bytes.
    """
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


@contextlib.contextmanager
def clean_runtime_dir() -> Iterator[Path]:
    """A runtime directory (`own_runtime_dir`) in which nothing is left in the end."""
    with own_runtime_dir() as directory:
        yield directory
        check_nothing_left(directory)


def kernel_config() -> Config:
    """What a kernel's manager is to be given: its sockets have names in the runtime directory.

    Ports are chosen before the kernel binds them, and what else runs may be given one of them
    meanwhile.
    """
    name = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / f"kernel-{uuid.uuid4().hex[:8]}"
    return Config({"KernelManager": {"transport": "ipc", "ip": str(name)}})


def write_ipython_profile(directory: Path, prestart_s: float = 0.0) -> None:
    """Have kernels with this IPYTHONDIR wait `PATIENCE_S`; no name of a notebook is used for it.

    Their zygotes wait `prestart_s` for a mesh; by default they have none of their own: a kernel
    whose mesh has ended has no process then. They use the one that the tests' process lends, if it
    does (`support.kernel_prestart`).
    """
    startup = directory / "profile_default" / "startup"
    startup.mkdir(parents=True)
    values = {FOLD: PATIENCE_S, PRESTART: {"KEEP_S": prestart_s}}
    lines = [
        f"__import__({name!r}, fromlist=['']).__dict__.update({new!r})\n"
        for name, new in values.items()
    ]
    if prestart_s == 0:
        file = ROOT / "tests" / "support" / "kernel_prestart.py"
        lines.append(f"__import__('runpy').run_path({str(file)!r}, run_name='cellmesh tests')\n")
    (startup / "00-patience.py").write_text("".join(lines))


@pytest.fixture(scope="session", autouse=True)
def _no_directories_of_the_users() -> Iterator[None]:
    with (
        own_runtime_dir(),
        tempfile.TemporaryDirectory(dir="/tmp") as ipython,
        pytest.MonkeyPatch.context() as patch,
    ):
        write_ipython_profile(Path(ipython))
        patch.setenv("IPYTHONDIR", ipython)
        yield


@pytest.fixture(scope="session")
def shared_prestart(_no_directories_of_the_users: None) -> Iterator[SharedPrestart]:
    """The zygote that waits for all meshes, also those of kernels."""
    from tests.support.shared_prestart import lending

    with lending(Path(os.environ["IPYTHONDIR"])) as waiting:
        yield waiting


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory of the test's own; see `check_nothing_left`."""
    with own_runtime_dir() as directory:
        yield directory


def processes_of(directory: Path) -> list[psutil.Process]:
    """Processes of meshes under a directory: the ticket is in their command lines, or, of ranks and
    what they forked, the directory or a mesh's mark in their environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        with contextlib.suppress(psutil.Error):  # it has just ended, or is not ours
            if any(f"{directory}/" in word for word in words) or (
                words[0].startswith("cellmesh-r") and is_started_under(directory, process.environ())
            ):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def is_started_under(directory: Path, environment: Mapping[str, str]) -> bool:
    """Whether an environment is that of a mesh's process, whose runtime directory this is."""
    mark = environment.get(marks.VARIABLE, "").partition(":")[0]
    return (
        environment.get("JUPYTER_RUNTIME_DIR") == str(directory) or mark in FORKED_MARKS[directory]
    )


def processes_named(directory: Path, name: str) -> list[psutil.Process]:
    """Of these the ones of that name: ``cellmesh-agent``, ``cellmesh-zygote``,
    ``cellmesh-store``.
    """
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


def stop_process(pid: int) -> None:
    """SIGSTOP, until the process has stopped: a thread of it may run on for a moment on a busy
    machine.
    """
    os.kill(pid, signal.SIGSTOP)
    stopped, deadline = psutil.Process(pid), time.monotonic() + LEFTOVER_S
    while stopped.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"process {pid} has not stopped: {stopped.status()}"
        threading.Event().wait(0.001)


def check_nothing_left(directory: Path) -> None:
    """Fail if a mesh under a directory has a process or a file after `LEFTOVER_S`.

    A zygote of shells is to outlive them, and is ended here.
    """
    for process in processes_of(directory):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if marks.argument(directory / "cellmesh", 0) in process.cmdline():
                process.kill()
    _, alive = psutil.wait_procs(processes_of(directory), timeout=LEFTOVER_S)
    assert not alive, f"still running: {[(p.pid, p.name(), p.status()) for p in alive]}"
    files = sorted(directory.glob("cellmesh/*"))
    assert not files, f"left behind: {files}"
