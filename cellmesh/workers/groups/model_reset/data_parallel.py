"""Finds and resets DDP models (gradient buckets, hooks) and FSDP models (gathered parameters)."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.optim import Optimizer

from ...static_lookup import held_by
from ..healable_group import ended_work
from .kinds import (
    MAY_HAVE_UPDATED,
    Kind,
    Progress,
    before_next,
    clear,
    drop_grads,
    drop_unsharded_grads,
    has_unsharded_grads,
    leave_join,
    may_update_in_backward,
    param_groups,
    set_all,
)

Hook = Callable[[Any, Any], Any]
Buckets = list[list[int]]  # positions of the parameters of each bucket
_END = -1  # end of a bucket in a flat list of positions
_register = _c10d._register_comm_hook
_register_builtin = _c10d._register_builtin_comm_hook


class NotedHook:
    """Wraps a communication hook of DDP, and keeps the hook's futures of the last backward pass, as
    DDP's reducer considers that pass finished even if a future fails.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._futures: list[Any] = []

    def __call__(self, state: Any, bucket: Any) -> Any:
        if bucket.index() == 0:
            self._futures.clear()
        self._futures.append(self._hook(state, bucket))
        return self._futures[-1]

    @property
    def has_failed(self) -> bool:
        """Whether a future of the last backward pass has not succeeded, so that not all gradients
        are reduced.
        """
        return not all(future.done() and _has_succeeded(future) for future in self._futures)

    def forget(self) -> None:
        """Drop the futures of the last backward pass, after the model has been reset."""
        self._futures.clear()


def _has_succeeded(future: Any) -> bool:
    try:
        future.value()
    except Exception:
        return False
    return True


class CountingReducer(_c10d.Reducer):
    """DDP's reducer, with a count of the forward passes whose backward pass has to reduce
    gradients.

    Until that backward pass has run, the next one reduces gradients, also within ``no_sync``.
    """

    num_prepared = 0
    num_examined = 0  # `num_prepared` at the last failure
    num_agreed = 0  # `num_prepared` when ranks were last aligned

    def prepare_for_backward(self, outputs: Any) -> None:
        self.num_prepared += 1
        super().prepare_for_backward(outputs)


_noted_hooks: weakref.WeakKeyDictionary[Any, NotedHook] = weakref.WeakKeyDictionary()
# By reducer, as a DDP model does not show whether it has a built-in hook.
_builtin_hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def note_reducers(on_builtin: Callable[[], None]) -> None:
    """Make DDP models that are constructed from now on use `CountingReducer`, and wrap their
    communication hooks in `NotedHook`.

    Args:
        on_builtin: called before a built-in C++ hook is registered.
    """

    def register_builtin(reducer: Any, hook_type: Any) -> None:
        on_builtin()
        _builtin_hooks[reducer] = hook_type
        _register_builtin(reducer, hook_type)

    dist.Reducer = CountingReducer  # type: ignore[attr-defined]
    dist._register_comm_hook = _register_noted  # type: ignore[assignment, attr-defined]
    dist._register_builtin_comm_hook = register_builtin  # type: ignore[assignment, attr-defined]


def _register_noted(reducer: Any, state: Any, hook: Hook) -> None:
    _noted_hooks[reducer] = noted = NotedHook(hook)
    _register(reducer, state, noted)


