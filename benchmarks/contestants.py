"""Who is measured, by which driver, in which environment."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

# Peers get the torch that cellmesh is measured with; what a build is called after "+" differs by
# index.
TORCH = "torch==" + version("torch").partition("+")[0]


@dataclass(frozen=True)
class Peer:
    """Another project, measured in an environment of its own.

    Args:
        name: of the environment's folder.
        requirements: ``name==version`` or ``name``, for pip.
    """

    name: str
    requirements: tuple[str, ...]


@dataclass(frozen=True)
class Contestant:
    """One driver, and how it is called.

    Args:
        name: in results and for ``--only``.
        title: in tables.
        driver: a module of `benchmarks.drivers`.
        imports: modules to import once, unmeasured, right before: their files are then in the page
            cache, for whoever has just run and whoever has not.
        num_ranks: how many it starts.
        peer: whose environment it needs; None for our own.
    """

    name: str
    title: str
    driver: str
    imports: str = "torch"
    num_ranks: int = 8
    peer: Peer | None = None


MONARCH = Peer("monarch", ("torchmonarch==0.7.0", TORCH, "numpy"))
IPYPARALLEL = Peer("ipyparallel", ("ipyparallel==9.2.0", TORCH, "numpy"))
RAY = Peer("ray", ("ray==2.60.0", TORCH, "numpy"))

_OURS = "torch, zmq, msgspec, cloudpickle, ipykernel"
_STEP = "torch.distributed.fsdp, torch._dynamo"

CONTESTANTS = (
    Contestant("torch-import", "one `import torch`", "torch_import"),
    Contestant("zeromq-hop", "bare ZeroMQ hop", "zeromq_hop"),
    Contestant("lean-call", "lean call", "lean_call", _OURS),
    Contestant("memory", "memory", "memory", "numpy"),
    Contestant("cellmesh", "cellmesh", "cellmesh_mesh", _OURS),
    Contestant("cellmesh-starts", "cellmesh, started in a kernel", "cellmesh_starts", _OURS),
    Contestant("cellmesh-cells", "cellmesh, cells in a kernel", "cellmesh_cells", _OURS),
    Contestant("cellmesh-64", "cellmesh, 64 ranks", "cellmesh_mesh", _OURS, num_ranks=64),
    Contestant("cellmesh-256", "cellmesh, 256 ranks", "cellmesh_start", _OURS, num_ranks=256),
    Contestant("cellmesh-step", "cellmesh, first step", "cellmesh_first_step", f"{_OURS}, {_STEP}"),
    Contestant(
        "torchrun-step", "torchrun", "torchrun_first_step", f"torch.distributed.run, {_STEP}"
    ),
    Contestant(
        "monarch-step",
        "Monarch 0.7.0, first step",
        "monarch_first_step",
        f"monarch.actor, {_STEP}",
        peer=MONARCH,
    ),
    Contestant(
        "ipyparallel-step",
        "ipyparallel 9.2.0, first step",
        "ipyparallel_first_step",
        f"ipyparallel, ipykernel, {_STEP}",
        peer=IPYPARALLEL,
    ),
    Contestant("cellmesh-bulk", "cellmesh, bulk data", "cellmesh_bulk", _OURS),
    Contestant("monarch", "Monarch 0.7.0", "monarch_mesh", "torch, monarch.actor", peer=MONARCH),
    Contestant(
        "ipyparallel",
        "ipyparallel 9.2.0",
        "ipyparallel_mesh",
        "torch, ipyparallel, ipykernel",
        peer=IPYPARALLEL,
    ),
    Contestant("ray", "Ray 2.60.0", "ray_mesh", "torch, ray", peer=RAY),
)

# Of `benchmarks.actors`.
ACTORS = (
    *(one for one in CONTESTANTS if one.name == "lean-call"),
    Contestant("cellmesh-second", "cellmesh, a second mesh", "cellmesh_second", _OURS),
    Contestant(
        "cellmesh-copy", "cellmesh, copies of weights", "cellmesh_copy", f"{_OURS}, {_STEP}"
    ),
    Contestant("cellmesh-actors", "cellmesh, actors", "cellmesh_actors", _OURS),
    Contestant(
        "monarch-actors", "Monarch 0.7.0", "monarch_actors", "torch, monarch.actor", peer=MONARCH
    ),
    Contestant("ray-actors", "Ray 2.60.0", "ray_actors", "torch, ray", peer=RAY),
)
