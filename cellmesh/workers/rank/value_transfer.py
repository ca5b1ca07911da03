"""Sends a rank's values to the notebook, large ones in shared memory; splits tensors between ranks
and returns their parts; and binds global names of functions and classes that the notebook has sent.
"""

from __future__ import annotations

import builtins
import functools
import socket
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...errors import UnpicklableError
from ...wire import payload, segments
from ...wire.codec import Frame
from ...wire.handles import Stray
from ...wire.inspect import Refusal
from ...wire.messages import Pickled
from ...wire.segment_pool import SegmentPool
from ...wire.values import Part, PushParts, part_along
from ..static_lookup import name_of, text_of
from .imports import load

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def reduce_for_notebook(value: Any) -> Any:
    """Return a pickle reduction of a value that a process without GPUs and process groups can load,
    or NotImplemented for pickle's own reduction.
    """
    if type(value) in (types.GeneratorType, types.AsyncGeneratorType):
        raise UnpicklableError(
            "a generator stays where its code runs: return `list(...)` of what it yields"
        )
    if issubclass(type(value), DistributedDataParallel):
        raise UnpicklableError(
            "a DistributedDataParallel belongs to the process group of its rank: pull the model in "
            "it (`model.module`)"
        )
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            raise UnpicklableError(
                "a DTensor cannot leave its process group: pull or return `.to_local()` (each "
                "rank's part) or `.full_tensor()` (the whole) of it"
            )
        if value.device.type not in ("cpu", "meta"):
            return value.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return NotImplemented


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without importing DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(type(value), module.DTensor)


def refusal(error: BaseException) -> Refusal:
    """Return an exception as a `Refusal` message, even if the exception's methods raise."""
    return Refusal(name_of(error), text_of(error).encode("utf-8", "replace").decode())


# Size of the socket's send buffer, and of a packet, which bound the values that a rank gives while
# the agent does not read: some values.
_BUFFER_BYTES, _GIVEN_BYTES = 32 << 10, 7 << 10


class SegmentLink:
    """A rank's socket to the agent, by which it passes large values in shared-memory segments.

    Args:
        connection: a ``SOCK_SEQPACKET`` socket to the agent.
        num_ranks: number of ranks on this host.

    Attributes:
        pool: segments that are used again.
    """

    def __init__(self, connection: socket.socket, num_ranks: int = 1) -> None:
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self.pool = SegmentPool("cellmesh-result", num_ranks)

    def give(
        self, run: int, pickled: Pickled, buffers: Sequence[Frame]
    ) -> tuple[Pickled, list[Frame]]:
        """If a pickle's buffers are large, write them to a shared-memory segment and pass that to
        the agent; return the pickle and the buffers to put into the message.
        """
        if (
            segments.num_bytes_of(pickled, buffers) < segments.MIN_BYTES
            or not segments.are_possible()
        ):
            return pickled, list(buffers)
        mapped, parts = segments.fold_in(pickled, buffers)
        sizes = [len(part) for part in parts]
        frame = self.give_parts(run, sizes, zip(segments.offsets(sizes), parts, strict=True))
        return (pickled, list(buffers)) if frame is None else (mapped, [frame])

    def give_parts(
        self,
        run: int,
        sizes: Sequence[int],
        parts: Iterable[tuple[int, Frame]],
        ended: Collection[int] = (),
    ) -> Frame | None:
        """Write the parts of a value, one after the other, to a shared-memory segment, and pass
        that to the agent.

        Args:
            run: run whose result the value is.
            sizes: sizes of the segment's buffers, in bytes.
            parts: offset in the segment, and content, of each part.
            ended: as in `SegmentPool.take`.

        Returns:
            The frame that names the segment; None if there can be none.
        """
        try:
            segment = self.pool.take(segments.span(sizes), ended)
            for at, part in parts:
                segment.write_at(part, at)
            frame = self.pool.lend(segment, segments.new_loan(), sizes)
            token = run.to_bytes(_GIVEN_BYTES, "little", signed=True)
            socket.send_fds(self._connection, [token], [frame.memfd.descriptor])
        except OSError:  # user code has closed the socket, or has set limits
            return None
        return bytes(frame)


