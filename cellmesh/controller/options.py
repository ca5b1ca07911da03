"""The options of a mesh, checked before anything is started."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import MeshUsageError
from ..wire.hosts import HOST_LEASE_S
from .duration import check_duration
from .environment import read_environment
from .host_list import HostEntry
from .host_options import HostOptions, choose_hosts
from .mesh_dims import DEFAULT_DIM, check_mesh, parse_mesh
from .node_request import NodeRequest
from .suggestion import did_you_mean

BACKENDS = ("auto", "gloo", "nccl")
MAX_RANKS = 1024
_HOST_LEASES_S = 1.0, 3600.0


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
        address: this host's, or its interface, for hosts that announce themselves; "" to choose it.
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
        fold_numbers: whether lines of ranks that differ only in numbers are shown as one.
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
    fold_numbers: bool = True


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
    fold_numbers: bool | str = True,
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
        sync, fold_numbers: true or false, or ``on`` or ``off``.

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
    chosen = choose_hosts(
        HostOptions(
            hosts,
            nproc_per_host,
            launch,
            spares,
            nodes,
            time_limit,
            partition,
            launch_args,
            queue_timeout_s,
            gpus,
        ),
        num_ranks,
        may_use_gpus=backend != "gloo",
    )
    num_ranks = chosen.num_ranks
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
    for option, switch in (("auto_heal", auto_heal), ("prestart", prestart)):
        if not isinstance(switch, bool):
            raise MeshUsageError(f"{option} must be true or false, not {switch!r}")
    return Options(
        num_ranks,
        dims,
        backend,
        modules,
        name,
        lease_s=check_duration("lease_s", lease_s),
        settle_s=check_duration("settle_s", settle_s),
        on_error="wait" if on_error == "wait" else "release",
        auto_heal=auto_heal,
        prestart=prestart,
        hosts=chosen.entries,
        launch=launch,
        interface=interface,
        address=address,
        spares=chosen.spares,
        host_lease_s=_check_host_lease(host_lease_s),
        env=read_environment(env, os.environ),
        gpus=chosen.gpus,
        request=chosen.request,
        sync=_check_switch("sync", sync),
        fold_numbers=_check_switch("fold_numbers", fold_numbers),
    )


def _check_switch(option: str, value: Any) -> bool:
    value = {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise MeshUsageError(f"{option} must be true or false, not {value!r}")
    return value


def _check_host_lease(value: Any) -> float:
    least_s, most_s = _HOST_LEASES_S
    if not least_s <= (lease_s := check_duration("host_lease_s", value)) <= most_s:
        raise MeshUsageError(
            f"--host-lease must be {least_s:.0f} s to {most_s:.0f} s, not {value!r}: a host that "
            "is not heard for so long counts as lost"
        )
    return lease_s
