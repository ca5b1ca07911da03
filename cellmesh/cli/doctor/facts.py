"""Reads the facts about this machine that the checks of `doctor` are functions of."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil
from packaging.requirements import Requirement

from ...errors import CellmeshError, HostError
from ...wire.limits import Quota, read_quota
from ...wire.ticket import make_directory, remove_directory, runtime_root
from ..filesystems import filesystem_of
from .probe import HostProbe, run_probe

_NUM_RANKS = 2
_START_S = 120.0
_COLLECTIVE_S = 30.0
# Package -> its folder below `labextensions`.
_WIDGET_PARTS = {
    "ipywidgets": "@jupyter-widgets/jupyterlab-manager",
    "anywidget": "anywidget",
}
_REDUCE = "_sum = torch.ones(1024, device=device); dist.all_reduce(_sum); _sum = _sum.tolist()"


class Trial(msgspec.Struct, frozen=True):
    """A mesh that was started, used and stopped.

    Attributes:
        backend: what ``dist.get_backend()`` said.
        start_s: seconds until every rank had answered.
        collective_s: seconds an all_reduce took, the first one not counted.
        stop_s: seconds until all had ended.
        error: what went wrong.
    """

    num_ranks: int
    backend: str = ""
    start_s: float = 0.0
    collective_s: float = 0.0
    stop_s: float = 0.0
    error: str = ""


def try_mesh() -> Trial:
    """Start a mesh, run an all_reduce on it, and stop it. Blocks."""
    try:
        # What ranks print of an error is no part of the report, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            return _try_mesh()
    except (CellmeshError, ImportError, TimeoutError, OSError) as error:
        return Trial(num_ranks=_NUM_RANKS, error=f"{type(error).__name__}: {error}")


def _try_mesh() -> Trial:
    from ... import start  # of a broken installation, it may fail

    # Every option is given, so that a project's own have no part in it.
    mesh = start(
        _NUM_RANKS,
        mesh={"dp": _NUM_RANKS},
        backend="auto",
        preload=(),
        name=f"doctor-{os.getpid()}",
        timeout_s=_START_S,
    )
    try:
        # The first all_reduce connects the ranks.
        mesh.submit_cell(_REDUCE, quiet=True).result(_COLLECTIVE_S)
        started_at = time.monotonic()
        mesh.submit_cell(_REDUCE, quiet=True).result(_COLLECTIVE_S)
        collective_s = time.monotonic() - started_at
        backend = str(mesh[0].pull("dist.get_backend()"))
    finally:
        stopping_at = time.monotonic()
        mesh.stop()
        stop_s = time.monotonic() - stopping_at
    return Trial(_NUM_RANKS, backend, mesh.start_s, collective_s, stop_s)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts that the checks look at; a limit of None means that there is none.

    Attributes:
        num_ranks: how many ranks are meant to run here.
        unmet: requirement of cellmesh (``torch>=2.11``) that is not met -> why.
        missing_calls: system calls that do not work here -> why.
        num_usable_cores: logical cores that this process may run on.
        quota_cores: how many cores' time the cgroup grants.
        omp_num_threads: the environment's OMP_NUM_THREADS, 0 if unset or no number.
        available_bytes: memory that can be had without swapping, the cgroup's limit observed.
        total_bytes: memory of the machine or the cgroup.
        shm_error: why /dev/shm cannot be written.
        open_files: RLIMIT_NOFILE, soft.
        tasks: processes and threads still to be had (RLIMIT_NPROC and the cgroup's pids.max).
        runtime_path: the directory in which each mesh makes its own.
        runtime_error: why a mesh cannot make its directory or socket there.
        tmp_path: the directory for temporary files; "" if none can be written.
        jupyter: the folder of the Jupyter whose pages show notebooks here; "" if there is none.
        missing_widgets: packages whose part in those pages is not there.
        loopback_error: why a TCP connection over 127.0.0.1 fails.
        trial: None if no mesh was started.
    """

    num_ranks: int
    probe: HostProbe
    python: str
    executable: str
    unmet: Mapping[str, str]
    missing_calls: Mapping[str, str]
    num_cores: int
    num_usable_cores: int
    quota_cores: float | None
    omp_num_threads: int
    available_bytes: int
    total_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    shm_error: str
    open_files: int | None
    tasks: int | None
    runtime_path: str
    runtime_filesystem: str
    runtime_free_bytes: int
    runtime_error: str
    tmp_path: str
    tmp_free_bytes: int
    loopback_error: str
    jupyter: str = ""
    missing_widgets: tuple[str, ...] = ()
    trial: Trial | None = None


