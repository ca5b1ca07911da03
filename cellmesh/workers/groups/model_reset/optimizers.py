"""Optimizers and gradient scalers that keep state from one part of a step for the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...static_lookup import held_by
from .kinds import Kind, Progress, before_next, clear, leave_join


class Zero(Kind):
    """ZeroRedundancyOptimizer overlapped with DDP; otherwise this optimizer keeps no such state."""

    where = "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"
    label = "ZeRO"
    drops_grads = False

    def concerns(self, found: Any) -> bool:
        return "_join_config" in held_by(found)

    def names(self, found: Any) -> Iterable[str]:
        return [str(tuple(parameter.shape)) for parameter in found._all_params]

    def is_dirty(self, found: Any) -> bool:
        info = _overlap(found)
        return info is not None and bool(info.bucket_indices_seen or info.broadcast_handles)

    def progress(self, found: Any) -> tuple[int, ...]:
        info = _overlap(found)
        return (int(found._join_config.enable), -1 if info is None else int(info.status))

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        leave_join(found)
        if (info := _overlap(found)) is not None and len(
            {each[1] for one in progress for each in one}
        ) > 1:
            _forget_buckets(info)

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        if (info := _overlap(found)) is not None and dirty:
            info.broadcast_handles.clear()
            info.clear_per_iter_info()
            if info.status.name != "INITIALIZED":
                _forget_buckets(info)
        return ()


def _overlap(found: Any) -> Any:
    return getattr(found, "_overlap_info", None)


def _forget_buckets(info: Any) -> None:
    """Drop DDP's buckets, so that the next passes record them as the first ones did."""
    info.status = type(info.status).UNINITIALIZED
    clear(info, "params_per_bucket", "offsets", "assigned_ranks_per_bucket")
    for parameters in info.params_per_rank:
        parameters.clear()
    info.num_bucket_assignments = 0
    info.total_size = 0 if info.shard_buckets else None


class Scaler(Kind):
    """A `GradScaler` that a failed cell has left between ``unscale_`` and ``update``."""

    where = "torch.amp.grad_scaler", "GradScaler"
    label = "GradScaler"

    def concerns(self, found: Any) -> bool:
        return bool(held_by(found).get("_per_optimizer_states"))

    def names(self, found: Any) -> Iterable[str]:
        return ()

    def is_dirty(self, found: Any) -> bool:
        return False

    def arm(self, found: Any) -> None:
        if any(state["stage"].name != "READY" for state in found._per_optimizer_states.values()):
            before_next(found, "scale", found._per_optimizer_states.clear)

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        return ()
