"""The options of a mesh, checked before anything is started."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ..errors import MeshUsageError
from ..wire.hosts import HOST_LEASE_S
from .environment import check_gpu_hosts, read_environment, read_gpus
from .host_list import INVITING, HostEntry, awaited_hosts, command_for, parse_hosts
from .node_request import ENGINES, NodeRequest, check_request, parse_arguments

BACKENDS = ("auto", "gloo", "nccl")
MAX_RANKS = 1024
DEFAULT_DIM = "dp"
_MAX_SPAN_S = 365 * 86400.0
_HOST_LEASES_S = 1.0, 3600.0


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or "" if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class Options:
    """The checked options of a mesh that is to be started.

    Args:
        num_ranks: number of ranks.
        mesh: DeviceMesh dims, name -> size; their product is `num_ranks`.
        backend: ``auto``, ``gloo`` or ``nccl``.
        preload: modules imported once, before the ranks are forked.
        name: the mesh's name; "" for one of its own.
        lease_s: how long the mesh lives on when its notebook has gone, in seconds; 0 ends it at
            once.
        settle_s: how long the other ranks of a cell may take after one has failed, in seconds.
        on_error: what then happens to them: ``release``, or ``wait`` for the user.
        auto_heal: whether dead ranks are replaced without being asked.
        prestart: whether a notebook has a zygote import torch in the background before the mesh is
            started.
        hosts: on which it runs, with their numbers of ranks; () for this host.
        launch: the command line that starts an agent on a host; "" for ssh; one of `INVITING` where
            hosts announce themselves.
        interface: the network interface of the hosts; "" for that of the route to this host.
        address: this host's, or its interface, for agents that connect to it; "" to choose it.
        spares: hosts that may take the place of lost ones.
        host_lease_s: how long a host may be without a connection before its ranks count as lost, in
            seconds.
        request: what Slurm or Ray is asked for; None without. `num_ranks` and `mesh` are checked
            again once the nodes are known.
        release_command: what gives an allocation back once the mesh has ended.
        env: environment variables that the ranks get besides those of their host.
        gpus: which GPUs the ranks use, by host, "" for every host; empty for all GPUs.
        leave_command: run on each host when its agent has ended.
        slurm_job: the job that the hosts are nodes of; "" without Slurm.
        sync: whether the user's modules are made the same on all hosts.
    """

    num_ranks: int
    mesh: Mapping[str, int]
    backend: str = "auto"
    preload: tuple[str, ...] = ()
    name: str = ""
    lease_s: float = 0.0
    settle_s: float = 1.0
    on_error: Literal["release", "wait"] = "release"
    auto_heal: bool = False
    prestart: bool = True
    hosts: tuple[HostEntry, ...] = ()
    launch: str = ""
    interface: str = ""
    address: str = ""
    spares: tuple[str, ...] = ()
    host_lease_s: float = HOST_LEASE_S
    request: NodeRequest | None = None
    release_command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # may have secrets
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    leave_command: tuple[str, ...] = ()
    slurm_job: str = ""
    sync: bool = True


def parse_duration(text: str) -> float:
    """Read a duration such as ``30m``, ``2h`` or ``0``.

    Args:
        text: ``30m``, ``1.5h``, ``90s`` or a number of seconds.

    Returns:
        Seconds.

    Raises:
        MeshUsageError: it is not of that form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|d)?", text.strip())
    if not found:
        raise MeshUsageError(f"{text!r} is no span of time: write it like 30m, 2h or 90 (seconds)")
    unit_s = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    return float(found[1]) * unit_s[found[2] or "s"]


def parse_mesh(text: str) -> dict[str, int]:
    """Read mesh dims such as ``dp=2,tp=4``.

    Args:
        text: ``dp=2,tp=4`` or ``dp=2 tp=4``.

    Raises:
        MeshUsageError: it is not of that form.
    """
    dims: dict[str, int] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, equals, size = part.partition("=")
        if not (name.isidentifier() and equals and size.isdecimal() and int(size) > 0):
            raise MeshUsageError(f"{part!r} is no mesh dim: write them like dp=2,tp=4")
        if name in dims:
            raise MeshUsageError(f"mesh dim {name!r} is given twice")
        dims[name] = int(size)
    return dims


