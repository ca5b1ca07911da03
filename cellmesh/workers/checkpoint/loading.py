"""Loads a checkpoint into the objects that variables of the rank's namespace hold.

Each rank reads what its own shards need, on whatever number of ranks it was saved. No collective is
run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ...errors import MeshUsageError
from .state import fresh_state, leaves, owner_of

_MAX_NAMED = 3

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class _Target:
    """The tensors and values of one variable that a load fills or replaces.

    Attributes:
        key: of the name in the checkpoint.
        tree: live tensors to be filled, and values to be replaced.
        finish: gives the filled tree to its owner.
    """

    key: str
    tree: Any
    finish: Callable[[Any], object]


class _Contents:
    """What a checkpoint contains: its keys, shapes and dtypes, read from its metadata.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Metadata = FileSystemReader(path).read_metadata()
        self.paths: dict[str, KeyPath] = {
            fqn: (self.metadata.planner_data or {}).get(fqn) or tuple(fqn.split("."))
            for fqn in self.metadata.state_dict_metadata
        }
        self.keys = dict.fromkeys(str(path[0]) for path in self.paths.values())
        self.names = list(dict.fromkeys(key.partition("@")[0] for key in self.keys))

    def key_of(self, name: str) -> str:
        """Return the checkpoint's key of a variable; this rank's key, if each rank has one."""
        if name in self.keys:
            return name
        if name not in self.names:
            near = get_close_matches(name, self.names, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise MeshUsageError(
                f"{self.path} has no {name!r}{hint}; it has {', '.join(self.names)}"
            )
        key = f"{name}@{dist.get_rank()}"
        if key not in self.keys:
            num_ranks = sum(one.startswith(f"{name}@") for one in self.keys)
            raise MeshUsageError(
                f"{name!r} was different on each of {num_ranks} ranks when it was saved, and "
                "there is none for this one: leave it out"
            )
        return key

    def below(self, *path: str) -> dict[str, KeyPath]:
        """Return the flat keys of the checkpoint at or below a path, with their paths."""
        return {fqn: at for fqn, at in self.paths.items() if at[: len(path)] == path}

    def skeleton(self, *path: str) -> Any:
        """Return the tree of values below a path of the checkpoint, with empty tensors and None in
        place of the values.
        """
        root: dict[str, Any] = {}
        for fqn, at in self.below(*path).items():
            set_element(root, ("", *at[len(path) :]), self._empty(fqn))
        return root.get("")

    def _empty(self, fqn: str) -> Any:
        stored = self.metadata.state_dict_metadata[fqn]
        if isinstance(stored, TensorStorageMetadata):
            return torch.empty(stored.size, dtype=stored.properties.dtype)
        return None

    def compare(self, key: str, tree: Any) -> str:
        """Return how a tree of values differs from the checkpoint's at a key; "" if it does not."""
        mine = leaves(tree, key)
        theirs = self.below(key)
        told = []
        for fqn, leaf in mine.items():
            stored = self.metadata.state_dict_metadata.get(fqn)
            if stored is None:
                told.append(f"{fqn} is not in the checkpoint")
            elif isinstance(leaf, torch.Tensor) != isinstance(stored, TensorStorageMetadata):
                told.append(f"{fqn} is a tensor on one side only")
            elif isinstance(stored, TensorStorageMetadata) and leaf.size() != stored.size:
                there, here = tuple(stored.size), tuple(leaf.shape)
                told.append(f"{fqn} is {there} in the checkpoint, and {here} here")
        told += [f"{fqn} is in the checkpoint only" for fqn in theirs if fqn not in mine]
        more = f"; and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
        return "; ".join(told[:_MAX_NAMED]) + more


def find_cut_file(path: Path, parts: Iterable[Any]) -> str:
    """Return the name of a file of a checkpoint that is missing or too short; "" if none is.

    Args:
        path: of the checkpoint.
        parts: where its tensors and values are, as DCP's file system has them.
    """
    for stored in parts:
        file = path / stored.relative_path
        if not file.is_file() or file.stat().st_size < stored.offset + stored.length:
            return str(stored.relative_path)
    return ""


def find_load_problem(namespace: dict[str, Any], names: Sequence[str], path: Path) -> str:
    """Return why variables cannot be loaded from a checkpoint; "" if they can."""
    try:
        contents = _Contents(path)
    except Exception as error:  # whatever unpickling meets
        return f"{path} cannot be read: {type(error).__name__}: {error}"
    if cut_short := find_cut_file(path, contents.metadata.storage_data.values()):
        return f"{path} is not complete: {cut_short} is missing or too short"
    try:
        for name in names or contents.names:
            target = _target(contents, name, namespace, names)
            if different := contents.compare(target.key, target.tree):
                return f"{name!r} is not what was saved: {different}"
    except MeshUsageError as error:
        return str(error)
    return ""


def load(namespace: dict[str, Any], names: Sequence[str], path: Path) -> tuple[str, ...]:
    """Load a checkpoint's values into variables, in place; return the names of those loaded.

    Args:
        namespace: the rank's.
        names: which; none for all that the checkpoint has.
        path: of the checkpoint.

    Returns:
        The names.

    Raises:
        MeshUsageError: a name is not there, or is not what was saved.
    """
    contents = _Contents(path)
    chosen = tuple(names or contents.names)
    targets = [_target(contents, name, namespace, names) for name in chosen]
    trees = {target.key: target.tree for target in targets}
    with warnings.catch_warnings():
        # Each rank loads alone: a part of a mesh may load, and a rank that has failed keeps no
        # other waiting.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load(trees, checkpoint_id=path, no_dist=True)
    for target in targets:
        target.finish(trees[target.key])
    return chosen


def _target(
    contents: _Contents, name: str, namespace: dict[str, Any], names: Sequence[str]
) -> _Target:
    key = contents.key_of(name)
    value = namespace.get(name)
    if name not in namespace:
        return _new_target(contents, name, key, namespace)
    if isinstance(value, nn.Module):
        fill: Callable[[Any], object] = functools.partial(set_model_state_dict, value)
        return _Target(key, get_model_state_dict(value), fill)
    if isinstance(value, Optimizer):
        return _optimizer_target(contents, key, value, owner_of(value, name, namespace, names))
    if isinstance(value, torch.Tensor):
        return _Target(key, value, lambda tree: None)
    if isinstance(value, Stateful):
        return _Target(key, contents.skeleton(key), value.load_state_dict)
    return _Target(key, contents.skeleton(key), functools.partial(_set_value, namespace, name))


def _new_target(contents: _Contents, name: str, key: str, namespace: dict[str, Any]) -> _Target:
    """Return what to fill for a saved value whose name is not bound yet; it cannot be a model."""
    if any(len(at) > 1 for at in contents.below(key).values()):
        raise MeshUsageError(
            f"there is no name {name!r} to load into: make it as it was made when it was saved, "
            "or name what else to load"
        )
    device = namespace.get("device", "cpu")

    def bind(tree: Any) -> None:
        namespace[name] = tree.to(device) if isinstance(tree, torch.Tensor) else tree

    return _Target(key, contents.skeleton(key), bind)


def _optimizer_target(
    contents: _Contents, key: str, optimizer: Optimizer, model: nn.Module
) -> _Target:
    groups = contents.skeleton(key, "param_groups") or []
    if not contents.below(key, "state"):  # it had not stepped, or never has any

        def set_groups(tree: Any) -> None:
            optimizer.state.clear()
            for group, saved in zip(optimizer.param_groups, tree["param_groups"], strict=True):
                group.update({name: item for name, item in saved.items() if name != "params"})

        return _Target(key, {"param_groups": groups}, set_groups)
    if len(groups) != len(optimizer.param_groups):
        raise MeshUsageError(
            f"{key!r} has {len(optimizer.param_groups)} groups of parameters, and the checkpoint's "
            f"{len(groups)}"
        )
    with fresh_state(optimizer):
        tree: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    tree["param_groups"] = groups  # plain values: with what a scheduler has added
    return _Target(key, tree, functools.partial(set_optimizer_state_dict, model, optimizer))


def _set_value(namespace: dict[str, Any], name: str, value: Any) -> None:
    """Bind a name to a loaded value; fill a list or dict in place, as other objects may hold it."""
    before = namespace[name]
    if type(before) is list and type(value) is list:
        before[:] = value
    elif type(before) is dict and type(value) is dict:
        before.clear()
        before.update(value)
    else:
        namespace[name] = value
