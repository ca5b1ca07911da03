"""Makes replicas equal again: all ranks exchange what they hold, then the source broadcasts.

All is decided from what every rank has said, so that every rank decides the same: nobody waits in a
collective which others do not come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...errors import MeshUsageError
from ...wire.ranks import describe_groups, describe_ranks, group_ranks
from ...wire.replicas import SyncReport
from ..rank.value_transfer import is_dtensor
from .checking import find_parts
from .parts import ModelPart, StateSlot

_MAX_NAMED = 3


@dataclass(frozen=True)
class _Spec:
    """Shape and dtype of a tensor of an optimizer's state."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    beside_parameter: bool  # on its device
    is_dtensor: bool


@dataclass(frozen=True)
class _SlotView:
    """Which ranks hold a parameter's optimizer state, and its layout (None: there is no state)."""

    ranks: tuple[int, ...]
    layout: Any


@dataclass(frozen=True)
class _PartView:
    """One rank's part as other ranks need to know it; `positions` are its ranks in the groups."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    ranks: tuple[int, ...]
    positions: tuple[int, ...]
    value: Any


def sync(namespace: Mapping[str, Any], expression: str, source: int) -> SyncReport:
    """Make replicas equal to those of rank `source`, in place; a collective of all ranks.

    Parameters and buffers stay the same objects. Each set of replicas that rank `source` is not in
    takes its values from the member that stands in it where `source` stands in its own. Tensors of
    which no other rank holds the same part are left alone.

    Args:
        namespace: the rank's.
        expression: as for `check`; generators only if it is ``rng``.
        source: whose values are taken.

    Raises:
        MeshUsageError: the value is not there or not alike on all ranks; nothing has been changed
            then.
    """
    slots, slot_views = _agree(namespace, expression, source)
    num_created = sum(
        _match_state(slot, [v.get(slot.path) for v in slot_views], source) for slot in slots
    )
    parts = {part.path: part for part in find_parts(namespace, expression)[0]}
    views = _exchange({path: _view_part(part) for path, part in parts.items()})
    num_equal, left_out = 0, []
    with torch.no_grad():
        for path, theirs in views[source].items():  # in one order on all ranks
            part = parts.get(path)
            if part is None or len(_expand(part.holders.ranks)) == 1:
                continue
            if (
                len(_kinds(path, _expand(part.holders.ranks), views)) > 1
            ):  # state that cannot be made
                left_out.append(path)
                continue
            if part.replace is not None:
                part.replace(views[_leader(part.holders.ranks, theirs.ranks, source)][path].value)
            else:
                for group, position in zip(
                    part.holders.find_groups(), theirs.positions, strict=True
                ):
                    _broadcast(part.local(), group, position)
            num_equal += 1
    return SyncReport(
        num_equal=num_equal,
        num_alone=sum(len(_expand(part.holders.ranks)) == 1 for part in parts.values()),
        num_created=num_created,
        left_out=tuple(left_out),
    )


def _exchange(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _expand(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return ranks or tuple(range(dist.get_world_size()))


def _leader(ranks: tuple[int, ...], ranks_of_source: tuple[int, ...], source: int) -> int:
    """Return the rank that broadcasts to these ranks: the one at the position that `source` has in
    its own group.
    """
    return _expand(ranks)[_expand(ranks_of_source).index(source)]


def _agree(
    namespace: Mapping[str, Any], expression: str, source: int
) -> tuple[list[StateSlot], list[dict[str, _SlotView]]]:
    """Check that every rank has the expression's value; return each rank's optimizer state."""
    slots: list[StateSlot] = []
    parts: dict[str, _PartView] = {}
    states: dict[str, _SlotView] = {}
    problem = ""
    try:
        if not 0 <= source < dist.get_world_size():
            raise MeshUsageError(f"there is no rank {source}")
        found, _, slots = find_parts(namespace, expression)
        if not found:
            raise MeshUsageError(
                "there is no wrapped model (DDP, FSDP, tensor parallel): name what to sync"
            )
        parts = {part.path: _view_part(part) for part in found if not part.in_state}
        states = {
            slot.path: _SlotView(
                slot.holders.ranks, _layout(slot.optimizer.state.get(slot.parameter), slot)
            )
            for slot in slots
        }
    except Exception as error:  # the others wait for this rank's word
        problem = f"{type(error).__name__}: {error}"
    said = _exchange((problem, parts, states))
    told = describe_groups({rank: text for rank, (text, _, _) in enumerate(said)})
    told = told or list(_differences([views for _, views, _ in said]))
    if told:
        rest = f"; and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
        raise MeshUsageError(f"nothing was changed: {'; '.join(told[:_MAX_NAMED])}{rest}")
    return slots, [views for _, _, views in said]


def _match_state(slot: StateSlot, views: Sequence[_SlotView | None], source: int) -> bool:
    """Give an optimizer's state of a parameter the tensors that the source rank has in it."""
    theirs, mine = views[source], views[dist.get_rank()]
    if theirs is None or mine is None or len(_expand(slot.holders.ranks)) == 1:
        return False
    leader = views[_leader(slot.holders.ranks, theirs.ranks, source)]
    if leader is None or leader.layout == mine.layout:
        return False
    if leader.layout is None:
        slot.optimizer.state.pop(slot.parameter, None)
    else:
        before = slot.optimizer.state.get(slot.parameter) or {}
        slot.optimizer.state[slot.parameter] = {
            key: before[key]
            if key in before and mine.layout.get(key) == layout
            else _made(layout, slot)
            for key, layout in leader.layout.items()
        }
    return True


