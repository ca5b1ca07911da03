"""Checks of the host: operating system, cores, memory, limits, directories, network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..meshes import SHARED_FILESYSTEMS
from .facts import Facts
from .findings import (
    Finding,
    format_bytes,
    format_seconds,
    ok,
    parse_version,
    plural,
    problem,
    warning,
)

_MB, _GB = 10**6, 10**9
# PSS of the whole tree with torch imported and nothing else: measured (233 MB with 1 rank, 628 MB
# with 32), and rounded up. A CUDA context takes some hundred MB of the host's memory more; that is
# an estimate.
_BASE_BYTES = 250 * _MB
_BYTES_A_RANK = 15 * _MB
_BYTES_A_CUDA_RANK = 600 * _MB
# The agent has 5 descriptors a rank and 4 more while it forks; a rank has one for each of the
# others.
_BASE_FILES = 64
_FILES_A_RANK = 10
_BASE_TASKS = 20
_TASKS_A_RANK = 10
_ADDRESS_SPACE_BYTES = 4 * _GB
_SHM_BYTES = _GB
_FREE_BYTES, _NO_FREE_BYTES = 500 * _MB, 5 * _MB
_SUN_PATH_BYTES = 108
_SLOW_NAME_S = 1.0
_MINIMUM_LINUX = (5, 3)


def check_system(facts: Facts) -> Finding:
    """The operating system."""
    system = facts.system
    if system.name != "Linux":
        return problem(
            "system",
            f"{system.name}: cellmesh runs on Linux only",
            "use WSL 2, a container or a virtual machine",
        )
    return ok("system", f"Linux {system.release}")


def check_calls(facts: Facts) -> Finding:
    """System calls by which processes are watched and memory is shared."""
    title, missing = "system calls", facts.system.missing_calls
    if not missing:
        return ok(title, "pidfd_open, memfd_create and PR_SET_CHILD_SUBREAPER work")
    text = "; ".join(f"{call}: {why}" for call, why in missing.items())
    if parse_version(facts.system.release) < _MINIMUM_LINUX:
        remedy = f"use Linux 5.3 or newer; this is {facts.system.release}"
    else:
        remedy = (
            "a sandbox refuses them: update the container's runtime, or start it with "
            "`--security-opt seccomp=unconfined`"
        )
    if set(missing) == {"memfd_create"}:
        return warning(
            title, f"{text}; large values cannot be shared between ranks without copies", remedy
        )
    return problem(title, f"{text}; ranks cannot be watched", remedy)


def check_cores(facts: Facts) -> Finding:
    """Processor cores, and what will compete for them."""
    title, hardware = "cores", facts.hardware
    usable = float(hardware.num_usable_cores)
    text = plural(hardware.num_cores, "core")
    if hardware.num_usable_cores < hardware.num_cores:
        text += f", {hardware.num_usable_cores} of them for us (CPU affinity)"
    if hardware.quota_cores is not None and hardware.quota_cores < usable:
        usable = hardware.quota_cores
        text += f", the cgroup's quota grants the time of {usable:g}"
    num_threads = hardware.omp_num_threads * facts.num_ranks
    if hardware.omp_num_threads > 1 and num_threads > usable:
        return warning(
            title,
            f"{text}; with OMP_NUM_THREADS={hardware.omp_num_threads}, {facts.num_ranks} ranks "
            f"compute with {num_threads} threads",
            "`unset OMP_NUM_THREADS`: each rank then gets one",
        )
    if facts.num_ranks > usable:
        return warning(
            title,
            f"{text}; {facts.num_ranks} ranks take turns: fine to develop, of no use to time "
            "anything",
            f"start at most {max(1, int(usable))}, unless they compute on GPUs",
        )
    return ok(title, f"{text}; enough for {plural(facts.num_ranks, 'rank')}")


def check_memory(facts: Facts) -> Finding:
    """Memory, against what ranks take before they hold anything."""
    title, free = "memory", facts.hardware.available_bytes
    on_gpus = facts.probe.torch is not None and facts.probe.torch.num_gpus > 0
    each = _BYTES_A_CUDA_RANK if on_gpus else _BYTES_A_RANK
    needed = _BASE_BYTES + facts.num_ranks * each
    text = (
        f"{format_bytes(free)} of {format_bytes(facts.hardware.total_bytes)} available; "
        f"{plural(facts.num_ranks, 'rank')} take about {format_bytes(needed)} before models and "
        "data"
    )
    fitting = max(0, (free - _BASE_BYTES) // each)
    remedy = (
        f"start at most {fitting}, " if fitting else ""
    ) + "end what else runs here, or ask for more (batch system: `--mem`, container: `--memory`)"
    if free < needed:
        return problem(title, text, remedy)
    if free < 2 * needed:
        return warning(title, text, remedy)
    return ok(title, text)


def check_shm(facts: Facts) -> Finding:
    """/dev/shm, through which data loaders and NCCL pass tensors."""
    title, hardware = "/dev/shm", facts.hardware
    remedy = (
        "in a container: `docker run --shm-size=8g` or `--ipc=host`; "
        "else `mount -o remount,size=8g /dev/shm`"
    )
    users = "DataLoader workers and NCCL pass tensors through it"
    if hardware.shm_error:
        return warning(title, f"cannot be written: {hardware.shm_error}; {users}", remedy)
    text = f"{format_bytes(hardware.shm_free_bytes)} of {format_bytes(hardware.shm_bytes)} free"
    if hardware.shm_free_bytes < _SHM_BYTES:
        return warning(title, f"{text}; {users}, and die with a bus error when it is full", remedy)
    return ok(title, text)


def check_open_files(facts: Facts) -> Finding:
    """RLIMIT_NOFILE, against the pipes and sockets between agent and ranks."""
    title, limit, hard = "open files", facts.limits.open_files, facts.limits.open_files_hard
    if limit is None:
        return ok(title, "no limit")
    needed = _BASE_FILES + _FILES_A_RANK * facts.num_ranks
    fitting = max(0, (limit - _BASE_FILES) // _FILES_A_RANK)
    text = f"{limit} a process: enough for about {plural(fitting, 'rank')}"
    if limit >= needed:
        return ok(title, text)
    wanted = max(4096, needed)
    if hard is None or hard >= wanted:
        remedy = f"`ulimit -n {wanted}` before Jupyter is started"
    else:
        remedy = (
            f"let the administrator raise `nofile` in /etc/security/limits.conf to {wanted} or more"
        )
    return problem(title, f"{text}, and {facts.num_ranks} are wanted", remedy)


def check_tasks(facts: Facts) -> Finding:
    """RLIMIT_NPROC and the cgroup's pids.max, which count threads."""
    title, left = "processes", facts.limits.tasks
    if left is None:
        return ok(title, "no limit")
    needed = _BASE_TASKS + _TASKS_A_RANK * facts.num_ranks
    text = f"{left} more processes and threads may be started"
    if left >= needed:
        return ok(title, text)
    return problem(
        title,
        f"{text}; {plural(facts.num_ranks, 'rank')} need about {needed}",
        "`ulimit -u unlimited` before Jupyter is started; in a container: `--pids-limit -1`",
    )


