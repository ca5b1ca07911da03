"""What an interrupted step leaves behind inside models, and how it is taken out again.

A step that stops half way leaves DDP's reducer waiting for gradients, FSDP's parameters gathered, a pipeline
with microbatches on the way; the next step on the same objects would raise or, worse, wait for operations
that other ranks do not begin. The models are found through the garbage collector, as nobody registers them.

Ranks differ in what they find: the one that raised is often clean, while the others stopped in the middle of
a backward pass. Since all must go on alike, each tells the others which models it has found half done, by
a signature that is the same on all ranks, and `Survey.reset` treats what any of them has named.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

import torch.distributed.distributed_c10d as c10d

from ..static_lookup import held_by


class _Kind(Protocol):
    """A kind of object that keeps state between operations.

    Attributes:
        where: module and name of its class.
    """

    where: tuple[str, str]

    def concerns(self, found: Any) -> bool:
        """Whether a live instance of the class is to be looked at by itself; runs none of its code."""
        ...

    def names(self, found: Any) -> Iterable[str]:
        """What identifies it on all ranks."""
        ...

    def is_dirty(self, found: Any) -> bool:
        """Whether a step stopped inside it."""
        ...

    def reset(self, found: Any, dirty: bool) -> None:
        """Make it as between two steps; with `dirty`, forget the step's gradients."""
        ...


def is_dirty() -> bool:
    """Whether an interrupted step has left any model half done."""
    return bool(Survey().half_done)


def reset() -> None:
    """Make every model of this rank fit for the next step, by what this rank knows."""
    survey = Survey()
    survey.reset(survey.half_done)


class Survey:
    """The live models of this process, found when it is made.

    Attributes:
        half_done: signatures of those that an interrupted step has left half done.
    """

    def __init__(self) -> None:
        self._found: list[tuple[_Kind, Any]] = []
        dirty = set()
        for kind, one in _all():
            try:
                signature, is_dirty = _signature(kind, one), kind.is_dirty(one)
            except KeyboardInterrupt:
                raise
            except BaseException:  # half made, or user code in it raises: no step gets through it either
                continue
            self._found.append((kind, one))
            if is_dirty:
                dirty.add(signature)
        self.half_done = tuple(sorted(dirty))

    def reset(self, half_done: Collection[str]) -> None:
        """Make every model fit for the next step.

        Args:
            half_done: what any rank has found half done.
        """
        for kind, one in self._found:
            kind.reset(one, _signature(kind, one) in half_done)

    # DDP packs gradients into buckets, in an order that it changes once, after the first step. Ranks that
    # stopped on both sides of that would reduce one parameter's gradient into another's.

    def bucket_states(self) -> dict[str, bool]:
        """For each DDP model, by signature, whether its buckets are in their final order."""
        return {_signature(kind, one): kind.has_final_buckets(one) for kind, one in self._ddp()}

    def finish_buckets(self, unsettled: Collection[str]) -> dict[str, str]:
        """Bring buckets into their final order where ranks differ in that; returns digests of the orders."""
        digests = {}
        for kind, one in self._ddp():
            if (signature := _signature(kind, one)) in unsettled:
                kind.finish_buckets(one)
                digests[signature] = kind.digest_buckets(one)
        return digests

    def restart_buckets(self, different: Collection[str]) -> None:
        """Bring buckets into the order of the first step, on all ranks, where ranks still differ."""
        for kind, one in self._ddp():
            if _signature(kind, one) in different:
                kind.restart_buckets(one)

    def _ddp(self) -> list[tuple[_Ddp, Any]]:
        return [(kind, one) for kind, one in self._found if isinstance(kind, _Ddp)]


def _all() -> list[tuple[_Kind, Any]]:
    """The live objects of all kinds; modules are not imported for that, and all is seen in one pass."""
    kinds: dict[int, _Kind] = {}  # by id: a class's own hash, a metaclass's, may raise
    for kind in (_Ddp(), _Fsdp2(), _Fsdp1(), _Pipeline()):
        module, name = kind.where
        if (root := getattr(sys.modules.get(module), name, None)) is not None:
            kinds.update((id(each), kind) for each in _with_subclasses(root))
    if not kinds:
        return []
    # By `type`, as ``isinstance`` asks the objects, and some that stand for others do something then.
    found = [(kinds[id(type(thing))], thing) for thing in gc.get_objects() if id(type(thing)) in kinds]
    return [(kind, thing) for kind, thing in found if kind.concerns(thing)]


def _with_subclasses(root: type) -> Iterator[type]:
    yield root
    subclasses: list[type] = type.__subclasses__(root)
    for below in subclasses:
        yield from _with_subclasses(below)


def _signature(kind: _Kind, one: Any) -> str:
    digest = hashlib.sha1("\n".join(kind.names(one)).encode(), usedforsecurity=False)
    return f"{type(kind).__name__}:{digest.hexdigest()[:16]}"


