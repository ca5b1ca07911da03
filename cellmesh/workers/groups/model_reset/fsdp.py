"""FSDP1 and FSDP2: gathered parameters, and state that one layer keeps for the next."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Container, Iterable
from typing import Any

from torch.optim import Optimizer

from ...static_lookup import held_by
from .kinds import (
    MAY_HAVE_UPDATED,
    Kind,
    before_next,
    clear,
    drop_grads,
    drop_unsharded_grads,
    has_unsharded_grads,
    may_update_in_backward,
    param_groups,
    set_all,
)


class Fsdp2(Kind):
    """FSDP2, by the state of a model's root module, which has the data that all its states
    share.
    """

    where = "torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"
    label = "FSDP2"

    def concerns(self, found: Any) -> bool:
        return held_by(found).get("_is_root") is True

    def names(self, found: Any) -> Iterable[str]:
        return [name for name, _ in found._modules[0].named_parameters()]

    def is_dirty(self, found: Any) -> bool:
        context = found._state_ctx
        return (
            context.post_backward_final_callback_queued
            or context.iter_forward_root is not None
            or any(
                holder._training_state.name != "IDLE"
                for state in context.all_states
                for holder in (state, *param_groups(state))
            )
        )

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        context, comm = found._state_ctx, found._comm_ctx
        idle = type(found._training_state).IDLE
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        comm.all_gather_state = None
        clear(comm, "post_forward_order", "reduce_scatter_states", "_last_post_reduce_events")
        set_all(comm, None, "reduce_scatter_state", "active_gradient_reduction")
        set_all(context, None, "manual_backward_finalization_active")
        set_all(context, False, "gradient_reduction_pending")
        for state in context.all_states:
            state._training_state = idle
            clear(state, "_modules_to_run_forward")
            for group in param_groups(state):
                group._training_state = idle
                set_all(
                    group,
                    None,
                    "_all_gather_result",
                    "_post_reduce_event",
                    "_reshard_after_forward_event",
                    "_all_reduce_state",
                )
                clear(group, "_post_forward_indices", "_partial_reduce_output_layout")
                set_all(group, False, "_post_backward_pending")
                group._to_sharded()  # on all ranks, or some would gather and others not
                if dirty:
                    drop_unsharded_grads(group)
        return (MAY_HAVE_UPDATED,) if dirty and may_update_in_backward(found._modules[0]) else ()

    def arm(self, found: Any) -> None:
        # No ``zero_grad`` of torch's forgets what was accumulated and not reduced.
        groups = [group for state in found._state_ctx.all_states for group in param_groups(state)]
        if not any(map(has_unsharded_grads, groups)):
            return
        sharded = {
            id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params
        }
        for owner in (found._modules[0], *_optimizers_of(sharded)):
            before_next(owner, "zero_grad", functools.partial(_forget_accumulated, groups))


def _forget_accumulated(groups: list[Any]) -> None:
    for group in groups:
        drop_unsharded_grads(group)


def _optimizers_of(parameters: Container[int]) -> list[Any]:
    """The live optimizers of any of these parameters, which are given by their ids."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    return [
        optimizer
        for optimizer in found
        for group in held_by(optimizer).get("param_groups", ())
        if any(id(parameter) in parameters for parameter in group["params"])
    ]


class Fsdp1(Kind):
    """FSDP1, as far as possible: the next step gathers and shards like the first one."""

    where = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
    label = "FSDP1"

    def concerns(self, found: Any) -> bool:
        return held_by(found).get("_is_root") is True

    def names(self, found: Any) -> Iterable[str]:
        return [name for name, _ in found.named_parameters()]

    def is_dirty(self, found: Any) -> bool:
        return any(
            state.training_state.name != "IDLE"
            or (state._handle is not None and state._handle._training_state.name != "IDLE")
            for state in found._all_fsdp_states
        ) or bool(getattr(found, "_post_backward_callback_queued", False))

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        if not dirty:
            return ()
        from torch.distributed.fsdp._runtime_utils import _reshard

        found._post_backward_callback_queued = False
        found._exec_order_data.next_iter()
        for state in found._all_fsdp_states:
            state.training_state = type(state.training_state).IDLE
            handle = state._handle
            if handle is None:
                continue
            handle._training_state = type(handle._training_state).IDLE
            handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = False
            handle._needs_pre_forward_unshard = handle._prefetched = False
            handle._post_forward_index = None
            parameter = handle.flat_param
            parameter.grad = None
            for name in ("_saved_grad_shard", "_cpu_grad", "_post_backward_called"):
                with contextlib.suppress(AttributeError):
                    delattr(parameter, name)
            if hasattr(parameter, "_post_backward_hook_state"):
                parameter._post_backward_hook_state[-1].remove()
                del parameter._post_backward_hook_state
            _reshard(state, handle, True)
        drop_grads(found)
        return ()
