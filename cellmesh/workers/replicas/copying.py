"""Decides which variables of a rank can be copied to a new rank, and pickles their values.

One pickle for all, so that what is shared stays shared: an optimizer holds the parameters of its
model. What belongs to the rank itself (groups, meshes, its device) travels as a reference that the
new rank resolves by its own books.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import socket
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from ...errors import CellmeshError, UnpicklableError
from ...wire import payload, tensors
from ...wire.codec import Frame
from ...wire.messages import Pickled
from ..inspect.safe_read import memory_of
from ..rank.value_transfer import is_dtensor
from ..static_lookup import text_of
from . import arriving

# What every rank has by itself.
_OWN_NAMES = frozenset(("rank", "local_rank", "world_size", "device", "mesh", "torch", "dist"))
_SHELL_NAMES = frozenset(("In", "Out", "get_ipython", "exit", "quit", "open", "display"))
_SHARD = "a shard of this rank's: load a checkpoint"
_CANNOT: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (threading.Thread, "a thread"),
    (
        (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event),
        "a lock",
    ),
    ((queue.Queue, queue.SimpleQueue), "a queue between threads"),
    (Executor, "a pool of workers"),
    (socket.socket, "a socket"),
    (types.GeneratorType, "a generator that has begun"),
    ((types.CoroutineType, types.AsyncGeneratorType), "a coroutine"),
    (_BaseDataLoaderIter, "a DataLoader's iterator"),
)


def survey(namespace: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return which variables can be copied to another rank, and why others cannot.

    Every value is pickled to nowhere; what tensors and arrays hold is not even read.

    Args:
        namespace: the rank's.

    Returns:
        The names that can be copied, and for others why not. Names that begin with ``_`` and what
        every rank has by itself (``rank``, ``mesh``, ...) are in neither.
    """
    names = [
        name
        for name in namespace
        if not name.startswith("_") and name not in _OWN_NAMES | _SHELL_NAMES
    ]
    reasons = {name: why for name in names if (why := _why_not(namespace, name))}
    return [name for name in names if name not in reasons], reasons


def gather(namespace: Mapping[str, Any], names: Sequence[str]) -> tuple[Pickled, list[Frame]]:
    """Pickle the values of these names as one dict, for another rank.

    A name that turns out not to be copyable is left out, with a line on stderr that says why. Where
    the pickle is loaded, `sys.path` and the working directory become this rank's first, as modules
    of the user's are copied by reference.

    Args:
        namespace: the rank's.
        names: what `survey` found.

    Returns:
        The pickle and its buffers, which are the memory of the tensors themselves.
    """
    chosen = [name for name in names if name in namespace]
    try:
        return _dump(namespace, chosen)
    except CellmeshError:
        for name in list(chosen):
            if why := _why_not(namespace, name):
                chosen.remove(name)
                print(f"{name} was not copied: {why}", file=sys.stderr)
        return _dump(namespace, chosen)


def _dump(namespace: Mapping[str, Any], names: Sequence[str]) -> tuple[Pickled, list[Frame]]:
    values = _Values({name: namespace[name] for name in names})
    with warnings.catch_warnings():  # torch tells of hooks on tensors, which stay behind
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
    except BaseException as error:  # of the value's own code: it costs no other its place
        text = text_of(error).removeprefix(f"{name!r}: ").removeprefix(f"{name!r} ")
        return _SHARD if text.startswith(_SHARD) else text
    return ""


class _Values:
    """A dict of names and values, pickled so that the new rank loads the values after `move_in`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


class _Storage:
    """The storage of copied tensors: one object for all tensors that share it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


