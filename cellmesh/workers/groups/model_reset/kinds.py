"""Finds and resets objects that a failed training step may leave half done: pipelines, optimizers,
gradient scalers, ...
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from traceback import walk_stack, walk_tb
from typing import Any

import torch
from torch.autograd import Variable

from ...static_lookup import held_by, module_of, name_of, text_of

# Progress of the models with one signature, sorted so that it is comparable between ranks.
Progress = tuple[tuple[int, ...], ...]
MAY_HAVE_UPDATED = (
    "what updates parameters within the backward pass may have updated some: %dist_check shows "
    "whether replicas still agree"
)


class Kind:
    """Base class for finding, examining and resetting one kind of object (such as DDP models or
    pipelines) that a failed step may leave half done.
    """

    where: tuple[str, str]  # module and name of the object's class
    label: str  # name of the kind for users
    drops_grads = True  # whether the reset of a half-done object drops gradients

    def concerns(self, found: Any) -> bool:
        """Return whether a live instance has state to examine, and is not examined as part of
        another object (a nested FSDP module); runs no code of the instance.
        """
        raise NotImplementedError

    def names(self, found: Any) -> Iterable[str]:
        """Return names of the object's parts, equal on all ranks, by which the object is
        identified.
        """
        return ()

    def is_dirty(self, found: Any) -> bool:
        """Return whether an interrupted training step has left a wrapper or model half done."""
        return False

    def may_differ(self, found: Any) -> bool:
        """Return whether the object has been used, since the last call, in such a way that ranks
        may differ in its `progress`; if so, ranks compare it after a failure.
        """
        return False

    def progress(self, found: Any) -> tuple[int, ...]:
        """Return counters and flags of the object that are equal on all ranks between two steps."""
        return ()

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        """Bring the object, whose `progress` differs between ranks, to the same state on all of
        them.
        """

    def arm(self, found: Any) -> None:
        """After a failed cell, make the object's next step drop the failed step's state first; not
        at once, as the next cell may continue the failed step by a backward pass.
        """

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        """Reset the object to its state between two steps, without the gradients of a `dirty` step;
        return notes for the user on losses, or on state that could not be reset.
        """
        return ()


def drop_grads(module: Any) -> None:
    """Drop the gradients of a module, including those that FSDP2 keeps internally."""
    for parameter in module.parameters():
        parameter.grad = None
    for each in module.modules():
        if (find_state := getattr(each, "_get_fsdp_state", None)) is not None:
            for group in param_groups(find_state()):
                drop_unsharded_grads(group)


def param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 module's state; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def has_unsharded_grads(group: Any) -> bool:
    """Return whether a parameter group of FSDP2 has accumulated gradients and not reduced them."""
    return group._partial_reduce_output is not None or any(
        vars(parameter).get("unsharded_accumulated_grad") is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for parameter in group.fsdp_params
    )


def drop_unsharded_grads(group: Any) -> None:
    """Drop the unreduced gradients that a parameter group of FSDP2 has accumulated."""
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        parameter.sharded_param.grad = None
        if "unsharded_accumulated_grad" in vars(parameter):  # before torch 2.15
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def clear(owner: Any, *names: str) -> None:
    """Empty those containers of an object that exist, in this version of torch, under the given
    attribute names.
    """
    for name in names:
        if (container := getattr(owner, name, None)) is not None:
            container.clear()


def set_all(owner: Any, value: Any, *names: str) -> None:
    """Set those attributes of an object to `value` that exist, in this version of torch, under the
    given names.
    """
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, value)


def before_next(owner: Any, method: str, action: Callable[[], None]) -> None:
    """Patch an object so that the next call of one of its methods calls `action` first."""
    if method not in held_by(owner):
        object.__setattr__(owner, method, functools.partial(_act_and_call, owner, method, action))


def _act_and_call(
    owner: Any, method: str, action: Callable[[], None], /, *args: Any, **kwargs: Any
) -> Any:
    object.__delattr__(owner, method)
    action()
    return getattr(owner, method)(*args, **kwargs)


def may_update_in_backward(module: Any) -> bool:
    """Return whether a hook of a module runs when a gradient is ready: it may update parameters."""
    return any(
        parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers")
        for parameter in module.parameters()
    )


def leave_join(joinable: Any) -> None:
    """Mark a DDP model or ZeRO optimizer as outside of torch's ``Join`` context; a later context
    can include it again.
    """
    joinable._join_config = joinable._join_config._replace(enable=False)


# Attributes of schedules, over all versions of torch, that are empty except during a step.
_OF_SCHEDULES = ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops")
# The same for stages, where an evaluation leaves them filled. torch 2.15 renames `fwd_cache` to
# `_forward_chunk_states`.
_OF_STAGES = ("fwd_cache", "_forward_chunk_states", "backward_state")
_PIPELINE_SETUP = (
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
        return any(getattr(found, name, None) for name in _OF_SCHEDULES) or any(
            stage.has_backward and any(getattr(stage, name, None) for name in _OF_STAGES)
            for stage in _stages(found)
        )

    def progress(self, found: Any) -> tuple[int, ...]:
        return tuple(int(getattr(found, name, False)) for name in _PIPELINE_SETUP)

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        _forget_shapes(found)

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        clear(
            found,
            *_OF_SCHEDULES,
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
            clear(stage, *_OF_STAGES, "bwd_cache", "dw_runner")
            for info in _receives(stage):
                info.buffer = None
            if dirty and stage.has_backward:
                drop_grads(stage.submod)
        if not any(self.progress(found)):
            _forget_shapes(found)  # others may have stopped earlier in the exchange of shapes
        elif dirty:
            # A first exchange of messages connects NCCL's communicators.
            set_all(found, False, *_PIPELINE_SETUP)
        return ()


def _forget_shapes(schedule: Any) -> None:
    """Make the next step of a pipeline schedule exchange tensor shapes and connect its stages,
    as the first step does.
    """
    set_all(schedule, False, *_PIPELINE_SETUP)
    for stage in _stages(schedule):
        if hasattr(stage, "inputs_meta"):  # up to torch 2.12, which sends no known shapes
            stage.inputs_meta = stage._outputs_meta = None


def _receives(stage: Any) -> Iterator[Any]:
    """Yield the records of a pipeline stage's receives whose buffers must be dropped; none before
    torch 2.15, which reuses the buffers.
    """
    if hasattr(stage, "_forward_chunk_states"):
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            yield from (info for info in infos if not info.is_root_arg)


def _stages(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


class Zero(Kind):
    """Takes ZeroRedundancyOptimizer instances out of their ``Join`` context.

    Only an instance that is overlapped with DDP can be left half done by a step; it is reported,
    not reset.
    """

    where = "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"
    label = "ZeRO"
    drops_grads = False

    def concerns(self, found: Any) -> bool:
        return "_join_config" in held_by(found)

    def names(self, found: Any) -> Iterable[str]:
        return [str(tuple(parameter.shape)) for parameter in found._all_params]

    def is_dirty(self, found: Any) -> bool:
        info = getattr(found, "_overlap_info", None)
        return info is not None and bool(info.bucket_indices_seen or info.broadcast_handles)

    def progress(self, found: Any) -> tuple[int, ...]:
        return (int(found._join_config.enable),)

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        leave_join(found)

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        if dirty:
            yield "ZeRO, overlapped with DDP, was cut in a backward pass: construct both again"


class Scaler(Kind):
    """Clears the per-optimizer states that a failed cell has left in a `GradScaler` between
    ``unscale_`` and ``update``, right before its next ``scale``.
    """

    where = "torch.amp.grad_scaler", "GradScaler"
    label = "GradScaler"

    def concerns(self, found: Any) -> bool:
        return bool(held_by(found).get("_per_optimizer_states"))

    def arm(self, found: Any) -> None:
        if any(state["stage"].name != "READY" for state in found._per_optimizer_states.values()):
            before_next(found, "scale", found._per_optimizer_states.clear)


# A program's own data-parallel code reduces gradients in tensor hooks, counts the ready ones, and
# waits in a callback at the end of the pass (``queue_callback``). A pass that is cut leaves its
# counters in the middle: the next step would continue from there, on each rank from another place,
# without an error.

_ENGINE = ("torch.autograd.graph", "_engine_run_backward")
_NOT_OWN = ("torch", "cellmesh")
Reset = Callable[[], object]


class BackwardPasses:
    """Records a program's own hooks and callbacks that take part in backward passes, and those that
    a failure or an interrupt has stopped there.
    """

    def __init__(self) -> None:
        # Name -> number of queued end-of-pass callbacks that have not been called yet.
        self._queued: dict[str, int] = {}
        self.cut: dict[str, str] = {}  # name -> kind of function

    def install(self) -> None:
        """Patch torch to record the callbacks that a program queues for the end of a backward pass
        (``queue_callback``).
        """
        engine: Any = Variable
        engine._execution_engine = _NotingEngine(self)

    def note(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Wrap a callback that a program queues for the end of a backward pass, so that it counts
        as queued until it is called.
        """
        name = _name_of_own(callback)
        if not name:
            return callback
        self._queued[name] = self._queued.get(name, 0) + 1

        def call() -> None:
            self._queued[name] -= 1
            callback()

        return call

    def look(self, tb: types.TracebackType | None) -> None:
        """Record the program's functions that a failure with the traceback `tb` has stopped in a
        backward pass.
        """
        queued, self._queued = self._queued, {}
        for name, number in queued.items():
            if number > 0:
                self.cut[name] = "queued for the end of a backward pass"
        self._note_hooks(frame for frame, _ in walk_tb(tb))

    def look_around(self) -> None:
        """Record the program's functions that an interrupt, which the caller is about to raise,
        will stop in a backward pass, as user code may catch the interrupt.
        """
        self._note_hooks(reversed([frame for frame, _ in walk_stack(sys._getframe())]))

    def _note_hooks(self, frames: Iterable[types.FrameType]) -> None:
        for outer, inner in itertools.pairwise(frames):
            if (module_of(outer), outer.f_code.co_name) == _ENGINE:
                module = module_of(inner)
                if _is_own(module):
                    self.cut[f"{module}.{inner.f_code.co_qualname}"] = "a hook of gradients"
                self.cut |= dict.fromkeys(_find_hooks(), "a hook of gradients")


