"""Looks at this machine, once; everything that `doctor` does not decide but must ask for."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from ...wire.cgroups import Quota, read_quota
from ...wire.host import host_name
from ...wire.ticket import find_strange, runtime_root
from ..meshes import filesystem_of, find_meshes
from .facts import Facts, Hardware, Limits, Meshes, Network, RuntimeDirectory, System, Trial
from .probe import Driver, Probe
from .torch_checks import MINIMUMS

_PROBE_S = 180.0
_PR_GET_CHILD_SUBREAPER = 37


def gather(num_ranks: int | None, wants_trial: bool, report: Callable[[str], None]) -> Facts:
    """Look at this machine. Takes as long as importing torch.

    Args:
        num_ranks: how many ranks are meant to run here; None for one a GPU, or one a core.
        wants_trial: whether to start a mesh, if torch can be imported.
        report: told what is being looked at.
    """
    report("importing torch in a process of its own")
    probe = run_probe([sys.executable, "-c", _probe_code()], _PROBE_S)
    report("looking at the machine")
    quota = read_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    hardware = read_hardware(quota)
    if num_ranks is None:
        num_gpus = probe.torch.num_gpus if probe.torch is not None else 0
        num_ranks = max(2, num_gpus or hardware.num_usable_cores)
    facts = Facts(
        num_ranks=num_ranks,
        system=read_system(),
        probe=probe,
        hardware=hardware,
        limits=read_limits(quota),
        runtime=read_runtime(runtime_root()),
        network=read_network(),
        kernels=read_kernels(),
        meshes=read_meshes(runtime_root()),
    )
    if not wants_trial or probe.torch is None:
        return facts
    report("starting a mesh")
    return msgspec.structs.replace(facts, trial=_try_mesh())


def run_probe(command: list[str], timeout_s: float) -> Probe:
    """Run the probe's process.

    Args:
        command: starts it.
        timeout_s: how long it may take, in seconds.
    """
    # As the agent starts the zygote: OpenBLAS starts its pool when numpy is imported, unless told
    # not to.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return _no_probe(f"import torch has not ended after {timeout_s:.0f} s")
    except OSError as error:
        return _no_probe(f"{command[0]} cannot be started: {error}")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else b"", type=Probe)
    except msgspec.MsgspecError:
        code = done.returncode
        ending = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return _no_probe(f"the process that imported torch {ending}. {last}".strip())


def read_system() -> System:
    """Operating system and interpreter."""
    packages = {}
    for package in MINIMUMS:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return System(
        name=platform.system(),
        release=platform.release(),
        python=sys.version_info[:3],
        executable=sys.executable,
        packages=packages,
        missing_calls=_missing_calls(),
    )


def read_hardware(quota: Quota) -> Hardware:
    """Cores, memory, shared memory.

    Args:
        quota: what the cgroup allows.
    """
    memory = psutil.virtual_memory()
    shm_error, shm_bytes, shm_free_bytes = "", 0, 0
    try:
        space = os.statvfs("/dev/shm")
        shm_bytes, shm_free_bytes = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(b"\0")
    except OSError as error:
        shm_error = error.strerror or str(error)
    omp_num_threads = os.environ.get("OMP_NUM_THREADS", "")
    return Hardware(
        num_cores=os.cpu_count() or 1,
        num_usable_cores=len(os.sched_getaffinity(0)),
        quota_cores=quota.cores,
        available_bytes=_tighter(memory.available, quota.free_bytes),
        total_bytes=_tighter(memory.total, quota.memory_bytes),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        shm_error=shm_error,
        omp_num_threads=int(omp_num_threads) if omp_num_threads.isdecimal() else 0,
    )


def read_limits(quota: Quota) -> Limits:
    """Limits of a process started from here."""
    open_files, open_files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    address_space_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    left = [] if quota.free_tasks is None else [quota.free_tasks]
    if tasks != resource.RLIM_INFINITY and os.getuid() != 0:  # root is not held to it
        left.append(max(0, tasks - _count_tasks()))
    return Limits(
        open_files=_finite(open_files),
        open_files_hard=_finite(open_files_hard),
        tasks=min(left, default=None),
        address_space_bytes=_finite(address_space_bytes),
    )


def read_runtime(root: Path) -> RuntimeDirectory:
    """The directory of all meshes, or the place where it would be made.

    Args:
        root: as `runtime_root` gives.
    """
    nearest = next(path for path in (root, *root.parents) if path.exists())
    facts = nearest.stat()
    error = ""
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=nearest) as directory:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(os.path.join(directory, "s"))
            (Path(directory) / "ticket").write_bytes(b"\0" * 4096)
    except OSError as exc:
        error = exc.strerror or str(exc)
    return RuntimeDirectory(
        path=str(root),
        exists=root.exists(),
        owned=facts.st_uid == os.getuid(),
        mode=stat.S_IMODE(facts.st_mode),
        filesystem=filesystem_of(nearest),
        free_bytes=psutil.disk_usage(str(nearest)).free,
        error=error,
        socket_bytes=len(os.fsencode(root / "mesh-4194304-zzzz" / "agent.sock")),
    )


def read_network() -> Network:
    """Loopback, the host's name, interfaces."""
    hostname = host_name()
    addresses: tuple[str, ...] = ()
    hostname_error = ""
    started_at = time.monotonic()
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        hostname_s = time.monotonic() - started_at
        addresses = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError as error:
        hostname_s = time.monotonic() - started_at
        hostname_error = error.strerror or str(error)
    return Network(
        loopback_error=_try_loopback(),
        hostname=hostname,
        addresses=addresses,
        hostname_error=hostname_error,
        hostname_s=hostname_s,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        chosen={
            name: os.environ[name]
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            if os.environ.get(name)
        },
    )


