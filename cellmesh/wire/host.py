"""Identifies hosts and processes, as a ticket may be of another host, and a process number may be
in use again; compares the versions that hosts have installed, as a mesh needs the same on all.

Process numbers are used again, and a home directory may be shared by hosts and containers.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host, boot and PID namespace of a process: what two processes must share for one to address
    the other by its process number.

    Attributes:
        host: the host's name.
        boot: identity of the host's uptime.
        pid_namespace: of process numbers.
    """

    host: str
    boot: str
    pid_namespace: str


def this_place() -> Place:
    """Return the host, boot and PID namespace in which this process runs."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return Place(host_name(), _read("/proc/sys/kernel/random/boot_id"), namespace)


def host_name() -> str:
    """Return this host's name."""
    return socket.gethostname()


def process_stat(pid: int | str) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` that follow the process's name; [] if there is no
    such process.

    They are bytes, as the name before them may be any: the kernel cuts it to 15 bytes, within a
    character of UTF-8, too.

    Raises:
        OSError: they cannot be read, as no descriptor is free: whether the process is there is not
            known.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def started_ticks(pid: int) -> int:
    """Return when a process started, in ticks of its host's clock; 0 if there is no such process.

    Together with the process's number it means one process for as long as the host is up.
    """
    fields = process_stat(pid)
    return 0 if not fields or fields[0] in b"ZX" else int(fields[19])


def is_process(pid: int, ticks: int) -> bool:
    """Return whether a process number still belongs to the process that had this start time."""
    return pid > 0 and started_ticks(pid) == ticks != 0


def own_version() -> str:
    """Return the version of cellmesh in this process."""
    package = importlib.import_module(__name__.partition(".")[0])
    return str(package.__version__)


def own_package() -> str:
    """Return the directory that cellmesh was imported from."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def own_torch() -> str:
    """Return the version of torch that this process has or would import; "" without torch."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    import importlib.metadata  # 20 ms, and no agent needs it

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def own_python() -> str:
    """Return the version of Python in this process."""
    return platform.python_version()


def fits(python: str, other: str) -> bool:
    """Return whether pickles and code objects of one Python version can be loaded by another."""
    return python.split(".")[:2] == other.split(".")[:2]


def same_release(version: str, other: str) -> bool:
    """Return whether two versions of a package differ at most in how it was built (``2.13.0``,
    ``2.13.0+cpu``).
    """
    return version.partition("+")[0] == other.partition("+")[0]


def format_span(seconds: float) -> str:
    """Format a duration for users: ``12 min``."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.95 * unit_s or (unit == "min" and seconds >= 60):
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


# NCCL as torch's wheels depend on it, for each CUDA.
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


class Versions(msgspec.Struct, frozen=True):
    """The versions of cellmesh, Python, torch and NCCL that a host has installed.

    Attributes:
        cellmesh, python, torch: their versions; torch's is "" without torch.
        nccl: the version of NCCL's package; "" for none, as where torch has its own.
    """

    cellmesh: str
    python: str
    torch: str
    nccl: str = ""


def own_versions() -> Versions:
    """Return the versions that this process would import, without importing anything."""
    return Versions(own_version(), own_python(), own_torch(), _own_nccl())


def describe_mismatch(by_host: Mapping[str, Versions]) -> str:
    """Describe which hosts have which versions, where these do not fit; "" if they do.

    Args:
        by_host: the versions by the host's name.
    """
    for what, attribute, agree in (
        ("cellmesh", "cellmesh", str.__eq__),
        ("Python", "python", fits),
        ("torch", "torch", same_release),
        ("NCCL", "nccl", str.__eq__),
    ):
        found = {host: getattr(versions, attribute) for host, versions in by_host.items()}
        if what == "NCCL":  # a host without GPUs has none
            found = {host: version for host, version in found.items() if version}
        first = next(iter(found.values()), "")
        if not all(agree(first, version) for version in found.values()):
            listed = ", ".join(f"{host} has {version or 'none'}" for host, version in found.items())
            return f"hosts differ in their {what}: {listed}; install the same version on all"
    return ""


def _own_nccl() -> str:
    import importlib.metadata  # not for meshes on one host

    for name in _NCCL:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
