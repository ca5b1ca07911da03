"""Converts a variable into the tree of tensors and values that a checkpoint saves."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ...errors import MeshUsageError
from ..inspect.chunks import digest_of_tensor
from ..rank.value_transfer import is_dtensor
from ..replicas.parts import is_wrapped

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True)
class State:
    """The tree of tensors and values that is saved for one variable, as its ``state_dict()``.

    Attributes:
        tree: a tensor, a value, or nested dicts and lists of them.
        is_plain: nothing says by itself which ranks should hold the same of it.
    """

    tree: Any
    is_plain: bool


def find_save_problem(namespace: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return why variables cannot be saved, as far as can be said without reading them; "" if they
    can.
    """
    for name in names:
        if name not in namespace:
            return _missing(name, namespace)
        value = namespace[name]
        if isinstance(value, Optimizer):
            try:
                owner_of(value, name, namespace, names)
            except MeshUsageError as error:
                return str(error)
        if isinstance(value, Mapping) and not isinstance(value, Stateful):
            if not value:
                return f"{name!r} is an empty dict, of which DCP keeps nothing: leave it out"
            if not all(isinstance(key, str) for key in value):
                return (
                    f"{name!r} is a dict whose keys are not all text, as "
                    "DCP would make them: rename them"
                )
    return ""


def read_state(namespace: Mapping[str, Any], names: Sequence[str]) -> dict[str, State]:
    """Return the trees that are saved for variables; their tensors are the live ones."""
    if problem := find_save_problem(namespace, names):
        raise MeshUsageError(problem)
    return {name: _state_of(namespace[name], name, namespace, names) for name in names}


def _state_of(value: Any, name: str, namespace: Mapping[str, Any], names: Sequence[str]) -> State:
    if isinstance(value, nn.Module):
        return State(get_model_state_dict(value), not is_wrapped(value))
    if isinstance(value, Optimizer):
        model = owner_of(value, name, namespace, names)
        return State(read_optimizer(model, value), not is_wrapped(model))
    if isinstance(value, torch.Tensor):
        return State(value, not is_dtensor(value))
    return State(value.state_dict() if isinstance(value, Stateful) else value, True)


def read_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by the names of its model's parameters; none before its first
    step.
    """
    with fresh_state(optimizer) as was_fresh:
        tree: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    if was_fresh:
        tree["state"] = {}
    return tree


@contextlib.contextmanager
def fresh_state(optimizer: Optimizer) -> Iterator[bool]:
    """Enter a context in which an optimizer without state has no gradients, so that torch can give
    it a state by a step without effect; clear that state again at the end.

    Gradients would keep torch from it, so they are out of the way meanwhile. Yields whether there
    was none.
    """
    is_fresh = not optimizer.state
    parameters = [p for group in optimizer.param_groups for p in group["params"] if is_fresh]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield is_fresh
    finally:
        if is_fresh:
            optimizer.state.clear()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def owner_of(
    optimizer: Optimizer, name: str, namespace: Mapping[str, Any], names: Sequence[str]
) -> nn.Module:
    """Return the model whose parameters an optimizer steps: one of the given names, else the
    smallest at top level.

    Raises:
        MeshUsageError: there is none.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def owners(among: Sequence[str]) -> Iterator[tuple[int, nn.Module]]:
        for one in among:
            module = namespace.get(one)
            if isinstance(module, nn.Module):
                held = {id(parameter) for parameter in module.parameters()}
                if wanted <= held:
                    yield len(held), module

    for among in (names, [one for one in namespace if not one.startswith("_")]):
        if found := min(owners(among), key=lambda pair: pair[0], default=None):
            return found[1]
    raise MeshUsageError(
        f"{name!r} is an optimizer, and no module at top level has all of its parameters: its "
        "state is saved and loaded by their names"
    )


def plain_digests(state: Mapping[str, State]) -> dict[str, dict[str, str] | None]:
    """Return, by name and path, digests of values that ranks may hold differently; None for a
    DTensor, and for a DDP, FSDP or tensor parallel model or its optimizer.
    """
    return {
        name: {path: _digest(leaf) for path, leaf in leaves(one.tree, name).items()}
        if one.is_plain
        else None
        for name, one in state.items()
    }


def key_of(name: str, rank: int, digests: Sequence[Mapping[str, str] | None]) -> str:
    """Return a variable's key in the checkpoint: its name, or one for each rank if ranks hold
    different values.

    Args:
        name: which.
        rank: this rank.
        digests: by rank, what `plain_digests` has.
    """
    seen: dict[str, str] = {}
    for theirs in digests:
        for path, digest in (theirs or {}).items():
            if seen.setdefault(path, digest) != digest:
                return f"{name}@{rank}"
    return name


def leaves(tree: Any, path: str) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, as DCP flattens and joins them."""
    return flatten_state_dict({path: tree})[0]


def _digest(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        if is_dtensor(leaf):
            return ""
        return f"{leaf.dtype} {tuple(leaf.shape)} {digest_of_tensor(leaf.detach())}"
    # Equal values may have different pickles; their texts are alike.
    data = repr(leaf).encode(errors="replace") if _is_text(leaf) else pickle.dumps(leaf)
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _is_text(leaf: Any) -> bool:
    """Return whether a value consists of plain Python values only, also in lists, tuples and
    dicts, so that its ``repr`` describes it completely.
    """
    if type(leaf) in (list, tuple):
        return all(map(_is_text, leaf))
    if type(leaf) is dict:
        return all(_is_text(key) and _is_text(item) for key, item in leaf.items())
    return type(leaf) in _PLAIN


def _missing(name: str, namespace: Mapping[str, Any]) -> str:
    if not name.isidentifier():
        return (
            f"{name!r} is no name: names of the ranks' namespace "
            "are saved and loaded, no expressions"
        )
    near = get_close_matches(name, [one for one in namespace if not one.startswith("_")], 1)
    return f"there is no name {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