def read_kernels() -> dict[str, str]:
    """Jupyter's kernels: name -> the interpreter that each starts."""
    from jupyter_client.kernelspec import KernelSpecManager

    specs = KernelSpecManager().get_all_specs()
    return {name: (entry["spec"].get("argv") or [""])[0] for name, entry in specs.items()}


def read_meshes(root: Path) -> Meshes:
    """The meshes under a root.

    Args:
        root: as `runtime_root` gives.
    """
    found = find_meshes(root)
    return Meshes(
        running=tuple(each.ticket.name for each in found if each.living),
        stale=tuple(each.ticket.name for each in found if each.state in ("stale", "leftover")),
        strange={str(path): why for path, why in find_strange(root)},
    )


def _probe_code() -> str:
    package_parent = str(Path(__file__).parents[3])
    return (
        f"import sys; sys.path.append({package_parent!r}); from "
        "cellmesh.cli.doctor.probe import main; main()"
    )


def _try_mesh() -> Trial:
    try:
        from .smoke_test import try_mesh
    except ImportError as error:
        return Trial(num_ranks=2, error=f"{type(error).__name__}: {error}")
    return try_mesh()


def _no_probe(error: str) -> Probe:
    return Probe(torch=None, error=error, driver=Driver())


def _missing_calls() -> dict[str, str]:
    """System calls that this kernel, or a sandbox round us, refuses."""
    calls: dict[str, Callable[[], int]] = {
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
        "memfd_create": lambda: os.memfd_create("cellmesh-doctor"),
    }
    missing = {}
    for name, call in calls.items():
        try:
            os.close(call())
        except OSError as error:
            missing[name] = error.strerror or str(error)
    answer = ctypes.c_int()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) != 0:
        missing["prctl(PR_SET_CHILD_SUBREAPER)"] = os.strerror(ctypes.get_errno())
    return missing


def _try_loopback() -> str:
    """Why a TCP connection over 127.0.0.1 fails; "" if it does not."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _count_tasks() -> int:
    """Threads of this user's processes."""
    uid = os.getuid()
    num_tasks = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == uid:
                num_tasks += process.num_threads()
        except psutil.Error:
            continue
    return num_tasks


def _tighter(number: int, limit: int | None) -> int:
    return number if limit is None else min(number, limit)


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit
