"""DistributedDataParallel: gradients in buckets, the buckets' order, communication hooks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist

from ...static_lookup import held_by
from ..healing import ended_work
from .kinds import (
    MAY_HAVE_UPDATED,
    Kind,
    Progress,
    before_next,
    clear,
    drop_grads,
    leave_join,
    may_update_in_backward,
    set_all,
)

Hook = Callable[[Any, Any], Any]
_register = _c10d._register_comm_hook
_register_builtin = _c10d._register_builtin_comm_hook


class NotedHook:
    """Wraps a communication hook of DDP, and keeps the futures that the hook returned in the last
    backward pass.

    DDP's reducer waits for these futures last of all, and holds the backward pass for done if one
    fails.
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
        """Whether a future of the hook failed, so that some gradients have not been reduced."""
        return any(not future.done() or _failed(future) for future in self._futures)

    def forget(self) -> None:
        """Drop the kept futures, after the model has been reset."""
        self._futures.clear()


def _failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:
        return True
    return False


_noted_hooks: weakref.WeakKeyDictionary[Any, NotedHook] = weakref.WeakKeyDictionary()
# By reducer: a DDP model itself does not know that it has one of those.
_builtin_hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def note_comm_hooks(on_builtin: Callable[[], None]) -> None:
    """Wrap communication hooks registered with DDP from now on in `NotedHook`.

    Args:
        on_builtin: called before a model is given a hook that is C++.
    """

    def register_builtin(reducer: Any, hook_type: Any) -> None:
        on_builtin()
        _builtin_hooks[reducer] = hook_type
        _register_builtin(reducer, hook_type)

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
            return True  # the reducer holds its work for done then
        if (noted := _noted_hooks.get(found.reducer)) is not None and noted.has_failed:
            return True
        try:
            found.reducer._check_reducer_finalized()
        except RuntimeError:
            return True
        return False

    def progress(self, found: Any) -> tuple[int, ...]:
        # Ranks that differ in the second or third would begin their next forward pass with other
        # collectives.
        return (
            int(found._has_rebuilt_buckets),
            int(found.require_forward_param_sync),
            int(found._join_config.enable),
            *(state.iter for state in _counting(found)),
        )

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        found.require_forward_param_sync = True
        leave_join(found)
        if all(len(of_one_rank) == 1 for of_one_rank in progress):
            iters = zip(*(of_one_rank[0][3:] for of_one_rank in progress), strict=False)
            for state, each in zip(_counting(found), iters, strict=False):
                state.iter = min(each)  # as before the step that only some have begun

    def arm(self, found: Any) -> None:
        if found.static_graph and not found._has_rebuilt_buckets:
            before_next(found, "_pre_forward", functools.partial(_restart_static_graph, found))

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        # A clean one is left alone: its forward pass may be waiting for its backward pass.
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
            restart_buckets(
                found
            )  # the first backward pass was to count how often each gradient is ready
        for hook, state in found._comm_hooks:
            set_all(state, False, "wait_for_stream_enqueued", "wait_for_optim_stream_enqueued")
            if hasattr(state, "error_dict") and hasattr(state, "rng"):  # PowerSGD
                if state.error_dict or state.p_memory_dict:
                    yield "PowerSGD starts over, without the error that it was to feed back"
                clear(state, "error_dict", "p_memory_dict", "q_memory_dict")
                state.rng.seed(state.iter)  # alike on all ranks
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

    def finish_buckets(self, found: Any) -> None:
        """Rebuild the buckets in their final order, if DDP has not done so yet."""
        if found._has_rebuilt_buckets:
            return
        # Rank 0 broadcasts the order of its own first step, which is the same as this rank's.
        with found.process_group.silenced(), contextlib.suppress(RuntimeError):
            if found.reducer._rebuild_buckets():
                found._has_rebuilt_buckets = True

    def digest_buckets(self, found: Any) -> str:
        """A digest of which parameters are in which bucket."""
        names = {parameter.data_ptr(): name for name, parameter in found.module.named_parameters()}
        buckets = [
            [names.get(parameter.data_ptr(), "?") for parameter in bucket.parameters()]
            for bucket in found.reducer._get_zeros_like_grad_buckets()
        ]
        return hashlib.sha1(repr(buckets).encode(), usedforsecurity=False).hexdigest()


def restart_buckets(found: Any) -> None:
    """Give a DDP model a new reducer, as before its first step."""
    parameters, sparse = found._build_params_for_reducer()
    builtin_hook = _builtin_hooks.get(found.reducer)
    found.reducer._remove_autograd_hooks()
    found._ddp_init_helper(
        parameters, sparse, found._build_debug_param_to_name_mapping(parameters), found.static_graph
    )
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


def _restart_static_graph(found: Any) -> None:
    # The first backward pass may have run since `arm`.
    if not found._static_graph_delay_allreduce_enqueued:
        restart_buckets(found)


def _counting(found: Any) -> list[Any]:
    """The states of a hook that count steps, on which the hook's behaviour depends."""
    return [state for _, state in found._comm_hooks if type(getattr(state, "iter", None)) is int]


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"