class Ddp(Kind):
    where = "torch.nn.parallel.distributed", "DistributedDataParallel"
    label = "DDP"

    def concerns(self, found: Any) -> bool:
        return "reducer" in held_by(found)

    def names(self, found: Any) -> Iterable[str]:
        return [name for name, _ in found.module.named_parameters()]

    def is_dirty(self, found: Any) -> bool:
        if getattr(found.process_group, "has_failed_in_backward", False):
            return True  # although the reducer considers its work finished
        if (noted := _noted_hooks.get(found.reducer)) is not None and noted.has_failed:
            return True
        try:
            found.reducer._check_reducer_finalized()
        except RuntimeError:
            return True
        return False

    def progress(self, found: Any) -> tuple[int, ...]:
        # Ranks that differ in the first or second entry would begin their next forward pass with
        # different collectives; in the third, their next backward pass within ``no_sync``; in the
        # last, they would reduce one parameter's gradient into another's.
        iters = [state.iter for state in _counting(found)]
        buckets: Buckets = []
        if found._has_rebuilt_buckets:
            with contextlib.suppress(RuntimeError):  # no memory for a copy of the gradients
                buckets = buckets_of(found) or []
        return (
            int(found.require_forward_param_sync),
            int(found._join_config.enable),
            _num_ahead(found),
            len(iters),
            *iters,
            *(position for bucket in buckets for position in (*bucket, _END)),
        )

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        found.require_forward_param_sync = True
        leave_join(found)
        # Some ranks may still hold models that were made earlier, as tracebacks do.
        orders = {min(each[4 + each[3] :] for each in of_one_rank) for of_one_rank in progress}
        if len(orders) > 1:
            restart_buckets(found, _buckets_in(max(orders)))
        if len({each[2] for of_one_rank in progress for each in of_one_rank}) > 1:
            found.reducer.num_agreed = found.reducer.num_prepared
            before_next(found, "_pre_forward", found.reducer._reset_state)
        if all(len(of_one_rank) == 1 for of_one_rank in progress):
            iters = zip(*(each[4 : 4 + each[3]] for each, *_ in progress), strict=False)
            for state, of_ranks in zip(_counting(found), iters, strict=False):
                state.iter = min(of_ranks)  # as before the step that only some ranks have begun

    def may_differ(self, found: Any) -> bool:
        reducer = found.reducer
        if not isinstance(reducer, CountingReducer):
            return False
        before, reducer.num_examined = reducer.num_examined, reducer.num_prepared
        return before != reducer.num_examined

    def arm(self, found: Any) -> None:
        if found.static_graph and not found._has_rebuilt_buckets:
            before_next(found, "_pre_forward", functools.partial(_restart_static_graph, found))

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        # A clean model is left alone: its backward pass may be about to run.
        if not dirty:
            return
        found.require_forward_param_sync = True
        found.reducer._reset_state()
        if (noted := _noted_hooks.get(found.reducer)) is not None:
            noted.forget()
        if found._join_config.enable:
            found.reducer._set_forward_pass_work_handle(ended_work(), True)
        drop_grads(found.module)
        if found.static_graph and not found._get_ddp_logging_data().get("iteration"):
            # The first backward pass had to count how often each gradient becomes ready.
            restart_buckets(found)
        for hook, state in found._comm_hooks:
            set_all(state, False, "wait_for_stream_enqueued", "wait_for_optim_stream_enqueued")
            if hasattr(state, "error_dict") and hasattr(state, "rng"):  # state of PowerSGD
                if state.error_dict or state.p_memory_dict:
                    yield "PowerSGD starts over, without the error that it was to feed back"
                clear(state, "error_dict", "p_memory_dict", "q_memory_dict")
                state.rng.seed(state.iter)  # the same on all ranks
            elif not isinstance(state, (dist.ProcessGroup, type(None))) and not _is_of_torch(
                type(state)
            ):
                yield (
                    f"`{type(state).__name__}`, the state of DDP's communication hook, is as the "
                    "failed step left it, which may differ between ranks"
                )
            if "zero" in hook.__module__ or "optimizer" in hook.__module__:
                yield MAY_HAVE_UPDATED
        if may_update_in_backward(found.module):
            yield MAY_HAVE_UPDATED


