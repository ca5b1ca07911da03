"""Starts a mesh: on this host, on other hosts, or on nodes that an engine gives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import HostError, NoMeshError
from ...wire.marks import end_dead_meshes
from ...wire.modules import loaded
from ...wire.ticket import Ticket, runtime_root
from ..environment import check_gpu_hosts
from ..host_list import INVITING, parse_hosts
from ..kernel import own_kernel
from ..mesh import Mesh
from ..mesh_dims import DEFAULT_DIM, check_mesh
from ..node_request import NodeRequest
from ..options import Options, make_options
from ..output.calling_cell import current_sink
from ..project_options import read_project_options
from .hosts.attaching import forget_if_ended
from .launch import ray, slurm
from .launch.hosts import HostAgents
from .launch.launcher import Launcher
from .launch.local import (
    LocalAgent,
    forked,
    make_ticket,
    ranks_environment,
    spawned,
)
from .launch.node_holder import NodeHolder
from .launch.prestart import changes_import, own_prestart
from .session import Session, StartProgress

# A notebook is restarted now and then, and the ranks are to be there then; a script is over when it
# ends.
NOTEBOOK_LEASE_S = 1800.0
_START_S = 120.0


def start(
    num_ranks: int | None = None,
    *,
    mesh: Mapping[str, int] | str | None = None,
    backend: str | None = None,
    preload: Iterable[str] | str | None = None,
    name: str | None = None,
    lease_s: float | str | None = None,
    settle_s: float | str | None = None,
    on_error: str | None = None,
    auto_heal: bool | None = None,
    hosts: str | Iterable[str] | None = None,
    nproc_per_host: int | None = None,
    launch: str | None = None,
    interface: str | None = None,
    address: str | None = None,
    spares: int | None = None,
    host_lease_s: float | str | None = None,
    nodes: int | None = None,
    time_limit: str | None = None,
    partition: str | None = None,
    env: Mapping[str, str] | Iterable[str] | str | None = None,
    gpus: str | Mapping[str, Any] | Iterable[int] | int | None = None,
    launch_args: str | None = None,
    queue_timeout_s: float | str | None = None,
    sync: bool | str | None = None,
    fold_numbers: bool | str | None = None,
    timeout_s: float | None = None,
    on_progress: Callable[[StartProgress], None] | None = None,
) -> Mesh:
    """Start a mesh on this machine or on other hosts, and wait until every rank is ready.

    Options that are not given come from the ``[tool.cellmesh]`` table of the nearest
    ``pyproject.toml``.

    Args:
        num_ranks: number of ranks; may be left out where `mesh` gives it.
        mesh: dims of the DeviceMesh, ``{"dp": 2, "tp": 4}`` or ``"dp=2,tp=4"``; by default one,
            ``dp``.
        backend: ``auto`` (the default: NCCL where each rank has a GPU of its own, else gloo),
            ``gloo`` or ``nccl``.
        preload: modules to import once, before the ranks are forked.
        name: for ``cellmesh ps``; by default one of its own.
        lease_s: how long the mesh lives on when this process has gone, for `attach`: seconds, or
            text like ``30m``. By default half an hour in a notebook, unless its kernel is shut down
            while nothing runs, and 0 (it ends) elsewhere.
        settle_s: how long the other ranks of a cell may take after one has failed, in seconds (1).
        on_error: what then happens to them: ``release`` (the default) raises `Released` in them,
            ``wait`` leaves them to the user.
        auto_heal: whether dead ranks are replaced without being asked (no).
        hosts: to run on, ``"a:4,b:4"``; ranks are numbered host by host. By default this machine.
        nproc_per_host: how many ranks run on each host that names no number.
        launch: the command line that starts `cellmesh agent` on a host, such as ``docker exec -i
            {host} {command}``; by default OpenSSH's client. ``slurm`` uses the nodes of this
            process's allocation, or a new one; ``ray`` nodes of a Ray cluster. With ``hand`` and
            ``torchrun`` hosts announce themselves on which people, or torchrun, start the command
            that is shown.
        interface: the hosts' network interface for cellmesh, gloo, NCCL and the c10d store; by
            default that of the route to this host.
        address: this host's, or its interface, for hosts that announce themselves; by default
            that of the route to other networks.
        spares: how many of the hosts, the last ones, run nothing until `Mesh.heal` has them replace
            lost ones.
        host_lease_s: how long a host may be without a connection before its ranks count as lost:
            seconds, or text like ``30s`` (10).
        nodes: how many nodes Slurm or Ray is asked for, or hosts announce themselves.
        time_limit: of the allocation, as salloc takes it.
        env: environment variables that the ranks of all hosts get besides those of their host:
            names of variables that are set here, ``["HF_HOME"]``, or names and values.
        gpus: which GPUs the ranks of each host use: ``[0, 2]`` or ``"0,2"``, counted among those
            that an engine has given (``CUDA_VISIBLE_DEVICES``); by host ``{"a": [0, 1], "b": [2]}``
            or ``"a=0,1;b=2"``; ``"none"``.
        sync: whether the modules beside the notebook are brought to the other hosts as they are
            here, before a cell when they have changed (yes); or ``"on"``, ``"off"``.
        fold_numbers: whether lines of ranks that differ only in numbers are shown as one, with the
            span of each number (yes); or ``"on"``, ``"off"``. `Mesh.fold_numbers` changes it.
        partition: of Slurm.
        launch_args: further options of salloc (``"--gres=gpu:4 --account=x"``), or what each node
            of Ray gives (``"CPU=8 GPU=4"``; by default a CPU and, where there are some, a GPU for
            each rank).
        queue_timeout_s: how long nodes may be waited for, in seconds or like ``1h``; by default as
            long as it takes.
        timeout_s: how long the start may take, in seconds, once there are nodes; by default 120,
            and as long as it takes for hosts that announce themselves.
        on_progress: told how far it has come; called on another thread.

    Returns:
        The mesh, ready.

    Raises:
        MeshUsageError: an option is wrong.
        HostError: this machine cannot give what the mesh needs.
    """
    given = {
        "num_ranks": num_ranks,
        "mesh": mesh,
        "backend": backend,
        "preload": preload,
        "name": name,
        "lease_s": lease_s,
        "settle_s": settle_s,
        "on_error": on_error,
        "auto_heal": auto_heal,
        "hosts": hosts,
        "nproc_per_host": nproc_per_host,
        "launch": launch,
        "interface": interface,
        "address": address,
        "spares": spares,
        "host_lease_s": host_lease_s,
        "nodes": nodes,
        "time_limit": time_limit,
        "partition": partition,
        "env": env,
        "gpus": gpus,
        "launch_args": launch_args,
        "queue_timeout_s": queue_timeout_s,
        "sync": sync,
        "fold_numbers": fold_numbers,
    }
    checked, is_lease_chosen = read_options(given)
    end_dead_meshes(runtime_root())
    started_at = time.monotonic()
    if checked.name is not None:
        forget_if_ended(runtime_root() / checked.name)
    limit_s = _START_S if timeout_s is None else timeout_s
    patience_s = math.inf if timeout_s is None and checked.launch in INVITING else limit_s
    with NodeHolder() as holder:
        ticket, launcher, end = _launch(checked, is_lease_chosen, patience_s, on_progress, holder)
        session = Session(ticket, launcher, end, on_progress=on_progress, started_at=started_at)
        try:
            loaded.record()
            _bring_code(session, limit_s)
            session.wait_until_ready(limit_s)
            holder.keep()
        except BaseException:
            session.stop()
            raise
    return Mesh(session)


def read_options(given: Mapping[str, Any]) -> tuple[Options, bool]:
    """Check the options of a start, with those that the project sets.

    Args:
        given: the caller's; None where one is not given.

    Returns:
        The options, and whether the lease is among what was chosen.

    Raises:
        MeshUsageError: an option is wrong.
    """
    options = read_project_options(Path.cwd())
    if given.get("num_ranks") is not None or given.get("mesh") is not None:
        # What the call says of the mesh's size replaces all that the project says of it.
        options.pop("num_ranks", None)
        options.pop("mesh", None)
    options.update({key: value for key, value in given.items() if value is not None})
    is_lease_chosen = "lease_s" in options
    options.setdefault("lease_s", 0.0 if own_kernel() is None else NOTEBOOK_LEASE_S)
    return make_options(**options), is_lease_chosen


def _bring_code(session: Session, timeout_s: float) -> None:
    """Send the hosts of a mesh that starts what they lack of the user's modules, while they import
    torch.
    """
    try:
        if session.code is not None:
            session.code.bring(timeout_s=timeout_s)
    except NoMeshError:  # the start has failed, which is explained where it is awaited
        return


def _launch(
    options: Options,
    is_lease_chosen: bool,
    timeout_s: float,
    on_progress: Callable[[StartProgress], None] | None,
    holder: NodeHolder,
) -> tuple[Ticket, Launcher, int]:
    """Start an agent, from the waiting zygote if this process has one."""

    def report() -> None:
        if on_progress is not None:
            on_progress(StartProgress("importing torch", 0, options.num_ranks, 0.0))

    if options.request is not None:
        options = _with_nodes(options, options.request, on_progress, holder)
    if options.hosts:

        def show(text: str, stays: bool) -> None:
            if stays:
                current_sink().note(text)
            elif on_progress is not None:
                on_progress(StartProgress(text, 0, options.num_ranks, 0.0))

        ticket = make_ticket(options, is_lease_chosen)
        agents = HostAgents(ticket, options.hosts, timeout_s, show)
        end = agents.start()
        return agents.ticket, agents, end
    can_fork = options.prestart and not changes_import(ranks_environment(options))
    prestart = own_prestart() if can_fork else None
    if prestart is not None and prestart.prepare(timeout_s, report):
        ticket = make_ticket(options, is_lease_chosen)
        launcher = LocalAgent(functools.partial(forked, ticket, prestart))
        with contextlib.suppress(HostError):  # else without it
            return ticket, launcher, launcher.start()
    ticket = make_ticket(options, is_lease_chosen)
    launcher = LocalAgent(functools.partial(spawned, ticket))
    return ticket, launcher, launcher.start()


def _with_nodes(
    options: Options,
    request: NodeRequest,
    on_progress: Callable[[StartProgress], None] | None,
    holder: NodeHolder,
) -> Options:
    """Return the options with the nodes that an engine has given as hosts. Blocks while it
    queues.
    """
    began = time.monotonic()

    def report(text: str) -> None:
        if on_progress is not None:
            elapsed_s = time.monotonic() - began
            on_progress(StartProgress(text, 0, options.num_ranks, elapsed_s))

    name = options.name or "cellmesh"
    allocation = (
        ray.allocate(request, name, report, holder)
        if request.engine == "ray"
        else slurm.allocate(request, name, os.environ, report, holder)
    )
    entries = parse_hosts(allocation.nodes, request.num_ranks, request.nproc_per_host)
    check_gpu_hosts(options.gpus, {entry.name for entry in entries})
    num_ranks = sum(entry.num_ranks for entry in entries)
    is_default = tuple(options.mesh) == (DEFAULT_DIM,)
    dims = {DEFAULT_DIM: num_ranks} if is_default else check_mesh(options.mesh, num_ranks)
    return dataclasses.replace(
        options,
        num_ranks=num_ranks,
        mesh=dims,
        hosts=entries,
        launch=allocation.template,
        release_command=allocation.release_command,
        leave_command=allocation.leave_command,
        slurm_job=allocation.slurm_job,
    )
