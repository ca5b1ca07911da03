"""Saves and loads variables of the ranks with torch.distributed.checkpoint (DCP), all or nothing.

Ranks save within a run: ``dcp.save`` writes to a directory beside the checkpoint, and rank 0 puts
it in the checkpoint's place in one step (``renameat2``) when all files are on disk. Where a file
system cannot do that (NFS), the old checkpoint is renamed first, and a load or save that finds no
checkpoint in its place renames it back. The next save removes what a save that has died has left
beside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import glob
import hashlib
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from ..errors import HostError, MeshUsageError
from ..wire.codec import Frame
from ..wire.ranks import describe_groups
from ..wire.values import CheckLoad, CheckpointRequest, CheckSave, LoadNames, SaveNames
from .inspect.chunks import digest_of_tensor
from .rank.value_transfer import is_dtensor
from .replicas.parts import is_wrapped
from .replicas.syncing import agree

if TYPE_CHECKING:
    from .rank.features import RankContext

_MAX_NAMED = 3
METADATA = ".metadata"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV})
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
KeyPath = tuple[str | int, ...]


class CheckpointHandler:
    """Answers requests to check, save and load checkpoints on one rank.

    Args:
        context: context of the rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._namespace = context.shell.user_ns

    def handle(self, request: CheckpointRequest, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        namespace, names, path = self._namespace, request.names, Path(request.path)
        match request:
            case CheckSave():
                return find_save_problem(namespace, names) or CheckpointDirectory(path).why_not()
            case SaveNames():
                return save(namespace, names, path)
            case CheckLoad():
                why = CheckpointDirectory(path).why_no_checkpoint()
                return why or find_load_problem(namespace, names, path)
            case LoadNames():
                return load(namespace, names, path)


make_handler = CheckpointHandler


class _Writer(FileSystemWriter):
    """A DCP writer that writes beside the old checkpoint, and replaces that only when the new
    checkpoint is complete.

    Args:
        directory: directory of the checkpoint.
    """

    def __init__(self, directory: CheckpointDirectory) -> None:
        super().__init__(directory.beside, sync_files=True, single_file_per_rank=True)
        self._directory = directory

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, and put the new checkpoint in the place of the old one; DCP calls
        this on rank 0 when all ranks have written their files.
        """
        super().finish(metadata, results)
        parts = [written.storage_data for each in results for written in each]
        if name := find_cut_file(self._directory.beside, parts):
            raise FileNotFoundError(f"{name} is not in {self.path}: do all hosts share it?")
        self._directory.put()


def save(namespace: dict[str, Any], names: Sequence[str], path: Path) -> None:
    """Save variables as a checkpoint; a collective of all ranks.

    Args:
        namespace: namespace of the rank.
        names: names of the variables.
        path: path of the checkpoint.

    Raises:
        MeshUsageError: some variables cannot be saved; nothing has been written.
        HostError: they could not be written; the checkpoint at `path` is unchanged.
    """
    rank, trees = dist.get_rank(), dict[str, Any]()

    def read() -> tuple[str, dict[str, dict[str, str]]]:
        digests = {}
        for name, (tree, is_plain) in read_state(namespace, names).items():
            trees[name], digests[name] = tree, digests_of(tree) if is_plain else {}
        if rank == 0:
            CheckpointDirectory(path).remove_left()
        return secrets.token_hex(4), digests

    found = agree(read, "nothing was saved")
    directory = CheckpointDirectory(path, found[0][0])
    # A key for each rank if ranks hold different values.
    keyed = {
        f"{name}@{rank}" if differ(digests[name] for _, digests in found) else name: trees[name]
        for name in names
    }
    try:
        state_dict_saver.save(keyed, storage_writer=_Writer(directory))
    except CheckpointException as error:  # raised on all ranks; a BaseException
        directory.clear()  # hosts may not share it
        reasons = {rank: reason for rank, (reason, _) in sorted(error.failures.items())}
        for reason in reasons.values():
            if isinstance(reason, KeyboardInterrupt):
                raise reason from None
        told = describe_groups({r: f"{type(e).__name__}: {e}" for r, e in reasons.items()})
        raise HostError(
            f"not saved: {'; '.join(told[:_MAX_NAMED])}; {directory.describe_target()}"
        ) from None
    finally:
        if rank == 0:
            directory.clear()  # the old checkpoint, or what a failed save has written


# ---- the directory


class CheckpointDirectory:
    """The directory of a checkpoint, and the directories beside it that a save uses until it is
    complete.

    Args:
        target: path of the directory. If it is a link, the directory that it points to is replaced.
        token: part of the name of the directory that a save writes to; each save has another.

    Attributes:
        beside: path of the directory that a save writes to.
    """

    def __init__(self, target: Path, token: str = "") -> None:
        self.target = target.resolve()
        self.beside = self.target.with_name(f".{self.target.name}.{token}.saving")
        self._aside = self.target.with_name(f".{self.target.name}.before")

    def why_not(self) -> str:
        """Return why a save must not replace the target directory; "" if it does not exist, or has
        only a checkpoint's files.
        """
        self._recover()
        if not self.target.exists():
            return ""
        if not self.target.is_dir():
            return f"{self.target} is a file: name a directory"
        foreign = sorted(
            entry.name
            for entry in self.target.iterdir()
            if entry.name != METADATA and entry.suffix != ".distcp"
        )
        if foreign:
            return (
                f"{self.target} holds what is no checkpoint's ({', '.join(foreign[:3])}) and "
                "would be replaced: name another directory"
            )
        return ""

    def why_no_checkpoint(self) -> str:
        """Return why no checkpoint can be loaded from the target directory; "" if it has one."""
        self._recover()
        if not self.target.exists():
            return f"there is nothing at {self.target}"
        if not (self.target / METADATA).is_file():
            return (
                f"{self.target} is no checkpoint: %dist_save and dcp.save leave a directory with "
                f"a file {METADATA} in it"
            )
        return ""

    def describe_target(self) -> str:
        """Return text on the state of the target directory after a failed save."""
        is_there = (self.target / METADATA).is_file()
        return f"{self.target} is as it was" if is_there else f"there is nothing at {self.target}"

    def remove_left(self) -> None:
        """Remove directories that earlier saves left beside the target when a process died."""
        for left in self.target.parent.glob(f".{glob.escape(self.target.name)}.*.saving"):
            shutil.rmtree(left, ignore_errors=True)
        self.clear()

    def clear(self) -> None:
        """Remove the directory to which this save has written; if the target directory exists,
        remove the old checkpoint, too.
        """
        shutil.rmtree(self.beside, ignore_errors=True)
        if self.target.exists():
            shutil.rmtree(self._aside, ignore_errors=True)

    def put(self) -> None:
        """Replace the target by the directory that the save has written, atomically if the file
        system can.
        """
        _sync(self.beside)
        if not self.target.exists():
            self.beside.rename(self.target)
        elif not exchange(self.beside, self.target):
            self.target.rename(self._aside)
            try:
                self.beside.rename(self.target)
            finally:
                self._recover()
        _sync(self.target.parent)

    def _recover(self) -> None:
        """Move the old checkpoint back to the target if a save has died after moving it away."""
        if not self.target.exists():
            with contextlib.suppress(OSError):
                self._aside.rename(self.target)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two directories' names atomically; return False if the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an older C library
        return False
    if not rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- variables as the trees of tensors and values that are saved


def find_save_problem(namespace: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return why variables cannot be saved, as far as can be found without reading their values; ""
    if they can.
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


def read_state(namespace: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[Any, bool]]:
    """Return, for each variable, the tree to be saved (a tensor, a value, or nested dicts and lists
    of them, not copied), and whether its values may differ between ranks: not if it has DTensors,
    or is a DDP, FSDP or tensor-parallel model or its optimizer.
    """
    if problem := find_save_problem(namespace, names):
        raise MeshUsageError(problem)
    return {name: _state_of(namespace[name], name, namespace, names) for name in names}


def _state_of(
    value: Any, name: str, namespace: Mapping[str, Any], names: Sequence[str]
) -> tuple[Any, bool]:
    if isinstance(value, nn.Module):
        return get_model_state_dict(value), not is_wrapped(value)
    if isinstance(value, Optimizer):
        model = owner_of(value, name, namespace, names)
        return read_optimizer(model, value), not is_wrapped(model)
    if isinstance(value, torch.Tensor):
        return value, not is_dtensor(value)
    return value.state_dict() if isinstance(value, Stateful) else value, True


def read_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state under the names of its model's parameters; the state is empty
    before the optimizer's first step.
    """
    with fresh_state(optimizer) as was_fresh:
        tree: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    if was_fresh:
        tree["state"] = {}
    return tree


@contextlib.contextmanager
def fresh_state(optimizer: Optimizer) -> Iterator[bool]:
    """Enter a context in which an optimizer without state has no gradients, so that a step by which
    torch creates its state changes no parameter; on exit, clear that state and restore the
    gradients.

    Yields:
        Whether the optimizer had no state.
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
    """Return the model whose parameters an optimizer updates: the smallest such model among
    `names`, else among all variables of the namespace.

    Raises:
        MeshUsageError: no model has all of the optimizer's parameters.
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


def leaves(tree: Any, path: str) -> dict[str, Any]:
    """Return the leaves of a nested state dict by their paths, joined as DCP joins them."""
    return flatten_state_dict({path: tree})[0]


def digests_of(tree: Any) -> dict[str, str]:
    """Return a hash of each leaf of a variable's state, by the leaf's path; "" for DTensors."""
    return {path: _digest(leaf) for path, leaf in leaves(tree, "").items()}


def differ(digests: Iterable[Mapping[str, str]]) -> bool:
    """Return whether ranks hold different values of a variable under one path, given each rank's
    `digests_of` the variable.
    """
    seen: dict[str, str] = {}
    return any(
        seen.setdefault(path, digest) != digest
        for theirs in digests
        for path, digest in theirs.items()
    )


def _digest(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        if is_dtensor(leaf):
            return ""
        return f"{leaf.dtype} {tuple(leaf.shape)} {digest_of_tensor(leaf.detach())}"
    # Equal values may have different pickles, but their reprs are equal.
    data = repr(leaf).encode(errors="replace") if _is_text(leaf) else pickle.dumps(leaf)
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _is_text(leaf: Any) -> bool:
    """Return whether a value consists only of plain Python values, also in lists, tuples and dicts,
    so that its ``repr`` describes it completely.
    """
    if type(leaf) in (list, tuple):
        return all(map(_is_text, leaf))
    if type(leaf) is dict:
        return all(_is_text(key) and _is_text(item) for key, item in leaf.items())
    return type(leaf) in _PLAIN


def _missing(name: str, namespace: Mapping[str, Any]) -> str:
    near = get_close_matches(name, [one for one in namespace if not one.startswith("_")], 1)
    return f"there is no name {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


# ---- loading: each rank reads the data of its own shards, whatever number of ranks saved them; no
# collective is run


@dataclass(frozen=True)
class _Target:
    """The tensors and values of one variable that loading a checkpoint fills or replaces.

    Attributes:
        key: key of the variable in the checkpoint.
        tree: live tensors to be filled, and values to be replaced.
        finish: called with the filled tree, to set the variable.
    """

    key: str
    tree: Any
    finish: Callable[[Any], object]


class _Contents:
    """The content of a checkpoint: its keys, shapes and dtypes, read from its metadata.

    Args:
        path: path of the checkpoint.
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
        """Return the key of a variable in the checkpoint; if each rank has saved its own value, the
        key of this rank's.
        """
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
        """Return the checkpoint's entries at or below a path: flat key -> path of nested keys."""
        return {fqn: at for fqn, at in self.paths.items() if at[: len(path)] == path}

    def skeleton(self, *path: str) -> Any:
        """Return the tree at a path of the checkpoint, with uninitialized tensors, and None for
        other values.
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
        """Return how a tree differs from the one saved under a key of the checkpoint; "" if keys
        and shapes agree.
        """
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
    """Return the name of a file of a checkpoint that is missing or shorter than its metadata
    requires; "" if all files are complete.

    Args:
        path: path of the checkpoint.
        parts: storage locations of its tensors and values, as in DCP's metadata.
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
    except Exception as error:  # unpickling may raise any error
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
    """Load a checkpoint's values into variables, in place.

    Args:
        namespace: namespace of the rank.
        names: names of the variables; none for all in the checkpoint.
        path: path of the checkpoint.

    Returns:
        The names of the loaded variables.

    Raises:
        MeshUsageError: the checkpoint lacks a name, or the variable does not fit the saved one.
    """
    contents = _Contents(path)
    chosen = tuple(names or contents.names)
    targets = [_target(contents, name, namespace, names) for name in chosen]
    trees = {target.key: target.tree for target in targets}
    with warnings.catch_warnings():
        # Each rank loads alone, so that a part of a mesh may load, and a rank that fails does not
        # keep others waiting.
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
    """Return the load target for a variable that does not exist on this rank yet; raise a
    MeshUsageError if it was a model or another nested state.
    """
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
    if not contents.below(key, "state"):  # saved before the first step, or has no state

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
    tree["param_groups"] = groups  # plain values, including those that a scheduler added
    return _Target(key, tree, functools.partial(set_optimizer_state_dict, model, optimizer))


def _set_value(namespace: dict[str, Any], name: str, value: Any) -> None:
    """Bind a variable to a loaded value; if both old and new value are lists or dicts, fill the old
    one in place, as other objects may refer to it.
    """
    before = namespace[name]
    if type(before) is list and type(value) is list:
        before[:] = value
    elif type(before) is dict and type(value) is dict:
        before.clear()
        before.update(value)
    else:
        namespace[name] = value