def check_address_space(facts: Facts) -> Finding:
    """RLIMIT_AS."""
    title, limit = "address space", facts.limits.address_space_bytes
    if limit is None:
        return ok(title, "no limit")
    remedy = "`ulimit -v unlimited` before Jupyter is started"
    text = f"limited to {format_bytes(limit)} a process"
    if limit < _ADDRESS_SPACE_BYTES:
        return problem(
            title, f"{text}; torch maps more than a gigabyte before it computes anything", remedy
        )
    return warning(
        title,
        f"{text}; CUDA maps as much as all memories together, and large models do too",
        remedy,
    )


def check_runtime(facts: Facts) -> Finding:
    """The directory in which every mesh has its ticket, socket and logs."""
    title, runtime = "runtime directory", facts.runtime
    elsewhere = "`export JUPYTER_RUNTIME_DIR=/tmp/jupyter-$USER` before Jupyter is started"
    if runtime.exists and (not runtime.owned or runtime.mode & 0o077):
        return problem(
            title,
            f"{runtime.path} must belong to you alone, and has "
            + (f"mode {runtime.mode:04o}" if runtime.owned else "another owner"),
            f"`chmod 700 {runtime.path}`" if runtime.owned else elsewhere,
        )
    if runtime.socket_bytes >= _SUN_PATH_BYTES:
        return problem(
            title,
            f"{runtime.path} is too long: a socket's address in it takes {runtime.socket_bytes} "
            f"bytes of at most {_SUN_PATH_BYTES - 1}",
            elsewhere,
        )
    if runtime.error:
        return problem(title, f"{runtime.path} cannot be used: {runtime.error}", elsewhere)
    text = f"{runtime.path}, {format_bytes(runtime.free_bytes)} free"
    if runtime.free_bytes < _NO_FREE_BYTES:
        return problem(title, text, f"free some space, or {elsewhere}")
    if runtime.free_bytes < _FREE_BYTES:
        return warning(
            title, f"{text}; what ranks print is kept there", f"free some space, or {elsewhere}"
        )
    if runtime.filesystem in SHARED_FILESYSTEMS:
        return warning(
            title,
            f"{text}, is on a file system that other hosts share ({runtime.filesystem}): what a "
            "crash leaves there is not removed by itself",
            elsewhere,
        )
    return ok(title, text)


