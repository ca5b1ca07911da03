"""Rebuilds, on a replaced rank, the objects that `copying` has pickled by reference on another
rank.

The names of these functions stand in the pickles. The rank's namespace is that of ``__main__``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from ..inspect.safe_read import memory_of

Buckets = list[list[int]]  # positions of parameters, a list a bucket


def move_in(path: Sequence[str], directory: str | None) -> dict[str, Any]:
    """Take over the import path and working directory of the rank whose names this one gets; return
    the dict that names are loaded into later.
    """
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    if directory is not None:
        with contextlib.suppress(OSError):
            os.chdir(directory)
    return {}


# ---------------------------------------------------------------- tensors


def find_device() -> torch.device:
    """Return this rank's device: its GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_storage(data: Any, is_on_cpu: bool) -> torch.UntypedStorage:
    """Make a copied tensor's storage, on the CPU or on this rank's device.

    Args:
        data: what it holds. It is copied: what arrives may be read-only, or shared between ranks.
        is_on_cpu: whether it was on the CPU where it came from.
    """
    source = memoryview(data).cast("B")
    held = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")
    if source.nbytes:
        memory_of(held.untyped_storage())[:] = source
    return (held if is_on_cpu else held.to(find_device())).untyped_storage()


def make_untyped(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def make_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- functions of cells

_UNBOUND = "cellmesh: this closure variable has no value yet"


def contents_of(cell: types.CellType) -> Any:
    """Return what a closure's cell contains."""
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND


def make_function(code: types.CodeType, name: str, num_cells: int) -> types.FunctionType:
    """Make a copied function whose globals are the rank's namespace; its closure, which may refer
    to it, is set later.
    """
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(code, vars(sys.modules["__main__"]), name, None, cells)


def finish_function(
    function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any], list[Any]]
) -> None:
    """Give a copied function its attributes, and its closure."""
    attributes, own, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(own)
    for cell, value in zip(function.__closure__ or (), contents, strict=True):
        if not (isinstance(value, str) and value == _UNBOUND):
            cell.cell_contents = value


# ---------------------------------------------------------------- groups and meshes


def find_mesh(dims: tuple[str, ...]) -> DeviceMesh:
    """Return this rank's ``mesh``, or the submesh of it with these dims."""
    mesh: DeviceMesh = vars(sys.modules["__main__"])["mesh"]
    return mesh[dims] if dims else mesh


def find_dim_group(dim: int) -> dist.ProcessGroup:
    """Return this rank's process group of a dim of ``mesh``."""
    return find_mesh(()).get_group(dim)


def find_world() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def find_group(name: str) -> Any:
    """Return the process group of this name; torch's non-member token on other ranks."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return resolve(name)
    except (RuntimeError, KeyError, ValueError):
        return non_member()


def non_member() -> Any:
    return dist.GroupMember.NON_GROUP_MEMBER


def make_sampler(kind: type[DistributedSampler[Any]], dim: int) -> DistributedSampler[Any]:
    """Make a distributed sampler without its state, for this rank's part of the data (see
    `set_sampler`).
    """
    sampler = kind.__new__(kind)
    sampler.rank = dist.get_rank() if dim < 0 else find_mesh(()).get_local_rank(dim)
    return sampler


def set_sampler(sampler: DistributedSampler[Any], state: dict[str, Any]) -> None:
    sampler.__dict__.update({key: value for key, value in state.items() if key != "rank"})


# ---------------------------------------------------------------- DistributedDataParallel


def make_ddp(kind: type[DistributedDataParallel]) -> DistributedDataParallel:
    return kind.__new__(kind)


def set_ddp(
    module: DistributedDataParallel, carried: tuple[dict[str, Any], list[Any], Buckets | None]
) -> None:
    """Give a copied DDP module its state and a reducer of its own; runs no collective."""
    state, hooks, buckets = dict(carried[0]), carried[1], carried[2]
    if state.get("device_ids"):
        state["device_ids"] = [torch.cuda.current_device()]
        state["output_device"] = torch.cuda.current_device()
    state.update(
        _comm_hooks=[], _accum_grad_hooks=[], _has_rebuilt_buckets=False, _lazy_init_ran=False
    )
    state.pop("_cellmesh_final_buckets", None)  # what healing notes of another reducer
    state["_cellmesh_buckets"] = buckets
    with _use_buckets(buckets, state["bucket_bytes_cap"]):
        module.__setstate__(state)  # type: ignore[no-untyped-call]
    for hook, hook_state in hooks:
        module.register_comm_hook(hook_state, hook)


def renew_reducers(ranks: Collection[int]) -> None:
    """Let this rank's DDP models work with copies of them that new ranks have just received.

    After its first step a reducer agrees with the other ranks on its buckets, once. Where one
    rank's copy is new and will do that, the others must do it again, or they wait for each other.
    Runs no collective.

    Args:
        ranks: the new ones.
    """
    # By `type`, as `isinstance` asks the objects.
    found = [
        thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)
    ]
    for module in found:
        is_whole = "reducer" in vars(module)
        if is_whole and not set(ranks).isdisjoint(
            dist.get_process_group_ranks(module.process_group)
        ):
            _renew_reducer(module)


def _renew_reducer(module: DistributedDataParallel) -> None:
    internals: Any = module
    buckets, hooks = buckets_of(module), list(internals._comm_hooks)
    internals.reducer._remove_autograd_hooks()
    internals.reducer = internals.logger = None
    internals._has_rebuilt_buckets = internals._cellmesh_final_buckets = False
    internals._cellmesh_buckets = buckets
    internals._comm_hooks = []
    parameters, expect_sparse_gradient = internals._build_params_for_reducer()
    names = internals._build_debug_param_to_name_mapping(parameters)
    with _use_buckets(buckets, internals.bucket_bytes_cap):
        internals._ddp_init_helper(
            parameters, expect_sparse_gradient, names, internals.static_graph
        )
    if internals.static_graph:
        internals.reducer._set_static_graph()
        internals.logger._set_static_graph()
    for hook, hook_state in hooks:
        module.register_comm_hook(hook_state, hook)


def buckets_of(module: DistributedDataParallel) -> Buckets | None:
    """Return the gradient buckets that DDP chose in its second step; None before that."""
    internals: Any = module
    told = internals._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    if told:  # "3 2, 1 0"
        return [[int(index) for index in bucket.split()] for bucket in told.split(",")]
    if not (internals._has_rebuilt_buckets or getattr(module, "_cellmesh_final_buckets", False)):
        given: Buckets | None = getattr(module, "_cellmesh_buckets", None)
        return given  # a new reducer's, that has not come to its own yet
    # Not told yet, in the second step; this takes memory as the gradients do.
    position = {id(p): index for index, p in enumerate(internals._build_params_for_reducer()[0])}
    buckets = internals.reducer._get_zeros_like_grad_buckets()
    return [[position[id(p)] for p in bucket.parameters()] for bucket in buckets]


@contextlib.contextmanager
def _use_buckets(buckets: Buckets | None, num_bytes: int) -> Iterator[None]:
    """Enter a context in which a new DDP reducer gets these gradient buckets, because another
    layout adds gradients in another order.
    """
    if buckets is None:
        yield
        return
    internals: Any = dist
    compute = internals._compute_bucket_assignment_by_size
    chosen = buckets[::-1]  # torch turns them round
    internals._compute_bucket_assignment_by_size = lambda *args: (chosen, [num_bytes] * len(chosen))
    try:
        yield
    finally:
        internals._compute_bucket_assignment_by_size = compute
