"""Makes replicas equal again: ranks exchange descriptions of their tensors and values, then the
source rank broadcasts its own.

Every rank derives the same decisions from the descriptions of all ranks, so that no rank waits in a
collective which others do not begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ...errors import MeshUsageError
from ...wire.ranks import describe_groups, describe_ranks, group_ranks
from ...wire.replicas import SyncReport
from ..rank.value_transfer import is_dtensor
from .parts import ModelPart, StateSlot, find_parts

_MAX_NAMED = 3


@dataclass(frozen=True)
class _Spec:
    """Shape and dtype of a tensor in an optimizer's state."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    beside_parameter: bool  # whether it is on the parameter's device
    is_dtensor: bool


@dataclass(frozen=True)
class _View:
    """One rank's description, for the other ranks, of a `ModelPart` or of an optimizer's state of a
    parameter.

    Attributes:
        ranks: ranks that should hold an equal one.
        positions: the rank's positions in the process groups that reach these ranks.
        kind: kind of the part, as text.
        content: a plain value; or the layout of a state (None without a state).
    """

    ranks: tuple[int, ...]
    positions: tuple[int, ...] = ()
    kind: str = "missing"
    content: Any = None


_MISSING = _View(())


def sync(namespace: Mapping[str, Any], expression: str, source: int) -> SyncReport:
    """Make replicas equal to those of rank `source`, in place; a collective of all ranks.

    Parameters and buffers stay the same objects. Each set of replicas without rank `source` takes
    its values from the member at the position that `source` has in its own set. Tensors without a
    replica on another rank are not changed.

    Args:
        namespace: namespace of the rank.
        expression: as for `check`; includes generators only if it is ``rng``.
        source: rank whose values are taken.

    Raises:
        MeshUsageError: the value is missing on some rank, or its parts have other shapes there;
            nothing has been changed.
    """
    slots: list[StateSlot] = []

    def look() -> tuple[dict[str, _View], dict[str, _View]]:
        found, _, found_slots = find_parts(namespace, expression)
        if not found:
            raise MeshUsageError(
                "there is no wrapped model (DDP, FSDP, tensor parallel): name what to sync"
            )
        slots.extend(found_slots)
        states = {s.path: _View(s.holders.ranks, content=_layout(s)) for s in found_slots}
        return {part.path: _view_of(part) for part in found if not part.in_state}, states

    seen = agree(look, "nothing was changed")
    if different := list(_differences([views for views, _ in seen])):
        more = f"; and {len(different) - _MAX_NAMED} more" if len(different) > _MAX_NAMED else ""
        raise MeshUsageError(f"nothing was changed: {'; '.join(different[:_MAX_NAMED])}{more}")
    num_created = sum(_match_state(slot, [views for _, views in seen], source) for slot in slots)
    parts = {part.path: part for part in find_parts(namespace, expression)[0]}
    views = _exchange({path: _view_of(part) for path, part in parts.items()})
    num_equal, left_out = 0, []
    with torch.no_grad():
        for path, theirs in views[source].items():  # in the same order on all ranks
            part = parts.get(path)
            if part is None or len(holders := _expand(part.holders.ranks)) == 1:
                continue
            if len(_kinds(path, holders, views)) > 1:  # a state that cannot be made
                left_out.append(path)
                continue
            if part.replace is not None:
                part.replace(views[_leader(holders, theirs.ranks, source)][path].content)
            else:
                groups = part.holders.find_groups()
                for group, position in zip(groups, theirs.positions, strict=True):
                    _broadcast(part.local(), group, position)
            num_equal += 1
    return SyncReport(
        num_equal=num_equal,
        num_alone=sum(len(_expand(part.holders.ranks)) == 1 for part in parts.values()),
        num_created=num_created,
        left_out=tuple(left_out),
    )


def agree(step: Callable[[], Any], refusal: str) -> list[Any]:
    """Call `step` on every rank, and return the results of all ranks; a collective.

    Raises:
        MeshUsageError: on all ranks, if the step has failed on some; the text begins with
            `refusal`.
    """
    problem, mine = "", None
    try:
        mine = step()
    except Exception as error:  # sent to the other ranks, which wait for this rank's result
        text = str(error)
        problem = text if isinstance(error, MeshUsageError) else f"{type(error).__name__}: {text}"
    found = _exchange((problem, mine))
    if problems := describe_groups({rank: text for rank, (text, _) in enumerate(found)}):
        raise MeshUsageError(f"{refusal}: {'; '.join(problems[:_MAX_NAMED])}")
    return [value for _, value in found]