_OR = {
    "mesh": " like dp=2,tp=4 or a mapping of names to sizes",
    "backend": " (auto, gloo or nccl)",
    "preload": " or a list of modules",
    "name": "",
    "on_error": " (release or wait)",
    "hosts": " like a:4,b:4 or a list of such texts",
    "launch": " like `docker exec -i {host} {command}`",
    "interface": "",
    "launch_args": " like '--gres=gpu:4'",
    "address": "",
}


def check_mesh(dims: Mapping[str, int], num_ranks: int | None) -> dict[str, int]:
    """Check that the product of the dims is the number of ranks (None: any number).

    Raises:
        MeshUsageError: their product is another number.
    """
    for name, size in dims.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise MeshUsageError(f"{name!r} is no mesh dim's name: name them like dp, tp")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshUsageError(
                f"mesh dim {name!r} must have a whole number of ranks, not {size!r}"
            )
    product = math.prod(dims.values())
    if num_ranks is not None and product != num_ranks:
        spelled = " x ".join(f"{name}={size}" for name, size in dims.items())
        raise MeshUsageError(
            f"{spelled} makes {product} ranks, and the mesh has {num_ranks}: the dims' product "
            "must be the number of ranks"
        )
    return dict(dims)


def make_options(
    num_ranks: Any = None,
    *,
    mesh: Mapping[str, int] | str | None = None,
    backend: str = "auto",
    preload: Iterable[str] | str = (),
    name: str = "",
    lease_s: float | str = 0.0,
    settle_s: float | str = 1.0,
    on_error: str = "release",
    auto_heal: bool = False,
    prestart: bool = True,
    hosts: str | Iterable[str] = (),
    nproc_per_host: int | None = None,
    launch: str = "",
    interface: str = "",
    address: str = "",
    spares: int = 0,
    host_lease_s: float | str = HOST_LEASE_S,
    nodes: int | None = None,
    time_limit: str = "",
    partition: str = "",
    env: Mapping[str, str] | Iterable[str] | str = (),
    gpus: str | Mapping[str, Any] | Iterable[int] | int | None = None,
    launch_args: str = "",
    queue_timeout_s: float | str | None = None,
    sync: bool | str = True,
) -> Options:
    """Check the options that a user gave, and fill in defaults.

    Args:
        num_ranks: number of ranks; None for the product of `mesh`.
        mesh: dims, as a mapping or as text (``dp=2,tp=4``); None for one dim of all ranks, ``dp``.
        backend: ``auto``, ``gloo`` or ``nccl``.
        preload: modules, or their names joined by commas.
        name: letters, digits, ``_`` and ``-``, which is not the first.
        lease_s: seconds, or text like ``30m``.
        settle_s: likewise.
        on_error: ``release`` or ``wait``.
        auto_heal: true or false.
        prestart: true or false.
        hosts: ``a:4,b:4``, or ``a,b`` with `nproc_per_host` or `num_ranks`.
        nproc_per_host: ranks of each host that names no number.
        launch: a command line with ``{host}`` and ``{command}``.
        interface: of the hosts.
        address: of this host, or its interface.
        spares: how many of the hosts, the last ones, are kept for those that are lost.
        host_lease_s: seconds, or text like ``30s``.
        env: as `read_environment` takes it.
        gpus: as `read_gpus` takes it; None for all.
        nodes: of Slurm or Ray, with `launch` ``slurm`` or ``ray``; or hosts that announce
            themselves, with one of `INVITING`.
        time_limit, partition: of Slurm.
        launch_args: further options of salloc, or a node's resources of Ray.
        queue_timeout_s: how long nodes may be waited for; None without limit.
        sync: true or false, or ``on`` or ``off``.

    Raises:
        MeshUsageError: something in it cannot be.
    """
    for option, value, kinds in (
        ("mesh", mesh, (str, Mapping, type(None))),
        ("backend", backend, (str,)),
        ("preload", preload, (str, list, tuple, set, frozenset)),
        ("name", name, (str,)),
        ("on_error", on_error, (str,)),
        ("hosts", hosts, (str, list, tuple)),
        ("launch", launch, (str,)),
        ("interface", interface, (str,)),
        ("launch_args", launch_args, (str,)),
        ("address", address, (str,)),
    ):
        if not isinstance(value, kinds):
            raise MeshUsageError(f"{option} must be text{_OR[option]}, not {value!r}")
    dims = parse_mesh(mesh) if isinstance(mesh, str) else dict(mesh or {})
    if num_ranks is None and dims:
        num_ranks = math.prod(check_mesh(dims, None).values())
    request = None
    if launch in ENGINES:
        if hosts or spares:
            raise MeshUsageError(
                f"--launch {launch} takes its hosts from {launch.title()}: leave --hosts out"
            )
        if num_ranks is None and nodes and nproc_per_host:
            num_ranks = nodes * nproc_per_host
        request = check_request(
            NodeRequest(
                launch,
                nodes,
                num_ranks,
                nproc_per_host,
                time_limit,
                partition,
                parse_arguments(launch_args),
                None
                if queue_timeout_s is None
                else _check_duration("queue_timeout_s", queue_timeout_s),
                may_use_gpus=backend != "gloo",
            )
        )
        num_ranks = num_ranks or nproc_per_host  # of one node, until the nodes are known
    elif launch in INVITING:
        if hosts or spares or time_limit or partition or launch_args or queue_timeout_s is not None:
            raise MeshUsageError(
                f"--launch {launch} takes --nodes and --nproc-per-host only: the hosts announce "
                "themselves"
            )
    elif nodes is not None or time_limit or partition or launch_args or queue_timeout_s is not None:
        raise MeshUsageError(
            "--nodes, --time, --partition, --launch-args and --queue-timeout are for engines with "
            "nodes of their own: add --launch slurm or --launch ray"
        )
    entries: tuple[HostEntry, ...] = ()
    kept: tuple[str, ...] = ()
    if launch in INVITING:
        entries = awaited_hosts(launch, nodes, num_ranks, nproc_per_host)
    elif request is None:
        entries, kept = _choose_hosts(hosts, num_ranks, nproc_per_host, launch, spares)
    chosen_gpus = {} if gpus is None else read_gpus(gpus)
    if request is None and launch not in INVITING:
        check_gpu_hosts(chosen_gpus, {*kept, *(entry.name for entry in entries)})
    if entries:
        num_ranks = sum(entry.num_ranks for entry in entries)
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise MeshUsageError(
            f"the number of ranks must be a whole number, not {num_ranks!r}: say how many, like 8"
        )
    if not 1 <= num_ranks <= MAX_RANKS:
        raise MeshUsageError(f"the number of ranks must be 1 to {MAX_RANKS}, not {num_ranks}")
    dims = check_mesh(dims or {DEFAULT_DIM: num_ranks}, num_ranks)
    if backend not in BACKENDS:
        raise MeshUsageError(
            f"there is no backend {backend!r} (auto, gloo or nccl){did_you_mean(backend, BACKENDS)}"
        )
    names = preload.split(",") if isinstance(preload, str) else list(map(str, preload))
    modules = tuple(module.strip() for module in names if module.strip())
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise MeshUsageError(f"--preload {module!r} is no module's name")
    if name and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,39}", name):
        raise MeshUsageError(
            f"{name!r} is no name: letters, digits, _ and -, which is not the first, at most 40"
        )
    if on_error not in ("release", "wait"):
        raise MeshUsageError(f"on_error must be release or wait, not {on_error!r}")
    sync = {"on": True, "off": False}.get(sync, sync) if isinstance(sync, str) else sync
    for option, switch in (("auto_heal", auto_heal), ("prestart", prestart), ("sync", sync)):
        if not isinstance(switch, bool):
            raise MeshUsageError(f"{option} must be true or false, not {switch!r}")
    return Options(
        num_ranks,
        dims,
        backend,
        modules,
        name,
        lease_s=_check_duration("lease_s", lease_s),
        settle_s=_check_duration("settle_s", settle_s),
        on_error="wait" if on_error == "wait" else "release",
        auto_heal=auto_heal,
        prestart=prestart,
        hosts=entries,
        launch=launch,
        interface=interface,
        address=address,
        spares=kept,
        host_lease_s=_check_host_lease(host_lease_s),
        env=read_environment(env, os.environ),
        gpus=chosen_gpus,
        request=request,
        sync=bool(sync),
    )


