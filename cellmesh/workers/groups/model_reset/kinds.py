"""The base class of the kinds of objects that keep state across a step, and shared helpers for
resetting them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...static_lookup import held_by
from ..blueprint import Progress as Progress

MAY_HAVE_UPDATED = (
    "what updates parameters within the backward pass may have updated some: %dist_check shows "
    "whether replicas still agree"
)


class Kind:
    """A kind of object that keeps state between operations.

    Attributes:
        where: module and name of its class.
        label: what users know it as.
        drops_grads: whether resetting a dirty one forgets gradients.
    """

    where: tuple[str, str]
    label: str
    drops_grads = True

    def concerns(self, found: Any) -> bool:
        """Whether a live instance of the class is examined by itself; runs none of the instance's
        code.
        """
        raise NotImplementedError

    def names(self, found: Any) -> Iterable[str]:
        """Names that identify the object on all ranks."""
        raise NotImplementedError

    def is_dirty(self, found: Any) -> bool:
        """Whether a step stopped inside the object."""
        raise NotImplementedError

    def progress(self, found: Any) -> tuple[int, ...]:
        """The object's one-time steps and counters, which are equal on all ranks between two
        steps.
        """
        return ()

    def align(self, found: Any, progress: Sequence[Progress]) -> None:
        """Bring ranks that differ in `progress`, which holds each rank's, to the same state."""

    def arm(self, found: Any) -> None:
        """After a failed cell: make the object's next step first drop the state of the failed
        step.

        Dropping it at once would be wrong: the next cell may go on with the step, by a backward
        pass.
        """

    def reset(self, found: Any, dirty: bool) -> Iterable[str]:
        """Reset the object to its state between two steps; with `dirty`, drop the step's
        gradients.

        Returns:
            What the user must know, as what was forgotten, or could not be reset.
        """
        raise NotImplementedError


def drop_grads(module: Any) -> None:
    """Drop the gradients of a module, including those that FSDP2 keeps internally."""
    for parameter in module.parameters():
        parameter.grad = None
    for each in module.modules():
        if (find_state := getattr(each, "_get_fsdp_state", None)) is not None:
            for group in param_groups(find_state()):
                drop_unsharded_grads(group)


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 state; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def has_unsharded_grads(group: Any) -> bool:
    """Whether one of FSDP2's groups has accumulated gradients without reducing them."""
    return group._partial_reduce_output is not None or any(
        vars(parameter).get("unsharded_accumulated_grad") is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for parameter in group.fsdp_params
    )


def drop_unsharded_grads(group: Any) -> None:
    """Drop the unreduced gradients that one of FSDP2's groups has accumulated."""
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        parameter.sharded_param.grad = None
        if "unsharded_accumulated_grad" in vars(parameter):  # before torch 2.15
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def clear(owner: Any, *names: str) -> None:
    """Empty those containers of an object that this version of torch has."""
    for name in names:
        if (container := getattr(owner, name, None)) is not None:
            container.clear()


def set_all(owner: Any, value: Any, *names: str) -> None:
    """Set those attributes of an object that this version of torch has."""
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, value)


def before_next(owner: Any, method: str, action: Callable[[], None]) -> None:
    """Run `action` right before the next call of a method of an object."""
    if method not in held_by(owner):
        object.__setattr__(owner, method, functools.partial(_act_and_call, owner, method, action))


def _act_and_call(
    owner: Any, method: str, action: Callable[[], None], /, *args: Any, **kwargs: Any
) -> Any:
    object.__delattr__(owner, method)
    action()
    return getattr(owner, method)(*args, **kwargs)


def may_update_in_backward(module: Any) -> bool:
    """Whether a hook runs when a gradient of the module is ready, as for an optimizer in the
    backward pass.
    """
    return any(
        parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers")
        for parameter in module.parameters()
    )


def leave_join(joinable: Any) -> None:
    """Detach an object from the `Join` that it is in; a `Join` that is entered later includes
    it.
    """
    joinable._join_config = joinable._join_config._replace(enable=False)
