"""The options of a start, each in two forms: as users give it, and as a mesh's processes read it.

A new option is a field of `StartOptions`, from which `cellmesh.start` and the project's
``pyproject.toml`` take it, and of `MeshOptions` if the mesh's ticket has to carry it. The table of
magics has its flag, for ``%dist_start`` and commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict

import msgspec

from .hosts import HOST_LEASE_S

# Seconds, or text like ``30m``.
Duration = float | str
Switch = bool | Literal["on", "off"]


class StartOptions(TypedDict, total=False):
    """The options of a start, as users give them.

    Attributes:
        mesh: dims of the DeviceMesh, ``{"dp": 2, "tp": 4}`` or ``"dp=2,tp=4"``; by default one,
            ``dp``.
        backend: ``auto`` (the default: NCCL if each rank has its own GPU, else gloo), ``gloo`` or
            ``nccl``.
        preload: modules to import once, before the ranks are forked, besides those that the
            project's ranks have imported before; a list, or names joined by commas. An empty list
            leaves all imports but torch to the ranks.
        name: name of the mesh, for ``cellmesh ps``: letters, digits, ``_`` and ``-``; by default a
            generated one.
        settle_s: time that the other ranks of a cell have to finish after one has failed, in
            seconds (1).
        hosts: hosts to run on, ``"a:4,b:4"``; ranks are numbered host by host. By default this
            machine.
        nproc_per_host: number of ranks on each host that is given without a number.
        launch: command line that starts `cellmesh agent` on a host, such as ``docker exec -i
            {host} {command}``; by default OpenSSH's client. ``slurm`` uses the nodes of this
            process's allocation, or a new one; ``ray`` nodes of a Ray cluster. With ``hand`` and
            ``torchrun``, people, or torchrun, start the command that is shown, and each host
            announces itself.
        nodes: number of nodes to request from Slurm or Ray, or of hosts that announce themselves.
        launch_args: further options of srun (``"--time=2:00:00 --gres=gpu:4"``), or the resources
            of each node of Ray (``"CPU=8 GPU=4"``; by default a CPU and, if the cluster has GPUs, a
            GPU for each rank).
        host_lease_s: time that a host may be without a connection before its ranks count as lost:
            seconds, or text like ``30s`` (10).
        interface: network interface of the hosts for cellmesh, gloo, NCCL and the c10d store; by
            default that of the route to this host.
        env: environment variables that the ranks of all hosts get besides those of their host:
            names of variables that are set here, ``["HF_HOME"]``, or names and values.
        gpus: GPUs that the ranks of each host use: ``[0, 2]`` or ``"0,2"``, counted among those
            that an engine has given (``CUDA_VISIBLE_DEVICES``); ``"none"``.
        address: address of this host, or its interface, for hosts that announce themselves; by
            default that of the route to other networks.
        sync: whether the other hosts get the modules beside the notebook as they are here, before a
            cell if they have changed (yes); or ``"on"``, ``"off"``.
        lease_s: time that the mesh keeps running after this process has ended, for `attach`:
            seconds, or text like ``30m``. By default half an hour in a notebook, unless its kernel
            is shut down while nothing runs, and 0 (the mesh ends) elsewhere.
        auto_heal: whether dead ranks are replaced automatically (no).
        fold_numbers: whether lines of ranks that differ only in numbers are shown as one, with the
            span of each number (yes); or ``"on"``, ``"off"``. `Mesh.fold_numbers` changes it.
        group: whether the ranks have a process group, a c10d store and a DeviceMesh (yes); or
            ``"on"``, ``"off"``. Without them a mesh has one rank, whose ``world_size`` is 1.
        prestart: whether the ranks may be forked from the process that has imported torch in the
            background of the notebook (yes).
    """

    mesh: Mapping[str, int] | str
    backend: Literal["auto", "gloo", "nccl"]
    preload: Iterable[str] | str
    name: str
    settle_s: Duration
    hosts: Iterable[str] | str
    nproc_per_host: int
    launch: str
    nodes: int
    launch_args: str
    host_lease_s: Duration
    interface: str
    env: Mapping[str, str] | Iterable[str] | str
    gpus: str | Iterable[int] | int
    address: str
    sync: Switch
    lease_s: Duration
    auto_heal: bool
    fold_numbers: Switch
    group: Switch
    prestart: bool


class MeshOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options that a mesh's ticket carries; the fields are those of `StartOptions`.

    Attributes:
        is_lease_chosen: whether the user has chosen `lease_s`; if not, a kernel that is shut down
            ends the mesh.
        gpus: GPUs that the ranks of each host use; None for all.
    """

    backend: str = "auto"
    preload: tuple[str, ...] = ()
    name: str = ""
    lease_s: float = 0.0
    is_lease_chosen: bool = False
    settle_s: float = 1.0
    auto_heal: bool = False
    fold_numbers: bool = True
    group: bool = True
    launch: str = ""
    interface: str = ""
    address: str = ""
    host_lease_s: float = HOST_LEASE_S
    env: dict[str, str] = {}
    gpus: tuple[str, ...] | None = None

    def __repr__(self) -> str:  # without `env`, whose values may be secret
        fields = (field for field in self.__struct_fields__ if field != "env")
        return f"{type(self).__name__}({', '.join(f'{f}={getattr(self, f)!r}' for f in fields)})"