def gather(num_ranks: int | None, wants_trial: bool, report: Callable[[str], None]) -> Facts:
    """Read the facts of this machine. Takes as long as importing torch.

    Args:
        num_ranks: how many ranks are meant to run here; None for one a GPU, or one a core.
        wants_trial: whether to start a mesh, if torch can be imported.
        report: called with what is being looked at.
    """
    report("importing torch in a process of its own")
    probe = run_probe()
    report("looking at the machine")
    num_usable_cores = len(os.sched_getaffinity(0))
    num_gpus = probe.torch.num_gpus if probe.torch is not None else 0
    quota = read_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    memory, shm_error = psutil.virtual_memory(), _why_fails(_try_shm)
    shm = os.statvfs("/" if shm_error else "/dev/shm")
    omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
    root = runtime_root()
    runtime_error = _why_fails(lambda: _try_runtime(root))
    nearest = next(path for path in (root, *root.parents) if path.exists())
    tmp_path = ""
    with contextlib.suppress(OSError):
        tmp_path = tempfile.gettempdir()
    jupyter = find_jupyter(os.environ, sys.prefix)
    facts = Facts(
        num_ranks=num_ranks or max(2, num_gpus or num_usable_cores),
        probe=probe,
        python=platform.python_version(),
        executable=sys.executable,
        unmet=_find_unmet(),
        missing_calls=_find_missing_calls(),
        num_cores=os.cpu_count() or 1,
        num_usable_cores=num_usable_cores,
        quota_cores=quota.cores,
        omp_num_threads=int(omp_num_threads) if omp_num_threads.isdecimal() else 0,
        available_bytes=_tighter(memory.available, quota.free_bytes),
        total_bytes=_tighter(memory.total, quota.memory_bytes),
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        shm_error=shm_error,
        open_files=_finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        tasks=_count_free_tasks(quota),
        runtime_path=str(root),
        runtime_filesystem=filesystem_of(nearest),
        runtime_free_bytes=psutil.disk_usage(str(nearest)).free,
        runtime_error=runtime_error,
        tmp_path=tmp_path,
        tmp_free_bytes=psutil.disk_usage(tmp_path).free if tmp_path else 0,
        loopback_error=_why_fails(_try_loopback),
        jupyter=jupyter,
        missing_widgets=find_missing_widgets(jupyter) if jupyter else (),
    )
    if not wants_trial or probe.torch is None:
        return facts
    report("starting a mesh")
    return msgspec.structs.replace(facts, trial=try_mesh())


def _find_unmet() -> dict[str, str]:
    """Return the package's requirements that are not met; none if the package is not installed."""
    unmet = {}
    try:
        requirements = map(Requirement, importlib.metadata.requires("cellmesh") or ())
    except importlib.metadata.PackageNotFoundError:
        return {}
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet[str(requirement)] = "not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet[str(requirement)] = f"{version} is installed"
    return unmet


def find_jupyter(environment: Mapping[str, str], prefix: str) -> str:
    """Return the prefix of the Python environment of the Jupyter that shows notebooks here: that
    of the server which began this notebook's kernel, else of this environment, if one is in it.
    """
    server = environment.get("JPY_PARENT_PID", "")
    with contextlib.suppress(psutil.Error, ValueError):
        command = psutil.Process(int(server)).cmdline()
        found = next((Path(word).parent.parent for word in command if word.startswith("/")), None)
        if found is not None and (found / "share" / "jupyter").is_dir():
            return str(found)
    here = Path(prefix) / "share" / "jupyter"
    return prefix if any((here / part).is_dir() for part in ("lab", "labextensions")) else ""


def find_missing_widgets(jupyter: str) -> tuple[str, ...]:
    """Return the packages whose part in Jupyter's pages is missing, without which widgets are still
    pictures.

    Args:
        jupyter: prefix of its Python environment.
    """
    extensions = [
        Path(folder) / "labextensions"
        for folder in (f"{jupyter}/share/jupyter", *_jupyter_folders())
    ]
    return tuple(
        package
        for package, part in _WIDGET_PARTS.items()
        if not any((folder / part).is_dir() for folder in extensions)
    )


def _jupyter_folders() -> list[str]:
    """Return the folders of extensions of all environments."""
    from jupyter_core.paths import SYSTEM_JUPYTER_PATH, jupyter_data_dir

    return [jupyter_data_dir(), *SYSTEM_JUPYTER_PATH]


def _find_missing_calls() -> dict[str, str]:
    """Return the names of required system calls that this kernel, or a sandbox around this process,
    refuses.
    """
    calls: dict[str, Callable[[], None]] = {
        "pidfd_open": lambda: os.close(os.pidfd_open(os.getpid())),
        "memfd_create": lambda: os.close(os.memfd_create("cellmesh-doctor")),
    }
    return {name: why for name, call in calls.items() if (why := _why_fails(call))}


def _try_shm() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(b"\0")


def _try_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2).close()


def _try_runtime(root: Path) -> None:
    """Make a mesh's directory, as a start does, and bind a socket in it."""
    directory = make_directory(root, f"doctor-{os.getpid()}")
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(directory / "agent.sock"))
    finally:
        remove_directory(directory)


def _why_fails(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except HostError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _count_free_tasks(quota: Quota) -> int | None:
    limit = _finite(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if limit is None or os.getuid() == 0:  # root is not held to it
        return quota.free_tasks
    num_tasks = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                num_tasks += process.num_threads()
        except psutil.Error:
            continue
    return _tighter(max(0, limit - num_tasks), quota.free_tasks)


def _tighter(number: int, limit: int | None) -> int:
    return number if limit is None else min(number, limit)


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