def _choose_hosts(
    hosts: str | Iterable[str],
    num_ranks: Any,
    nproc_per_host: int | None,
    launch: str,
    spares: int,
) -> tuple[tuple[HostEntry, ...], tuple[str, ...]]:
    if not hosts:
        if launch or spares or nproc_per_host is not None:
            raise MeshUsageError("say on which hosts, like --hosts a:4,b:4")
        return (), ()
    if num_ranks is not None and (isinstance(num_ranks, bool) or not isinstance(num_ranks, int)):
        raise MeshUsageError(f"the number of ranks must be a whole number, not {num_ranks!r}")
    names = hosts.split(",") if isinstance(hosts, str) else list(hosts)
    if isinstance(spares, bool) or not isinstance(spares, int) or not 0 <= spares < len(names):
        raise MeshUsageError(
            f"--spares must be fewer than the {len(names)} hosts, not {spares!r}: they are the "
            "last of --hosts, without ranks"
        )
    used = len(names) - spares
    kept = tuple(str(name).strip().partition(":")[0] for name in names[used:])
    entries = parse_hosts(names[:used], num_ranks, nproc_per_host)
    command_for(launch, entries[0].name, [])
    return entries, kept


def _check_duration(option: str, value: Any) -> float:
    seconds = parse_duration(value) if isinstance(value, str) else value
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds <= _MAX_SPAN_S
    ):
        raise MeshUsageError(
            f"{option} must be a span of time, in seconds or like 30m, at most a year, and not "
            f"{value!r}"
        )
    return float(seconds)