class NotebookClasses:
    """Binds each class of the notebook that a rank unpickles to the class's name in the rank's
    namespace, if the name is not taken.

    pickle finds a class by its name in ``__main__``: without the name, its instances could not be
    saved or sent to other ranks.

    Args:
        namespace: namespace of the rank.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._bound: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
        payload.listeners[:] = [self.bind]

    def bind(self, loaded: type) -> None:
        """Bind an unpickled class to its name in the namespace, unless user code has bound the name
        to another object.
        """
        name = loaded.__qualname__
        is_free = name not in self._namespace and not hasattr(builtins, name)
        if name.isidentifier() and (is_free or self._is_earlier(name)):
            self._namespace[name] = self._bound[name] = loaded

    def _is_earlier(self, name: str) -> bool:
        earlier = self._bound.get(name)
        return earlier is not None and self._namespace.get(name) is earlier


_CONTAINERS = (tuple, list, set, frozenset)
_WITHOUT_PARTS = frozenset((type(None), bool, int, float, str, bytes, torch.Tensor))


def bind_missing_names(values: Iterable[Any], namespace: Mapping[str, Any]) -> None:
    """Bind the global names that functions inside values use but lack to the rank's variables of
    these names; finds functions in globals, closures, methods, partials and containers.
    """
    _visit_functions(values, lambda function, names: bind(function, names, namespace))


def find_missing_names(
    values: Iterable[Any], mesh: Any = None
) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return the global names that functions inside values use but lack, each with that of the
    variable to be used, and the globals of these functions; for values that are called again after
    the rank's variables have changed. Names of the variable `mesh`, a DeviceMesh, are among them.
    """
    found: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
    mesh = mesh if isinstance(mesh, DeviceMesh) else None

    def note(function: types.FunctionType, names: tuple[str, ...]) -> list[Any]:
        known = function.__globals__
        lacking = found.setdefault(id(known), (known, {}))[1]
        for name in names:
            if _lacks(known, name):
                lacking[name] = name
            elif mesh is not None and known[name] is mesh:
                lacking[name] = "mesh"
        return bind(function, names, {})

    _visit_functions(values, note)
    return [each for each in found.values() if each[1]]


def bind_again(
    missing: Iterable[tuple[dict[str, Any], dict[str, str]]], namespace: Mapping[str, Any]
) -> None:
    """Bind names that `find_missing_names` has found to the present variables of the rank."""
    for known, names in missing:
        for name, variable in names.items():
            if variable in namespace and not hasattr(builtins, name):
                known[name] = namespace[variable]


def _visit_functions(
    values: Iterable[Any], visit: Callable[[types.FunctionType, tuple[str, ...]], list[Any]]
) -> None:
    seen: set[int] = set()
    todo = [*values]
    while todo:
        part = todo.pop()
        if type(part) in _WITHOUT_PARTS or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, types.FunctionType):
            module = sys.modules.get(part.__module__)
            if module is None or vars(module) is not part.__globals__:  # was sent by value
                todo += visit(part, names_of(part.__code__))
        elif isinstance(part, types.MethodType):
            todo += [part.__func__, type(part.__self__)]
        elif isinstance(part, functools.partial):
            todo += [part.func, part.args, part.keywords]
        elif isinstance(part, type):
            if part.__module__ == "__main__" or "<locals>" in part.__qualname__:
                todo += part.__bases__
                for value in vars(part).values():
                    todo += _functions_of(value)
        elif isinstance(part, dict):
            todo += part.values()
        elif isinstance(part, _CONTAINERS):
            todo += part


def _functions_of(value: Any) -> list[types.FunctionType]:
    """Return the functions of an attribute of a class: of a method or a property."""
    parts: list[Any] = [getattr(value, "__func__", value)]  # of a static or class method
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _lacks(known: dict[str, Any], name: str) -> bool:
    """Return whether globals have no variable of a name, or as ``mesh`` a mesh of the notebook that
    is not the rank's.
    """
    return name not in known or (name == "mesh" and type(known[name]) is Stray)