def _exchange(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _expand(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return ranks or tuple(range(dist.get_world_size()))


def _leader(ranks: tuple[int, ...], ranks_of_source: tuple[int, ...], source: int) -> int:
    """Return the rank that broadcasts to `ranks`: the one at the position in them that `source` has
    in `ranks_of_source`.
    """
    return _expand(ranks)[_expand(ranks_of_source).index(source)]


def _match_state(slot: StateSlot, views: Sequence[Mapping[str, _View]], source: int) -> bool:
    """Give the state that an optimizer holds for a parameter the layout that it has on the source
    rank; return whether the state was changed.
    """
    theirs, mine = (views[rank].get(slot.path) for rank in (source, dist.get_rank()))
    if theirs is None or mine is None or len(_expand(slot.holders.ranks)) == 1:
        return False
    leader = views[_leader(slot.holders.ranks, theirs.ranks, source)].get(slot.path)
    if leader is None or leader.content == mine.content:
        return False
    before = slot.optimizer.state.pop(slot.parameter, None) or {}
    if leader.content is not None:
        slot.optimizer.state[slot.parameter] = {
            key: before[key]
            if key in before and mine.content.get(key) == layout
            else pytree.tree_map(lambda spec: _made(spec, slot), layout)
            for key, layout in leader.content.items()
        }
    return True


def _layout(slot: StateSlot) -> Any:
    """Return the state that an optimizer holds for a parameter, with shapes and dtypes in place of
    tensors; None if it holds none.
    """

    def spec_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            beside = leaf.device == slot.parameter.device
            return _Spec(leaf.dtype, tuple(leaf.shape), beside, is_dtensor(leaf))
        # Plain values are copied with the tensors; they may differ in equal layouts.
        return None if leaf is None else type(leaf)()

    state = slot.optimizer.state.get(slot.parameter)
    return pytree.tree_map(spec_of, dict(state)) if state else None


def _made(spec: Any, slot: StateSlot) -> Any:
    if not isinstance(spec, _Spec):
        return spec
    if spec.is_dtensor:  # sharded like its parameter
        return torch.zeros_like(slot.parameter.detach(), dtype=spec.dtype)
    device = slot.parameter.device if spec.beside_parameter else "cpu"
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _view_of(part: ModelPart) -> _View:
    positions = tuple(dist.get_rank(group) for group in part.holders.find_groups())
    if part.replace is not None:
        return _View(part.holders.ranks, positions, "a plain value", part.value)
    local = part.local()
    return _View(part.holders.ranks, positions, f"{tuple(local.shape)} {local.dtype}")


def _differences(views: Sequence[Mapping[str, _View]]) -> Iterator[str]:
    """Describe each part whose shape differs between ranks that should hold equal ones."""
    for path in dict.fromkeys(path for view in views for path in view):
        for ranks in sorted({_expand(view[path].ranks) for view in views if path in view}):
            kinds = _kinds(path, ranks, views)
            if len(kinds) > 1:
                found = [f"{kind} on {describe_ranks(holders)}" for kind, holders in kinds.items()]
                yield f"{path} is {', '.join(found)}"


def _kinds(
    path: str, ranks: Sequence[int], views: Sequence[Mapping[str, _View]]
) -> dict[str, tuple[int, ...]]:
    """Group `ranks` by the kind of their part at `path`: shape and dtype, a plain value, or
    missing.
    """
    return group_ranks({rank: views[rank].get(path, _MISSING).kind for rank in ranks})


def _broadcast(tensor: torch.Tensor, group: Any, position: int) -> None:
    """Broadcast a tensor as bytes, as not every backend supports every dtype, on a device that the
    group supports.
    """
    devices = {device.type for device in group._device_types}
    carrier = tensor if tensor.device.type in devices else tensor.to(sorted(devices)[-1])
    carrier = carrier.contiguous()
    if carrier.numel():
        dist.broadcast(carrier.reshape(-1).view(torch.uint8), group=group, group_src=position)
    if carrier is not tensor:
        tensor.copy_(carrier)