class _Reducer:
    """Pickles for another rank what cannot be pickled plainly: tensors' storages, functions of
    cells, meshes, groups, samplers (see `payload.dumps`).

    Args:
        namespace: the rank's.
        reads: what tensors hold is wanted.
    """

    def __init__(self, namespace: Mapping[str, Any], reads: bool) -> None:
        self._namespace = namespace
        self._reads = reads
        self._storages: dict[int, _Storage] = {}  # address of torch's object -> the memory

    def __call__(self, value: Any) -> Any:
        match value:
            case _Values():
                return (
                    arriving.move_in,
                    (list(sys.path), _directory()),
                    None,
                    None,
                    iter(value.values.items()),
                )
            case torch.storage.TypedStorage():
                return arriving.make_typed, (self._storage_of(value._untyped_storage), value.dtype)
            case torch.UntypedStorage():
                return arriving.make_untyped, (self._storage_of(value),)
            case _Storage():
                return self._reduce_storage(value.storage)
            case torch.Tensor():
                return _refuse_shards(value)
            case DistributedDataParallel():
                return _reduce_ddp(value)
            case torch.nn.Module():
                return _refuse_fsdp(value)
            case types.FunctionType():
                return self._reduce_function(value)
            case DeviceMesh():
                return arriving.find_mesh, (self._dims_of(value),)
            case dist.ProcessGroup():
                return self._reduce_group(value)
            case torch.device():
                return _reduce_device(value)
            case DistributedSampler():
                return self._reduce_sampler(value)
            case io.IOBase() if not isinstance(value, io.BytesIO | io.StringIO):
                raise UnpicklableError("an open file")
        if value is dist.GroupMember.NON_GROUP_MEMBER:
            return arriving.non_member, ()
        for kinds, what in _CANNOT:
            if isinstance(value, kinds):
                raise UnpicklableError(what)
        _refuse_pipeline_stage(value)
        return NotImplemented

    # ---- tensors

    def _storage_of(self, storage: torch.UntypedStorage) -> _Storage:
        # Kept here, so that no other storage comes to its address.
        return self._storages.setdefault(storage._cdata, _Storage(storage))

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type == "meta":
            return tensors.make_storage, (storage.nbytes(), None, "meta")
        is_on_cpu = storage.device.type == "cpu"
        if not self._reads and not is_on_cpu:
            return arriving.make_storage, (b"", False)
        on_cpu = storage if is_on_cpu else storage.cpu()  # type: ignore[no-untyped-call]
        data = pickle.PickleBuffer(memory_of(on_cpu)) if on_cpu.nbytes() else b""
        return arriving.make_storage, (data, is_on_cpu)

    # ---- what is the rank's own

    def _reduce_function(self, function: types.FunctionType) -> Any:
        """Return how pickle is to reduce a cell's function: its globals are the namespace there."""
        if function.__globals__ is not self._namespace:
            return NotImplemented
        cells = function.__closure__ or ()
        state = (
            {
                "__defaults__": function.__defaults__,
                "__kwdefaults__": function.__kwdefaults__,
                "__doc__": function.__doc__,
                "__annotations__": function.__annotations__,
                "__qualname__": function.__qualname__,
                "__module__": function.__module__,
            },
            function.__dict__,
            [arriving.contents_of(cell) for cell in cells],
        )
        made_from = (function.__code__, function.__name__, len(cells))
        return arriving.make_function, made_from, state, None, None, arriving.finish_function

    def _dims_of(self, mesh: DeviceMesh) -> tuple[str, ...]:
        """Return of which dims of the rank's ``mesh`` a DeviceMesh consists."""
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
            return arriving.find_world, ()
        root = self._namespace.get("mesh")
        if isinstance(root, DeviceMesh):
            for dim in range(root.ndim):
                if root.get_group(dim) is group:
                    return arriving.find_dim_group, (dim,)
        return arriving.find_group, (group.group_name,)

    def _reduce_sampler(self, sampler: DistributedSampler[Any]) -> Any:
        """Return how pickle is to reduce a sampler, with the new rank in place of this rank."""
        dim = self._dim_of_sampler(sampler)
        return (
            arriving.make_sampler,
            (type(sampler), dim),
            sampler.__dict__,
            None,
            None,
            arriving.set_sampler,
        )

    def _dim_of_sampler(self, sampler: DistributedSampler[Any]) -> int:
        """Return the dim of ``mesh`` by which a sampler splits data; -1 for all ranks."""
        if sampler.num_replicas == dist.get_world_size() and sampler.rank == dist.get_rank():
            return -1
        fitting = []
        root = self._namespace.get("mesh")
        if isinstance(root, DeviceMesh):
            part = (sampler.num_replicas, sampler.rank)
            fitting = [
                d for d in range(root.ndim) if (root.size(d), root.get_local_rank(d)) == part
            ]
        if len(fitting) != 1:
            raise UnpicklableError(
                f"a DistributedSampler for part {sampler.rank} of {sampler.num_replicas}: make it "
                "again there"
            )
        return fitting[0]


def _directory() -> str | None:
    """Return the working directory; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _refuse_shards(tensor: torch.Tensor) -> Any:
    if is_dtensor(tensor) or type(tensor).__name__ == "ShardedTensor":
        raise UnpicklableError(_SHARD)
    # Not left to `payload`, which copies what is a part of a storage: here tensors go on sharing
    # it.
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
    """Return how pickle is to reduce a DDP module with its group, which need not be the default
    one; the new rank makes the reducer without a collective.
    """
    if module.mixed_precision is not None:
        raise UnpicklableError(
            "DistributedDataParallel with mixed_precision: wrap the model again on all ranks"
        )
    state = {
        key: v
        for key, v in module.__dict__.items()
        if key not in ("reducer", "logger", "_comm_hooks")
    }
    hooks = list(module._comm_hooks)
    carried = (state, hooks, arriving.buckets_of(module))
    return arriving.make_ddp, (type(module),), carried, None, None, arriving.set_ddp


def _reduce_device(device: torch.device) -> Any:
    if device.type == "cuda" and device.index in (None, torch.cuda.current_device()):
        return arriving.find_device, ()
    return NotImplemented
