"""Pipelines of torch.distributed.pipelining: microbatches in flight, and their losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...static_lookup import held_by
from .kinds import Kind, Progress, clear, drop_grads, set_all

# Of schedules, over all versions of torch: what holds something only while a step runs.
_OF_STEPS = ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops")
# And of stages; an evaluation leaves them full. `fwd_cache` is `_forward_chunk_states` from torch
# 2.15 on.
_OF_PASSES = ("fwd_cache", "_forward_chunk_states", "backward_state")
_SETUP = (
    "_stage_initialized",
    "_stage_forward_initialized",
    "_stage_backward_initialized",
    "_stages_initialized",
    "_stages_forward_initialized",
    "_stages_backward_initialized",
    "_p2p_initialized",
)


class Pipeline(Kind):
    where = "torch.distributed.pipelining.schedules", "_PipelineSchedule"
    label = "pipeline"

    def concerns(self, found: Any) -> bool:
        return not {"_stages", "_stage"}.isdisjoint(held_by(found))

    def names(self, found: Any) -> Iterable[str]:
        return [type(found).__name__, str(found._n_microbatches)]  # stages differ between ranks

    def is_dirty(self, found: Any) -> bool:
        return any(getattr(found, name, None) for name in _OF_STEPS) or any(
            stage.has_backward and any(getattr(stage, name, None) for name in _OF_PASSES)
            for stage in _stages(found)
        )

    def progress(self, found: Any) -> tuple[int, ...]:
        return tuple(int(getattr(found, name, False)) for name in _SETUP)

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        _forget_shapes(found)

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        clear(
            found,
            *_OF_STEPS,
            "backward_counter",
            "unsharded_stages",
            "_deferred_stages",
            "_finalized_stages",
        )
        for stage in _stages(found):
            if getattr(stage, "_metadata_inference_buffer_backup", None) is not None:
                stage._post_metadata_inference_cleanup()
            set_all(stage, None, "_gradient_reduction_handle")
            stage.clear_runtime_states()
            clear(stage, *_OF_PASSES, "bwd_cache", "dw_runner")
            for info in _receives(stage):
                info.buffer = None
            if dirty and stage.has_backward:
                drop_grads(stage.submod)
        if not any(self.progress(found)):
            _forget_shapes(found)  # other ranks may have got less far in the exchange of shapes
        elif dirty:
            set_all(
                found, False, *_SETUP
            )  # the first exchange of messages connects NCCL's communicators
        return ()


def _forget_shapes(schedule: Any) -> None:
    """Make the next step exchange shapes and connect, like the first one."""
    set_all(schedule, False, *_SETUP)
    for stage in _stages(schedule):
        if hasattr(stage, "inputs_meta"):  # until torch 2.12; it does not send shapes that it knows
            stage.inputs_meta = stage._outputs_meta = None


def _receives(stage: Any) -> Iterator[Any]:
    """The pending receives of a stage; before torch 2.15 receive buffers are reused and stay."""
    if hasattr(stage, "_forward_chunk_states"):
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            yield from (info for info in infos if not info.is_root_arg)


def _stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]