def bind(
    function: types.FunctionType, names: Iterable[str], namespace: Mapping[str, Any]
) -> list[Any]:
    """Bind the global names that a function uses (`names_of`) but lacks to variables of the rank;
    return the objects to which the function refers.
    """
    known = function.__globals__
    parts = []
    for name in names:
        if name in namespace and _lacks(known, name) and not hasattr(builtins, name):
            known[name] = namespace[name]
        if name in known:
            parts.append(known[name])
    for cell in function.__closure__ or ():
        if _is_bound(cell):
            parts.append(cell.cell_contents)
    return parts


def _is_bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes that code and the functions in it use."""
    names = code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += names_of(constant)
    return names


# ---------------------------------------------------------------- parts of tensors


def own_parts(
    names: Mapping[str, Any], work: PushParts, rank: int, device: torch.device, mesh: Any
) -> dict[str, Any]:
    """Return this rank's parts of the tensors that the controller splits among several ranks.

    Args:
        names: name -> a tensor or an array, or nested containers of them.
        work: order with the way in which they are split.
        rank, device, mesh: values of this rank, even if the user has bound these names to others.
    """
    index, num_parts = work.ranks.index(rank), len(work.ranks)

    def split(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)((key, split(part)) for key, part in value.items())
        if type(value) in (list, tuple):
            return type(value)(map(split, value))
        if work.placements is not None:
            return _distribute(value, work.placements, mesh, device)
        dim = work.dim % value.ndim
        start, length = part_along(value.shape[dim], num_parts, index)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            along = value.swapaxes(0, dim)[start : start + length]
            return numpy.ascontiguousarray(along.swapaxes(0, dim))
        part = _own(value.detach().narrow(dim, start, length), value, device)
        return part.requires_grad_(value.requires_grad)

    return {name: split(value) for name, value in names.items()}


def _distribute(
    whole: Any, placements: Sequence[int | None], mesh: Any, device: torch.device
) -> Any:
    """Return the DTensor that `distribute_tensor` would make of a whole tensor that each rank has,
    without communication.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = torch.as_tensor(whole)
    spec = [Replicate() if dim is None else Shard(dim % whole.ndim) for dim in placements]
    part = whole.detach()
    box = zip(*compute_local_shape_and_global_offset(whole.shape, mesh, spec), strict=True)
    for dim, (length, start) in enumerate(box):
        part = part.narrow(dim, min(start, whole.shape[dim]), length)
    made = DTensor.from_local(
        _own(part, whole, device),
        mesh,
        spec,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made.requires_grad_(whole.requires_grad)


def _own(part: Any, whole: Any, device: torch.device) -> Any:
    """Return a part of a tensor as a contiguous tensor on this device whose storage is not larger
    than the part; if possible without a copy.
    """
    part = settle(part)
    if not part.numel():
        part = torch.empty_like(part, memory_format=torch.contiguous_format)
    elif not part.is_contiguous() or part.device.type != "cpu":
        part = part.contiguous()
    elif part.shape != whole.shape and part.nbytes < part.untyped_storage().nbytes():
        # A view shares the whole storage, which `torch.save` and `.untyped_storage()` would
        # include.
        start = part.storage_offset() * part.element_size()
        storage = part.untyped_storage()[start : start + part.nbytes]
        empty: Any = torch.empty(0, dtype=part.dtype)
        part = empty.set_(storage, 0, part.shape)
    return part.to(device)


def give_part(value: Any) -> Part:
    """Return this rank's part of a tensor that the controller gathers from several ranks.

    Raises:
        MeshUsageError: it is a DTensor whose local tensors are no parts of the whole.
    """
    if not is_dtensor(value):
        return Part(settle(value))
    from torch.distributed.tensor import Replicate

    if (held := load("inspect.shards").ranges_of(value)) is None:
        return Part(None, tuple(value.shape))
    is_first = all(
        not index
        for index, each in zip(
            value.device_mesh.get_coordinate() or (), value.placements, strict=True
        )
        if type(each) is Replicate
    )
    return Part(
        settle(value.to_local()) if is_first else None,
        tuple(value.shape),
        tuple((dim[0][0], sum(n for _, n in dim)) for dim in held),
        held if any(len(dim) > 1 for dim in held) else (),
    )


def settle(value: Any) -> Any:
    """Detach a tensor from autograd, and carry out its lazy conjugation and negation; return other
    values unchanged.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.detach().resolve_conj().resolve_neg()
    return value