def restart_buckets(found: Any, buckets: Buckets | None = None) -> None:
    """Give a DDP model a new reducer: as before the model's first step, or with the gradient
    buckets `buckets`; run no collective.
    """
    parameters, sparse = found._build_params_for_reducer()
    builtin_hook = _builtin_hooks.get(found.reducer)
    names = found._build_debug_param_to_name_mapping(parameters)
    found.reducer._remove_autograd_hooks()
    with use_buckets(buckets, found.bucket_bytes_cap):
        found._ddp_init_helper(parameters, sparse, names, found.static_graph)
    for hook, state in found._comm_hooks:
        _register_noted(found.reducer, state, hook)
    if builtin_hook is not None:
        found._register_builtin_comm_hook(builtin_hook)
    if found.static_graph:
        found._static_graph_delay_allreduce_enqueued = False
        found.reducer._set_static_graph()
        found.logger._set_static_graph()
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        found.reducer._set_optimizer_in_backward()
    found._has_rebuilt_buckets = False
    found._cellmesh_buckets = buckets


@contextlib.contextmanager
def use_buckets(buckets: Buckets | None, num_bytes: int) -> Iterator[None]:
    """Enter a context in which new DDP reducers get the gradient buckets `buckets`; torch's own if
    None.

    Another layout of buckets would add gradients in another order.
    """
    internals: Any = dist
    compute = internals._compute_bucket_assignment_by_size
    if buckets is not None:
        chosen = buckets[::-1]  # torch reverses them
        limits = [num_bytes] * len(chosen)
        internals._compute_bucket_assignment_by_size = lambda *args: (chosen, limits)
    try:
        yield
    finally:
        internals._compute_bucket_assignment_by_size = compute


def buckets_of(found: Any) -> Buckets | None:
    """Return the gradient buckets that a DDP model has chosen in its second step; None before."""
    told = found._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    if told:  # as "3 2, 1 0"
        return [[int(index) for index in bucket.split()] for bucket in told.split(",")]
    if not found._has_rebuilt_buckets:
        given: Buckets | None = getattr(found, "_cellmesh_buckets", None)
        return given  # buckets given to a new reducer that has not rebuilt its own yet
    # Not in the logging data during the second step; this takes as much memory as the gradients.
    position = {id(p): index for index, p in enumerate(found._build_params_for_reducer()[0])}
    buckets = found.reducer._get_zeros_like_grad_buckets()
    return [[position[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _buckets_in(positions: Sequence[int]) -> Buckets:
    """Return the gradient buckets that a flat list of parameter positions, made by `Ddp.progress`,
    encodes.
    """
    buckets: Buckets = [[]]
    for position in positions:
        if position == _END:
            buckets.append([])
        else:
            buckets[-1].append(position)
    return buckets[:-1]


def _restart_static_graph(found: Any) -> None:
    # The first backward pass may have run since `arm`.
    if not found._static_graph_delay_allreduce_enqueued:
        restart_buckets(found)


def _num_ahead(found: Any) -> int:
    """Return a DDP model's number of forward passes whose backward pass reduces gradients, since
    `Ddp.align` last made ranks equal.
    """
    reducer = found.reducer
    if not isinstance(reducer, CountingReducer):
        return 0
    return reducer.num_prepared - reducer.num_agreed


def _counting(found: Any) -> list[Any]:
    """Return those states of a DDP model's communication hooks that count the model's steps."""
    return [state for _, state in found._comm_hooks if type(getattr(state, "iter", None)) is int]


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


class Fsdp2(Kind):
    """Finds and resets FSDP2 models, each through the state object of its root module, from which
    the states of all its other modules are reached.
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
                group._to_sharded()  # on all ranks, as a gather has to begin on all or none
                if dirty:
                    drop_unsharded_grads(group)
        return (MAY_HAVE_UPDATED,) if dirty and may_update_in_backward(found._modules[0]) else ()

    def arm(self, found: Any) -> None:
        # No ``zero_grad`` of torch drops gradients that were accumulated but not reduced.
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
    """Return the live optimizers that have any of these parameters, given by their ids."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    return [
        optimizer
        for optimizer in found
        for group in held_by(optimizer).get("param_groups", ())
        if any(id(parameter) in parameters for parameter in group["params"])
    ]


class Fsdp1(Kind):
    """Finds and resets FSDP1 models, as far as possible: the next step gathers and shards
    parameters as the first step does.
    """

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