def check_loopback(facts: Facts) -> Finding:
    """TCP over 127.0.0.1."""
    error = facts.network.loopback_error
    if error:
        return problem(
            "loopback", f"no TCP connection over 127.0.0.1: {error}", "as root: `ip link set lo up`"
        )
    return ok("loopback", "TCP over 127.0.0.1 works")


def check_hostname(facts: Facts) -> Finding:
    """Whether the host's name resolves to an address of its own."""
    title, network = "host name", facts.network
    remedy = f"as root: add the line `127.0.1.1 {network.hostname}` to /etc/hosts"
    where = f" to {', '.join(network.addresses)}" if network.addresses else ""
    if network.hostname_error:
        what = "is not this host's address" if network.addresses else "does not resolve"
        return warning(
            title,
            f"{network.hostname}{' resolves' + where + ', which' if where else ''} {what} "
            f"({network.hostname_error}): code that looks its own host up will fail",
            remedy,
        )
    if network.hostname_s > _SLOW_NAME_S:
        return warning(
            title,
            f"{network.hostname} takes {format_seconds(network.hostname_s)} to resolve{where}",
            remedy,
        )
    return ok(title, f"{network.hostname} resolves{where}")


def check_interfaces(facts: Facts) -> Finding | None:
    """Variables that choose a network interface for gloo or NCCL."""
    title, network = "interfaces", facts.network
    if not network.chosen:
        return None
    for variable, value in network.chosen.items():
        unknown = unknown_interfaces(variable, value, network.interfaces)
        if unknown:
            return problem(
                title,
                f"{variable}={value}: there is no interface {', '.join(unknown)} here "
                f"({', '.join(network.interfaces)})",
                f"`unset {variable}`, or name one of those",
            )
    return ok(title, ", ".join(f"{variable}={value}" for variable, value in network.chosen.items()))


def unknown_interfaces(variable: str, value: str, interfaces: Sequence[str]) -> list[str]:
    """The interfaces that a variable asks for and that are not there.

    Args:
        variable: its name; NCCL's takes prefixes, ``=`` for exact names and ``^`` for those to
            avoid.
        value: its value.
        interfaces: those that are there.
    """
    prefixes = variable.startswith("NCCL") and not value.startswith("=")
    if value.startswith("^"):
        return []
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",") if name]
    return [
        name
        for name in names
        if not any(there.startswith(name) if prefixes else there == name for there in interfaces)
    ]


HOST_CHECKS: Sequence[Callable[[Facts], Finding | None]] = (
    check_system,
    check_calls,
    check_cores,
    check_memory,
    check_shm,
    check_open_files,
    check_tasks,
    check_address_space,
    check_runtime,
    check_loopback,
    check_hostname,
    check_interfaces,
)