class _NotingEngine(torch._C._ImperativeEngine):
    def __init__(self, passes: BackwardPasses) -> None:
        super().__init__()
        self._passes = passes

    def queue_callback(self, callback: Callable[[], None]) -> None:
        super().queue_callback(self._passes.note(callback))


def _is_own(module: str) -> bool:
    return module.partition(".")[0] not in _NOT_OWN


def _name_of_own(function: Any) -> str:
    """Return module and name of a function of the user's program; "" for a function of torch or
    cellmesh.
    """
    while type(function) is functools.partial:
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    module = str(getattr(named, "__module__", ""))
    return f"{module}.{named.__qualname__}" if _is_own(module) else ""


def _find_hooks() -> Iterator[str]:
    """Yield the names of a program's own hooks that run when a gradient is accumulated."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        for found in tensors:
            for hook in (found._post_accumulate_grad_hooks or {}).values():
                if name := _name_of_own(hook):
                    yield name


class OwnCode(Kind):
    """Reports a program's own functions that were stopped in a backward pass, as cellmesh cannot
    reset their state.
    """

    where = __name__, "BackwardPasses"
    label = "own data-parallel code"
    drops_grads = False

    def concerns(self, found: Any) -> bool:
        return bool(found.cut)

    def is_dirty(self, found: Any) -> bool:
        return True

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        cut, found.cut = found.cut, {}
        for name, what in cut.items():
            yield (
                f"`{name}`, {what}, was cut in a backward pass: its state is as the failed step "
                "left it, which may differ between ranks. Reset it and call zero_grad(), or "
                "register a reset by `cellmesh.on_heal(callback)`"
            )


class HealCallbacks:
    """The functions that user code has registered by `cellmesh.on_heal` to reset its own state;
    each heal calls them in order.
    """

    def __init__(self) -> None:
        self._callbacks: dict[Any, Callable[[], Reset | None]] = {}

    def add(self, callback: Reset) -> None:
        """Register a function for later heals to call; it replaces an earlier one of the same name,
        as when a cell runs again.

        A method is dropped with its object.
        """
        if isinstance(callback, types.MethodType):
            key: Any = (id(callback.__self__), callback.__func__)
            self._callbacks[key] = weakref.WeakMethod(callback)
            return
        name = f"{getattr(callback, '__module__', '')}.{getattr(callback, '__qualname__', '<')}"
        self._callbacks[callback if "<" in name else name] = lambda: callback

    def call(self) -> tuple[str, ...]:
        """Call each registered function; return a note for the user on each that raised."""
        notes = []
        for key, find in list(self._callbacks.items()):
            if (callback := find()) is None:
                del self._callbacks[key]
                continue
            try:
                callback()
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                notes.append(f"on_heal: `{name}` raised {name_of(error)}: {text_of(error)}")
        return tuple(notes)
