"""What `doctor` knows of this machine: plain values, so that its checks are functions of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .probe import Probe


class System(msgspec.Struct, frozen=True):
    """Operating system and interpreter.

    Attributes:
        name: ``Linux``.
        release: of the kernel.
        python: the interpreter's version.
        executable: the interpreter.
        packages: package -> version; those missing are not in it.
        missing_calls: system calls that do not work here -> why.
    """

    name: str
    release: str
    python: tuple[int, int, int]
    executable: str
    packages: Mapping[str, str]
    missing_calls: Mapping[str, str]


class Hardware(msgspec.Struct, frozen=True):
    """Cores, memory, shared memory.

    Attributes:
        num_cores: logical cores of the machine.
        num_usable_cores: those that this process may run on.
        quota_cores: how many cores' time the cgroup grants; None for no limit.
        available_bytes: memory that can be had without swapping, the cgroup's limit observed.
        total_bytes: memory of the machine or the cgroup.
        shm_bytes: size of /dev/shm.
        shm_free_bytes: what is free of it.
        shm_error: why /dev/shm cannot be written.
        omp_num_threads: the environment's OMP_NUM_THREADS, 0 if unset or no number.
    """

    num_cores: int
    num_usable_cores: int
    quota_cores: float | None
    available_bytes: int
    total_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    shm_error: str
    omp_num_threads: int


class Limits(msgspec.Struct, frozen=True):
    """Limits of a process started from here; None for no limit.

    Attributes:
        open_files: RLIMIT_NOFILE, soft.
        open_files_hard: RLIMIT_NOFILE, hard: what ``ulimit -n`` may raise it to.
        tasks: processes and threads still to be had (RLIMIT_NPROC and the cgroup's pids.max).
        address_space_bytes: RLIMIT_AS.
    """

    open_files: int | None
    open_files_hard: int | None
    tasks: int | None
    address_space_bytes: int | None


class RuntimeDirectory(msgspec.Struct, frozen=True):
    """Where meshes have their directories.

    Attributes:
        path: the directory.
        exists: whether it is there yet.
        owned: whether it is ours.
        mode: its permission bits.
        filesystem: type of its file system.
        free_bytes: space left there.
        error: why a socket cannot be bound in it (or, if it is not there, where it would be made).
        socket_bytes: length of the address of a mesh's socket.
    """

    path: str
    exists: bool
    owned: bool
    mode: int
    filesystem: str
    free_bytes: int
    error: str
    socket_bytes: int


class Network(msgspec.Struct, frozen=True):
    """What ranks need to reach each other on this host.

    Attributes:
        loopback_error: why a TCP connection over 127.0.0.1 fails.
        hostname: the host's name.
        addresses: what it resolves to.
        hostname_error: why it does not resolve, or why its address cannot be bound.
        hostname_s: how long resolving took, in seconds.
        interfaces: this host's network interfaces.
        chosen: variable (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``) -> its value, where set.
    """

    loopback_error: str
    hostname: str
    addresses: tuple[str, ...]
    hostname_error: str
    hostname_s: float
    interfaces: tuple[str, ...]
    chosen: Mapping[str, str]


class Meshes(msgspec.Struct, frozen=True):
    """Meshes found.

    Attributes:
        running: names of the living.
        stale: names of those of which only a directory or lost processes are left.
        strange: directories that are no mesh's -> why.
    """

    running: tuple[str, ...]
    stale: tuple[str, ...]
    strange: Mapping[str, str]


class Trial(msgspec.Struct, frozen=True):
    """A mesh that was started, used and stopped.

    Attributes:
        num_ranks: of how many ranks.
        backend: what ``dist.get_backend()`` said.
        start_s: seconds until every rank had answered.
        collective_s: seconds an all_reduce took, the first one not counted.
        stop_s: seconds until all had ended.
        error: what went wrong.
        leftovers: what was still there after the stop.
    """

    num_ranks: int
    backend: str = ""
    start_s: float = 0.0
    collective_s: float = 0.0
    stop_s: float = 0.0
    error: str = ""
    leftovers: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True):
    """All that the checks look at.

    Attributes:
        num_ranks: how many ranks are meant to run here.
        kernels: Jupyter kernels by name -> the interpreter that they start.
        trial: None if none was made.
    """

    num_ranks: int
    system: System
    probe: Probe
    hardware: Hardware
    limits: Limits
    runtime: RuntimeDirectory
    network: Network
    kernels: Mapping[str, str]
    meshes: Meshes
    trial: Trial | None = None
