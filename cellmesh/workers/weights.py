"""Gives this rank's parts of tensors to ranks of other meshes, and copies parts of theirs into its
own tensors, in place.

Source ranks write into shared-memory segments, which target ranks map; GPU tensors are copied by
way of the host. What a tensor's bytes travel in is decided in `WeightsHandler._give` and `_open`
alone. Targets keep the mappings of a copy for a while, as the faults of their pages take as long as
the copy itself: a segment is written again once the controller says that all targets have copied.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import MeshUsageError
from ..wire import segments
from ..wire.codec import Frame
from ..wire.messages import Pickled
from ..wire.weights import (
    AnyRequest,
    DescribeTensors,
    GiveTensors,
    HoldTensors,
    Piece,
    TakeTensors,
    TensorPart,
    lengths,
    overlaps,
    shared_volume,
    volume,
)
from .inspect.safe_read import bytes_of
from .inspect.shards import ranges_of
from .rank.features import Packed
from .rank.value_transfer import is_dtensor, settle

if TYPE_CHECKING:
    from .rank.features import RankContext

_FLAT = (
    "is wrapped in FullyShardedDataParallel, whose parameters are flat: use `fully_shard`, or copy "
    "`.state_dict()` of it (from all ranks) into a dict, for `load_state_dict`"
)
_STREAM = pickle.dumps(None)
# How long target ranks keep the mappings of a copy: its memory, if the source has ended.
KEEP_S = 20.0


class Found(NamedTuple):
    """A tensor in an expression's value."""

    part: TensorPart
    value: Any
    local: torch.Tensor | None  # this rank's part, None if it cannot be copied


class WeightsHandler:
    """Answers requests to describe, give and take tensors on one rank.

    Args:
        context: context of the rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._held: dict[int, list[tuple[tuple[Piece, ...], memoryview]]] = {}
        self._kept: dict[int, memoryview] = {}  # inode of a segment, which cannot end -> mapping
        self._timer = threading.Timer(0, int)

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        with torch.no_grad():
            match request:
                case DescribeTensors(expression, is_target, copies):
                    for left in self._held.keys() - set(copies):
                        del self._held[left]  # has failed, or its notebook has ended
                        self._kept.clear()
                    return msgspec.msgpack.encode(self._describe(expression, is_target))
                case GiveTensors():
                    return self._give(request)
                case HoldTensors(copy, pieces, payload):
                    held = self._held.setdefault(copy, [])
                    held.append((pieces, self._open(payload, buffers)))
                case TakeTensors(copy, expression):
                    held = self._held.pop(copy, [])
                    try:
                        return self._take(held, expression)
                    finally:
                        with self._context.interrupts:
                            self._keep([memory for _, memory in held])
        return None

    def _open(self, payload: Pickled, buffers: tuple[Frame, ...]) -> memoryview:
        """Return the bytes that a source rank has given, mapped if they are in a segment."""
        if not payload.is_mapped:
            return memoryview(bytearray(buffers[0]))
        frame = segments.open_segment(buffers[0])
        kept = self._kept.get(frame.ref.inode, memoryview(b""))
        if len(kept) < frame.num_bytes:
            kept = self._kept[frame.ref.inode] = segments.map_whole(frame)
        return kept

    def _keep(self, used: Sequence[memoryview]) -> None:
        """Keep only these mappings, for the next copy, if that is soon."""
        self._timer.cancel()
        for inode, memory in [*self._kept.items()]:
            if not any(memory is each for each in used):
                self._kept.pop(inode, None)
        self._timer = threading.Timer(KEEP_S, self._kept.clear)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # at the limit of threads
            self._kept.clear()

    def _find(self, expression: str) -> dict[str, Found]:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # also work on streams for which a copy would not wait
        code = compile(expression.strip(), "<expression>", "eval")
        return find_tensors(eval(code, self._context.shell.user_ns))

    def _describe(self, expression: str, is_target: bool) -> list[TensorPart]:
        found = self._find(expression)
        if not is_target:
            return [each.part for each in found.values()]
        again = self._find(expression)  # while the tensors of the first evaluation exist
        return [_as_target(each, again.get(name)) for name, each in found.items()]

    def _give(self, request: GiveTensors) -> Packed:
        rank = self._context.groups.rank
        share = next(each for each in request.shares if each.rank == rank)
        pieces, num_bytes = share.pieces, share.num_bytes
        found = self._find(request.expression)
        for piece in pieces:
            part = found[piece.name].part if piece.name in found else None
            if part is None or (part.dtype, part.ranges) != (piece.dtype, piece.ranges):
                raise _changed(piece.name)

        def parts() -> Iterator[tuple[int, Frame]]:
            for piece in pieces:  # one at a time, as a part may have to be copied to the CPU
                local: Any = found[piece.name].local
                yield piece.at, bytes_of(settle(local).cpu().contiguous())

        if num_bytes >= segments.MIN_BYTES and segments.are_possible():
            run, link = self._context.steps.run, self._context.segments
            frame = link.give_parts(run, [num_bytes], parts(), request.ended)
            if frame is not None:
                return Packed(Pickled(_STREAM, 1, True), [frame])
        whole = bytearray(num_bytes)
        for at, data in parts():
            whole[at : at + len(data)] = data
        return Packed(Pickled(_STREAM, 1), [whole])

    def _take(self, held: list[tuple[tuple[Piece, ...], memoryview]], expression: str) -> int:
        given: dict[str, list[tuple[Piece, memoryview]]] = {}
        for pieces, memory in held:
            for piece in pieces:
                given.setdefault(piece.name, []).append((piece, memory))
        found = self._find(expression)
        for name, (part, _, local) in found.items():
            ranges = part.ranges or ()
            shared = sum(shared_volume(piece.ranges, ranges) for piece, _ in given.get(name, ()))
            if local is None or (part.ranges is not None and shared != volume(ranges)):
                raise _changed(name)
        with self._context.interrupts:  # old values or new ones, never a mix
            for name, (part, value, local) in found.items():
                assert local is not None
                with torch.inference_mode(local.is_inference()):
                    for piece, memory in given.get(name, ()):
                        copy_piece(piece, memory, part, local)
                if is_dtensor(value) and not local.is_inference():
                    torch.autograd.graph.increment_version(value)
        return len(found)


make_handler = WeightsHandler


def copy_piece(piece: Piece, memory: memoryview, part: TensorPart, local: torch.Tensor) -> None:
    """Copy the elements that a piece shares with this rank's part of a tensor into that."""
    if part.ranges is None or not shared_volume(piece.ranges, part.ranges):
        return
    dtype, shape = getattr(torch, piece.dtype), lengths(piece.ranges)
    count = volume(piece.ranges)
    source = torch.frombuffer(memory, dtype=dtype, count=count, offset=piece.at).view(shape)
    for theirs, ours in overlaps(piece.ranges, part.ranges):
        local[ours].copy_(source[theirs])


