"""Copies variables of a rank to a new rank: finds the ones that can be copied, pickles their
values, and makes them on the new rank.

One pickle contains all values, so that shared objects stay shared, as an optimizer's parameters are
with its model. Objects that belong to the rank (groups, meshes, its device) are pickled as
references that the new rank resolves to its own objects.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from ...errors import UnpicklableError
from ...wire import payload
from ...wire.codec import Frame
from ...wire.messages import Pickled
from ..groups.model_reset.data_parallel import Buckets, buckets_of, restart_buckets, use_buckets
from ..inspect.safe_read import memory_of
from ..rank.value_transfer import is_dtensor
from ..static_lookup import text_of

# Names that every rank binds itself.
_OWN_NAMES = frozenset(("rank", "local_rank", "world_size", "device", "mesh", "torch", "dist"))
_SHELL_NAMES = frozenset(("In", "Out", "get_ipython", "exit", "quit", "open", "display"))
_SHARD = "a shard of this rank's: load a checkpoint"
_OF_FUNCTIONS = (
    *("__defaults__", "__kwdefaults__", "__doc__", "__annotations__"),
    *("__qualname__", "__module__"),
)


def survey(
    namespace: Mapping[str, Any], name_of_actor: Callable[[object], str] = lambda value: ""
) -> tuple[list[str], dict[str, str]]:
    """Find the variables that can be copied to another rank.

    Every value is pickled without keeping the result; the memory of tensors and arrays is not read.

    Args:
        namespace: namespace of the rank.
        name_of_actor: returns the name of the actor that a value is, "" if it is none.

    Returns:
        The names that can be copied, and the reason for each name that cannot. Names that begin
        with ``_``, names that every rank binds itself (``rank``, ``mesh``, ...) and actors, which
        are made by the notebook, are in neither.
    """
    names = [
        name
        for name in namespace
        if not name.startswith("_")
        and name not in _OWN_NAMES | _SHELL_NAMES
        and not name_of_actor(namespace[name])
    ]
    reasons = {name: why for name in names if (why := _why_not(namespace, name))}
    return [name for name in names if name not in reasons], reasons


def gather(namespace: Mapping[str, Any], names: Sequence[str]) -> tuple[Pickled, list[Frame]]:
    """Pickle the values of the variables `names` as one dict, for another rank.

    Loading the pickle first sets `sys.path` and the working directory to this rank's, as the user's
    modules are copied by reference.

    Args:
        namespace: namespace of the rank.
        names: names that `survey` has found.

    Returns:
        The pickle and its buffers, which are the memory of the tensors themselves.
    """
    values = _Values({name: namespace[name] for name in names})
    with warnings.catch_warnings():  # torch warns of hooks on tensors, which are not copied
        warnings.simplefilter("ignore")
        return payload.dumps(values, "the names", _Reducer(namespace, reads=True))


def _why_not(namespace: Mapping[str, Any], name: str) -> str:
    """Return why the value of a name cannot be copied to another rank; "" if it can."""
    reducer = _Reducer(namespace, reads=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            payload.check_dumps(namespace[name], name, reducer)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the value's own code must not affect other names
        text = text_of(error).removeprefix(f"{name!r}: ").removeprefix(f"{name!r} ")
        return _SHARD if text.startswith(_SHARD) else text
    return ""


class _Values:
    """A dict of names and values; loading its pickle on the new rank calls `move_in` first."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


