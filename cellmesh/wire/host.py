"""Identifies hosts and processes, and compares the versions of packages that hosts have installed.

Process numbers are reused, and hosts and containers may share a home directory: a ticket may be
another host's. All hosts of a mesh need the same versions.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from .process import wait_readable


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host, boot and PID namespace of a process; two processes can address each other by process
    number only if all three are equal.

    Attributes:
        host: name of the host.
        boot: identity of the host's current boot.
        pid_namespace: identity of the process's PID namespace.
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

    The fields are bytes, as the name before them need not be valid UTF-8: the kernel cuts it to 15
    bytes, also within a character.

    Raises:
        OSError: the file cannot be read, for example without a free descriptor; whether the process
            exists is unknown.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def started_ticks(pid: int) -> int:
    """Return the start time of a process, in clock ticks of its host; 0 if it does not run.

    Together with the process number it identifies one process as long as the host is up.
    """
    fields = process_stat(pid)
    return 0 if not fields or fields[0] in b"ZX" else int(fields[19])


def is_process(pid: int, ticks: int) -> bool:
    """Return whether the process with this number and start time still runs."""
    return pid > 0 and started_ticks(pid) == ticks != 0


class Process(msgspec.Struct, frozen=True):
    """A process on this machine, whether a child of this process or not.

    Attributes:
        pid: process id.
        ticks: start time in clock ticks (`started_ticks`); 0 if it had ended already.
    """

    pid: int
    ticks: int

    def open(self) -> int:
        """Open a pidfd of the process.

        Raises:
            ProcessLookupError: it has ended.
        """
        if self.ticks:
            pidfd = os.pidfd_open(self.pid)
            if is_process(self.pid, self.ticks):
                return pidfd
            os.close(pidfd)  # another process has its number
        raise ProcessLookupError(f"process {self.pid} has ended")

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the process ends; return False if it has not ended in time."""
        try:
            pidfd = self.open()
        except ProcessLookupError:
            return True
        try:
            return bool(wait_readable([pidfd], timeout_s))
        finally:
            os.close(pidfd)


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
    origin = getattr(importlib.util.find_spec("torch"), "origin", None)
    try:  # not by `importlib.metadata`, whose import takes 20 ms, for which a start would wait
        text = Path(origin or "").with_name("version.py").read_text()
    except (OSError, ValueError):
        return ""
    return text.partition("__version__ = ")[2].partition("\n")[0].strip("'\"")


def own_python() -> str:
    """Return the version of Python in this process."""
    return sys.version.split()[0]


def fits(python: str, other: str) -> bool:
    """Return whether pickles and code objects of one Python version can be loaded by another."""
    return python.split(".")[:2] == other.split(".")[:2]


def same_release(version: str, other: str) -> bool:
    """Return whether two versions of a package are equal but for the build (``2.13.0+cpu``)."""
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


class Versions(msgspec.Struct, frozen=True):
    """The versions of cellmesh, Python and torch that a host has installed.

    Attributes:
        cellmesh, python, torch: their versions; torch's is "" without torch.
    """

    cellmesh: str
    python: str
    torch: str


def own_versions() -> Versions:
    """Return the versions that this process would import, without importing anything."""
    return Versions(own_version(), own_python(), own_torch())


def describe_mismatch(by_host: Mapping[str, Versions]) -> str:
    """Return an error text on packages of which hosts have different versions; "" if all versions
    match.

    Args:
        by_host: name of a host -> its versions.
    """
    for what, attribute, agree in (
        ("cellmesh", "cellmesh", str.__eq__),
        ("Python", "python", fits),
        ("torch", "torch", same_release),
    ):
        found = {host: getattr(versions, attribute) for host, versions in by_host.items()}
        first = next(iter(found.values()), "")
        if not all(agree(first, version) for version in found.values()):
            listed = ", ".join(f"{host} has {version or 'none'}" for host, version in found.items())
            return f"hosts differ in their {what}: {listed}; install the same version on all"
    return ""