def _layout(state: Any, slot: StateSlot) -> Any:
    """Return shapes and dtypes of the tensors in an optimizer's state; None without a state."""
    if isinstance(state, torch.Tensor):
        beside = state.device == slot.parameter.device
        return _Spec(state.dtype, tuple(state.shape), beside, is_dtensor(state))
    if isinstance(state, Mapping):
        return {key: _layout(item, slot) for key, item in state.items()} or None
    if isinstance(state, list | tuple):
        return type(state)(_layout(item, slot) for item in state)
    # Plain values are copied with the tensors; whether they are equal is no matter of layout.
    return None if state is None else type(state)()


def _made(layout: Any, slot: StateSlot) -> Any:
    if isinstance(layout, _Spec):
        if layout.is_dtensor:  # sharded as its parameter is
            return torch.zeros_like(slot.parameter.detach(), dtype=layout.dtype)
        device = slot.parameter.device if layout.beside_parameter else "cpu"
        return torch.zeros(layout.shape, dtype=layout.dtype, device=device)
    if isinstance(layout, dict):
        return {key: _made(item, slot) for key, item in layout.items()}
    if isinstance(layout, list | tuple):
        return type(layout)(_made(item, slot) for item in layout)
    return layout


def _view_part(part: ModelPart) -> _PartView:
    positions = tuple(dist.get_rank(group) for group in part.holders.find_groups())
    if part.replace is not None:
        return _PartView((), None, part.holders.ranks, positions, part.value)
    local = part.local()
    return _PartView(tuple(local.shape), local.dtype, part.holders.ranks, positions, None)


def _differences(views: Sequence[Mapping[str, _PartView]]) -> Iterator[str]:
    """Describe which parts ranks that should hold equal values hold with other shapes."""
    for path in dict.fromkeys(path for view in views for path in view):
        for ranks in sorted({_expand(view[path].ranks) for view in views if path in view}):
            kinds = _kinds(path, ranks, views)
            if len(kinds) > 1:
                yield f"{path} is " + ", ".join(
                    f"{kind} on {describe_ranks(r)}" for kind, r in kinds.items()
                )


def _kinds(
    path: str, ranks: Sequence[int], views: Sequence[Mapping[str, _PartView]]
) -> dict[str, tuple[int, ...]]:
    """Group ranks by the shape and dtype of the part that they hold at a path."""
    return group_ranks({rank: _kind(views[rank].get(path)) for rank in ranks})


def _kind(view: _PartView | None) -> str:
    if view is None:
        return "missing"
    return "a plain value" if view.dtype is None else f"{view.shape} {view.dtype}"


def _broadcast(tensor: torch.Tensor, group: Any, position: int) -> None:
    """Broadcast a tensor as bytes, because not every backend supports every dtype, on a device
    that the group supports.
    """
    devices = {device.type for device in group._device_types}
    carrier = tensor if tensor.device.type in devices else tensor.to(sorted(devices)[-1])
    carrier = carrier.contiguous()
    if carrier.numel():
        dist.broadcast(carrier.reshape(-1).view(torch.uint8), group=group, group_src=position)
    if carrier is not tensor:
        tensor.copy_(carrier)