def find_tensors(value: Any) -> dict[str, Found]:
    """Return the tensors in a module, a tensor, or nested dicts and lists of these, by their path;
    what else is there is among them with a problem.
    """
    found: dict[str, Found] = {}
    replicas = set[int]()
    for name, leaf in _leaves(value, "", replicas):
        each = _describe_leaf(name, leaf, id(leaf) in replicas)
        if name in found:
            each = Found(TensorPart(name, "is the name of two tensors: rename one"), leaf, None)
        found[name] = each
    return found


def _leaves(value: Any, path: str, replicas: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield paths and tensors; add the ids of tensors that DDP keeps equal on all ranks."""
    if isinstance(value, nn.Module):
        if _is_flat(value):
            yield path, _FLAT
            return
        for module in value.modules():
            is_ddp = isinstance(module, DistributedDataParallel)
            group: Any = module.process_group if is_ddp else None
            if is_ddp and dist.get_world_size(group) == dist.get_world_size():
                replicas.update(map(id, module.parameters()))
        # The hooks of FSDP2 make its parameters sharded again.
        value = value.state_dict(keep_vars=True)
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif value is not None:
        yield path, value
    for key, each in items or ():
        yield from _leaves(each, f"{path}.{key}" if path else str(key), replicas)


def _is_flat(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules()
    )


def _describe_leaf(name: str, leaf: Any, is_replica: bool) -> Found:
    if problem := _why_not(leaf):
        return Found(TensorPart(name, problem), leaf, None)
    ranges: Any = tuple(((0, size),) for size in leaf.shape)
    local = leaf
    if is_dtensor(leaf):
        is_replica = True
        try:
            ranges = ranges_of(leaf)
        except MeshUsageError as error:
            return Found(TensorPart(name, f"cannot be copied: {error}"), leaf, None)
        local = leaf._local_tensor
        if problem := _why_not(local):
            return Found(TensorPart(name, problem), leaf, None)
    local = local.wait() if hasattr(local, "wait") else local.detach()  # a collective's result
    part = TensorPart(
        name=name,
        dtype=str(local.dtype).removeprefix("torch."),
        item_bytes=local.element_size(),
        shape=tuple(leaf.shape),
        ranges=ranges,
        memory=(local.data_ptr(), *local.stride()) if local.numel() else (),
        is_replica=is_replica,
    )
    return Found(part, leaf, local)


def _why_not(value: Any) -> str:
    if isinstance(value, str) and value is _FLAT:
        return value
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}: only tensors are copied"
    if nn.parameter.is_lazy(value):
        return "has no shape yet: run the model once"
    if is_dtensor(value):
        if any(placement.is_partial() for placement in value.placements):
            return (
                f"has the placements {list(value.placements)}, so each rank holds a term of the "
                "value: copy `.redistribute(placements=[Replicate()])` of it"
            )
        return ""
    if value.is_meta:
        return "is a meta tensor, and has no data: `.to_empty(device=device)` of its model first"
    is_own = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return f"is no plain, dense tensor ({value.layout}): copy `.to_dense()` of it"
    if is_own and not hasattr(value, "wait"):
        return f"is a {type(value).__name__}: only plain tensors and DTensors are copied"
    if value.numel() and not hasattr(value, "wait") and not value.data_ptr():
        return "has no memory on this rank"
    return ""


def _as_target(found: Found, again: Found | None) -> TensorPart:
    """Return the description of a tensor that is to be written, or why it cannot be.

    Args:
        found: the tensor.
        again: the tensor of this name when the expression was evaluated once more.
    """
    part, local = found.part, found.local
    if local is None:
        return part
    if again is None or again.part.memory != part.memory:
        problem = (
            "is a new tensor at each evaluation, which nothing would keep: name one that is kept"
        )
    elif any(
        size > 1 and not stride for size, stride in zip(local.shape, local.stride(), strict=True)
    ):
        problem = (
            "is an expanded view, whose elements share memory: copy into `.contiguous()` of it"
        )
    else:
        return part
    return TensorPart(part.name, problem)


def _changed(name: str) -> MeshUsageError:
    return MeshUsageError(
        f"{name!r} has changed since the copy was planned, and nothing was copied here: copy again"
    )