def _drop_grads(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _clear(owner: Any, *names: str) -> None:
    """Empty those containers of an object that this version of torch has."""
    for name in names:
        if (container := getattr(owner, name, None)) is not None:
            container.clear()


def _set(owner: Any, value: Any, *names: str) -> None:
    """Set those attributes of an object that this version of torch has."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, value)


class _Ddp:
    where = "torch.nn.parallel.distributed", "DistributedDataParallel"

    def concerns(self, found: Any) -> bool:
        return "reducer" in held_by(found)

    def names(self, found: Any) -> Iterable[str]:
        return [name for name, _ in found.module.named_parameters()]

    def is_dirty(self, found: Any) -> bool:
        if getattr(found.process_group, "has_failed_in_backward", False):
            return True  # the reducer holds its work for done then
        try:
            found.reducer._check_reducer_finalized()
        except RuntimeError:
            return True
        return False

    def reset(self, found: Any, dirty: bool) -> None:
        # A clean one is left alone: its forward pass may be waiting for its backward pass.
        if dirty:
            if found._has_rebuilt_buckets:
                found._cellmesh_final_buckets = True  # the reducer forgets that it has, not what it has
            found._has_rebuilt_buckets = False
            found.reducer._reset_state()
            _drop_grads(found.module.parameters())

    def has_final_buckets(self, found: Any) -> bool:
        return bool(found._has_rebuilt_buckets or getattr(found, "_cellmesh_final_buckets", False))

    def finish_buckets(self, found: Any) -> None:
        if self.has_final_buckets(found):
            return
        # What rank 0 tells the others is the order of its own first step, the same as ours.
        with found.process_group.silenced(), contextlib.suppress(RuntimeError):
            if found.reducer._rebuild_buckets():
                found._has_rebuilt_buckets = True

    def digest_buckets(self, found: Any) -> str:
        names = {parameter.data_ptr(): name for name, parameter in found.module.named_parameters()}
        buckets = [
            [names.get(parameter.data_ptr(), "?") for parameter in bucket.parameters()]
            for bucket in found.reducer._get_zeros_like_grad_buckets()
        ]
        return hashlib.sha1(repr(buckets).encode(), usedforsecurity=False).hexdigest()

    def restart_buckets(self, found: Any) -> None:
        parameters, sparse = found._build_params_for_reducer()
        found.reducer._remove_autograd_hooks()
        found._ddp_init_helper(
            parameters, sparse, found._build_debug_param_to_name_mapping(parameters), found.static_graph
        )
        for hook, state in found._comm_hooks:
            c10d._register_comm_hook(found.reducer, state, hook)  # type: ignore[attr-defined]
        found._has_rebuilt_buckets = found._cellmesh_final_buckets = False


class _Fsdp2:
    """Of the states of a model the root's; they share what they know about the step."""

    where = "torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"

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
                for holder in (state, *_param_groups(state))
            )
        )

    def reset(self, found: Any, dirty: bool) -> None:
        context, comm = found._state_ctx, found._comm_ctx
        idle = type(found._training_state).IDLE
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        comm.all_gather_state = None
        _clear(comm, "post_forward_order", "reduce_scatter_states", "_last_post_reduce_events")
        _set(comm, None, "reduce_scatter_state")
        for state in context.all_states:
            state._training_state = idle
            _clear(state, "_modules_to_run_forward")
            for group in _param_groups(state):
                group._training_state = idle
                _set(
                    group,
                    None,
                    "_all_gather_result",
                    "_post_reduce_event",
                    "_reshard_after_forward_event",
                    "_all_reduce_state",
                )
                _clear(group, "_post_forward_indices")
                group._to_sharded()  # on all ranks, or some would gather and others not
                if dirty:
                    group._partial_reduce_output = None
                    for parameter in group.fsdp_params:
                        parameter.sharded_param.grad = None
                        if "unsharded_accumulated_grad" in vars(parameter):
                            parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None


def _param_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


class _Fsdp1:
    """Best effort: the next step gathers and shards as the first one did."""

    where = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"

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

    def reset(self, found: Any, dirty: bool) -> None:
        if not dirty:
            return
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
        _drop_grads(found.parameters())


class _Pipeline:
    where = "torch.distributed.pipelining.schedules", "_PipelineSchedule"

    def concerns(self, found: Any) -> bool:
        return not {"_stages", "_stage"}.isdisjoint(held_by(found))

    def names(self, found: Any) -> Iterable[str]:
        return [type(found).__name__, str(found._n_microbatches)]  # stages differ between ranks

    def is_dirty(self, found: Any) -> bool:
        return any(stage.has_backward and stage.fwd_cache for stage in _stages(found))

    def reset(self, found: Any, dirty: bool) -> None:
        # The next step settles shapes anew: ranks may have stopped on both sides of having done so.
        _set(
            found,
            False,
            "_stage_initialized",
            "_stage_forward_initialized",
            "_stage_backward_initialized",
            "_stages_initialized",
            "_stages_forward_initialized",
            "_stages_backward_initialized",
        )
        for stage in _stages(found):
            stage.clear_runtime_states()
            _clear(stage, "bwd_cache")
            if dirty:
                _drop_grads(stage.submod.parameters())


def _stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]