def _check_host_lease(value: Any) -> float:
    least_s, most_s = _HOST_LEASES_S
    if not least_s <= (lease_s := _check_duration("host_lease_s", value)) <= most_s:
        raise MeshUsageError(
            f"--host-lease must be {least_s:.0f} s to {most_s:.0f} s, not {value!r}: a host that "
            "is not heard for so long counts as lost"
        )
    return lease_s


def read_project_options(start: Path) -> dict[str, Any]:
    """The ``[tool.cellmesh]`` table of the nearest ``pyproject.toml``.

    Args:
        start: the directory to begin at; its parents follow.

    Returns:
        Keyword arguments for `make_options`; empty where there is no such table.

    Raises:
        MeshUsageError: the file does not parse, or the table has a key that is no option.
    """
    for directory in (start, *start.parents):
        path = directory / "pyproject.toml"
        if path.is_file():
            break
    else:
        return {}
    import tomllib  # only where there is such a file

    try:
        tool = tomllib.loads(path.read_text()).get("tool", {})
        table = tool.get("cellmesh", {}) if isinstance(tool, dict) else tool
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise MeshUsageError(f"{path}: {e}") from e
    if not isinstance(table, dict):
        raise MeshUsageError(f"{path}: tool.cellmesh must be a table of options, not {table!r}")
    known = [field.name for field in fields(Options)]
    for key in table:
        if key not in known:
            raise MeshUsageError(
                f"{path}: [tool.cellmesh] has {key!r}, which is no option "
                f"({', '.join(known)}){did_you_mean(key, known)}"
            )
    return dict(table)


def ranks_at(dims: Mapping[str, int], coordinate: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks at a mesh coordinate (row-major, as torch's DeviceMesh numbers them).

    Args:
        dims: mesh dims, name -> size.
        coordinate: some dims' indices, name -> index.

    Returns:
        The ranks whose coordinate agrees, ascending.

    Raises:
        MeshUsageError: there is no such dim, or no such index in it.
    """
    for name, index in coordinate.items():
        if name not in dims:
            raise MeshUsageError(
                f"the mesh has no dim {name!r}: its dims are "
                f"{', '.join(f'{dim}={size}' for dim, size in dims.items())}"
                f"{did_you_mean(name, dims)}"
            )
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < dims[name]:
            raise MeshUsageError(
                f"{name}={index}: dim {name!r} has {dims[name]} indices, 0-{dims[name] - 1}"
            )
    ranks = []
    for rank in range(math.prod(dims.values())):
        place, left = {}, rank
        for name, size in reversed(list(dims.items())):
            left, place[name] = divmod(left, size)
        if all(place[name] == index for name, index in coordinate.items()):
            ranks.append(rank)
    return tuple(ranks)


def parse_coordinate(text: str) -> dict[str, int]:
    """Read a coordinate: ``tp=0`` or ``dp=1,tp=0``.

    Raises:
        MeshUsageError: it is not of that form.
    """
    coordinate = {}
    for part in text.split(","):
        name, equals, index = part.strip().partition("=")
        if not (name.isidentifier() and equals and index.isdecimal()):
            raise MeshUsageError(f"{part!r} is no mesh coordinate: write it like tp=0 or dp=1,tp=0")
        if name in coordinate:
            raise MeshUsageError(
                f"{text!r} gives {name!r} twice: write each dim once, like dp=1,tp=0"
            )
        coordinate[name] = int(index)
    return coordinate