class _Reducer:
    """Pickles, for another rank, objects that cannot be pickled as usual: tensors' storages,
    functions of cells, meshes, groups, samplers (see `payload.dumps`).

    Args:
        namespace: namespace of the rank.
        reads: whether the content of tensors is included.
    """

    def __init__(self, namespace: Mapping[str, Any], reads: bool) -> None:
        self._namespace = namespace
        self._reads = reads

    def __call__(self, value: Any) -> Any:
        match value:
            case _Values():
                here = list(sys.path), _directory()
                return move_in, here, None, None, iter(value.values.items())
            case torch.storage.TypedStorage():
                return make_typed, (value._untyped_storage, value.dtype)
            case torch.UntypedStorage():  # one object for all tensors that share it
                return self._reduce_storage(value)
            case torch.Tensor():
                return _refuse_shards(value)
            case DistributedDataParallel():
                return _reduce_ddp(value)
            case torch.nn.Module():
                return _refuse_fsdp(value)
            case types.FunctionType():
                return self._reduce_function(value)
            case DeviceMesh():
                return find_mesh, (self._dims_of(value),)
            case dist.ProcessGroup():
                return self._reduce_group(value)
            case torch.device():
                return _reduce_device(value)
            case DistributedSampler():
                return _reduce_sampler(value)
            case io.IOBase() if not isinstance(value, io.BytesIO | io.StringIO):
                raise UnpicklableError("an open file")
        if value is dist.GroupMember.NON_GROUP_MEMBER:
            return non_member, ()
        _refuse_pipeline_stage(value)
        return NotImplemented

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type == "meta":
            return payload.make_storage, (storage.nbytes(), None, "meta")
        is_on_cpu = storage.device.type == "cpu"
        if not self._reads and not is_on_cpu:
            return make_storage, (b"", False)
        on_cpu = storage if is_on_cpu else storage.cpu()  # type: ignore[no-untyped-call]
        data = pickle.PickleBuffer(memory_of(on_cpu)) if on_cpu.nbytes() else b""
        return make_storage, (data, is_on_cpu)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        """Return how pickle reduces a function defined in a cell; its globals are the new rank's
        namespace.
        """
        if function.__globals__ is not self._namespace:
            return NotImplemented
        cells = function.__closure__ or ()
        attributes = {name: getattr(function, name) for name in _OF_FUNCTIONS}
        state = attributes | function.__dict__, [cell.cell_contents for cell in cells]
        made_from = (function.__code__, function.__name__, len(cells))
        return make_function, made_from, state, None, None, finish_function

    def _dims_of(self, mesh: DeviceMesh) -> tuple[str, ...]:
        """Return the names of the dims of the rank's ``mesh`` that a submesh of it consists of; ()
        for ``mesh`` itself.
        """
        root = self._namespace.get("mesh")
        if isinstance(root, DeviceMesh) and mesh is root:
            return ()
        names = mesh.mesh_dim_names or ()
        if (
            isinstance(root, DeviceMesh)
            and mesh._get_root_mesh() is root
            and set(names) <= set(root.mesh_dim_names or ())
        ):
            return tuple(names)
        raise UnpicklableError("a DeviceMesh that is no part of `mesh`: make it again on all ranks")

    def _reduce_group(self, group: dist.ProcessGroup) -> Any:
        if group is dist.group.WORLD:
            return find_world, ()
        root = self._namespace.get("mesh")
        if isinstance(root, DeviceMesh):
            for dim in range(root.ndim):
                if root.get_group(dim) is group:
                    return find_dim_group, (dim,)
        return find_group, (group.group_name,)


def _directory() -> str | None:
    """Return the working directory; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _refuse_shards(tensor: torch.Tensor) -> Any:
    if is_dtensor(tensor) or type(tensor).__name__ == "ShardedTensor":
        raise UnpicklableError(_SHARD)
    # `payload` would copy a tensor that is a part of a storage; here tensors keep sharing the
    # storage.
    is_plain = type(tensor) is torch.Tensor and tensor.layout is not torch._mkldnn  # type: ignore[attr-defined]
    plain: Any = tensor if is_plain else None
    return NotImplemented if plain is None else plain.__reduce_ex__(5)


def _refuse_pipeline_stage(value: Any) -> None:
    pipelining: Any = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is not None and isinstance(value, pipelining._PipelineStageBase):
        raise UnpicklableError(
            f"a pipeline's stage {value.stage_index}: make the new rank's own there"
        )


def _refuse_fsdp(module: torch.nn.Module) -> Any:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
        raise UnpicklableError(_SHARD)
    return NotImplemented


def _reduce_ddp(module: DistributedDataParallel) -> Any:
    """Return how pickle reduces a DDP module with its process group, which need not be the default
    one; the new rank makes the reducer without a collective.
    """
    if module.mixed_precision is not None:
        raise UnpicklableError(
            "DistributedDataParallel with mixed_precision: wrap the model again on all ranks"
        )
    left = ("reducer", "logger", "_comm_hooks")
    state = {key: value for key, value in module.__dict__.items() if key not in left}
    carried = state, list(module._comm_hooks), buckets_of(module)
    return make_ddp, (type(module),), carried, None, None, set_ddp


def _reduce_sampler(sampler: DistributedSampler[Any]) -> Any:
    """Return how pickle reduces a DistributedSampler over all ranks, which takes the new rank's
    number there.
    """
    if (sampler.num_replicas, sampler.rank) != (dist.get_world_size(), dist.get_rank()):
        raise UnpicklableError(
            f"a DistributedSampler for part {sampler.rank} of {sampler.num_replicas}: make it "
            "again there"
        )
    state = {key: value for key, value in sampler.__dict__.items() if key != "rank"}
    return make_sampler, (type(sampler),), state


def _reduce_device(device: torch.device) -> Any:
    if device.type == "cuda" and device.index in (None, torch.cuda.current_device()):
        return find_device, ()
    return NotImplemented


# ---- Called on the new rank, whose namespace is that of ``__main__``. Pickles refer to these
# functions by name.


def move_in(path: Sequence[str], directory: str | None) -> dict[str, Any]:
    """Set the import path and working directory to those of the copied rank; return the dict that
    the copied names are loaded into.
    """
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    if directory is not None:
        with contextlib.suppress(OSError):
            os.chdir(directory)
    return {}


def find_device() -> torch.device:
    """Return this rank's device: its GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_storage(data: Any, is_on_cpu: bool) -> torch.UntypedStorage:
    """Make a copied tensor's storage, on the CPU or on this rank's device.

    Args:
        data: content of the storage. It is copied, as it may be read-only, or shared between ranks.
        is_on_cpu: whether the original storage is on the CPU.
    """
    source = memoryview(data).cast("B")
    held = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")
    if source.nbytes:
        memory_of(held.untyped_storage())[:] = source
    return (held if is_on_cpu else held.to(find_device())).untyped_storage()


def make_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def make_function(code: types.CodeType, name: str, num_cells: int) -> types.FunctionType:
    """Make a copied function whose globals are the rank's namespace; its closure, which may refer
    to the function, is set later.
    """
    cells = tuple(types.CellType() for _ in range(num_cells))
    return types.FunctionType(code, vars(sys.modules["__main__"]), name, None, cells)


def finish_function(function: types.FunctionType, state: tuple[dict[str, Any], list[Any]]) -> None:
    """Set a copied function's attributes and closure."""
    attributes, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    for cell, value in zip(function.__closure__ or (), contents, strict=True):
        cell.cell_contents = value


def find_mesh(dims: tuple[str, ...]) -> DeviceMesh:
    """Return this rank's ``mesh``, or its submesh with these dims."""
    mesh: DeviceMesh = vars(sys.modules["__main__"])["mesh"]
    return mesh[dims] if dims else mesh


def find_dim_group(dim: int) -> dist.ProcessGroup:
    """Return this rank's process group along a dim of ``mesh``."""
    return find_mesh(()).get_group(dim)


def find_world() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def find_group(name: str) -> Any:
    """Return the process group with this name; torch's non-member token if this rank lacks it."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return resolve(name)
    except (RuntimeError, KeyError, ValueError):
        return non_member()


def non_member() -> Any:
    return dist.GroupMember.NON_GROUP_MEMBER


def make_sampler(kind: type[DistributedSampler[Any]]) -> DistributedSampler[Any]:
    """Make a distributed sampler without its state, for this rank's part of the data."""
    sampler = kind.__new__(kind)
    sampler.rank = dist.get_rank()
    return sampler


def make_ddp(kind: type[DistributedDataParallel]) -> DistributedDataParallel:
    return kind.__new__(kind)


def set_ddp(
    module: DistributedDataParallel, carried: tuple[dict[str, Any], list[Any], Buckets | None]
) -> None:
    """Set a copied DDP module's state, and give it a reducer of its own; run no collective."""
    state, hooks, buckets = dict(carried[0]), carried[1], carried[2]
    if state.get("device_ids"):
        state["device_ids"] = [torch.cuda.current_device()]
        state["output_device"] = torch.cuda.current_device()
    state.update(
        _comm_hooks=[], _accum_grad_hooks=[], _has_rebuilt_buckets=False, _lazy_init_ran=False
    )
    state["_cellmesh_buckets"] = buckets
    with use_buckets(buckets, state["bucket_bytes_cap"]):
        module.__setstate__(state)  # type: ignore[no-untyped-call]
    for hook, hook_state in hooks:
        module.register_comm_hook(hook_state, hook)


def renew_reducers(ranks: Collection[int]) -> None:
    """Prepare this rank's DDP models to work with the copies that new ranks have just received.

    After its first step, a reducer agrees with the other ranks on its buckets, once. As the
    reducers of new copies will do so, those of the other ranks must do so again, or ranks would
    wait for each other. Runs no collective.

    Args:
        ranks: the new ranks.
    """
    # By `type`, as `isinstance` runs code of the objects.
    found = [
        thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)
    ]
    for module in found:
        is_whole = "reducer" in vars(module)
        if is_whole and not set(ranks).isdisjoint(
            dist.get_process_group_ranks(module.process_group)
        ):
            restart_buckets(module, buckets_of(module))
