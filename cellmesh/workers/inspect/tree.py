"""Walks the tensors in a value: a tensor, or those of a module, an optimizer or a container."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..static_lookup import has, held_by
from .safe_repr import FEW
from .static_eval import SLOTS, Unknown, in_classes
from .summary import MASKED, as_tensor

# What is told beside tensors: a loss, a step, a name.
_PLAIN = (bool, int, float, complex, str, type(None))
_SERIES: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
# What has no parts worth showing, though it has a ``__dict__``.
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, BaseException)
# So many that are no tensors are listed.
MAX_PLAIN = 1000
_MAX_DEPTH = 8
# How many items of what lies deep in a container tell of what kind all are.
_FEW_DEEP = 10


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a value, and the numbers and texts beside them, each tensor once.

    No code of the user's is run: mappings and modules that hold their items in a way of their own
    are not opened.

    Args:
        value: anything. Of an object that is none of the known ones, its attributes are looked at,
            but not the attributes of objects in those. They are what objects hold: no property is
            read.

    Yields:
        A path and what is there: "" for the value itself, where it has no parts.
    """
    num_seen: dict[str, int] = {}
    num_plain = 0
    for path, part in _Walk().parts(value, "", 0, True):
        num_plain += not as_known(part)
        if num_plain > MAX_PLAIN and not as_known(
            part
        ):  # they are not listed: there may be millions
            yield path, part
            continue
        num_seen[path] = number = num_seen.get(path, 0) + 1  # keys may be written alike
        yield (path if number == 1 else f"{path} ({number})"), part


def find(value: Any, path: str) -> Any:
    """Return the part of a value at a path that `walk` has yielded.

    Raises:
        LookupError: nothing does, now.
    """
    if not path:
        return value
    for at, part in walk(value):
        if at == path:
            return part
    raise LookupError(f"there is no {path} in it now")


def settings_of(optimizer: Optimizer) -> str:
    """Return an optimizer's settings (learning rate, ...) in one line."""
    groups = held_by(optimizer).get("param_groups")
    if type(groups) is not list:  # a property, as of those that wrap another one
        return type(optimizer).__name__
    return (
        f"{type(optimizer).__name__}, {len(groups)} parameter "
        f"group{'s' if len(groups) != 1 else ''}"
    )


def parameters_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters as `named_parameters` does, which user code may override."""
    seen: set[int] = set()
    for name, tensor in _held_tensors(module, "_parameters"):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _held_tensors(module: nn.Module, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a dict of a module (as ``_parameters``) and of its submodules."""
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        prefix, module = waiting.pop()
        if issubclass(type(module), torch.jit.ScriptModule):  # holds nothing itself
            named = nn.Module.named_parameters if part == "_parameters" else nn.Module.named_buffers
            yield from named(module, prefix.removesuffix("."))
            continue
        if id(module) in seen:
            continue
        seen.add(id(module))
        held = held_by(module)
        for name, tensor in _held_items(held, part):
            if issubclass(type(tensor), torch.Tensor):
                yield f"{prefix}{name}", tensor
        modules = [(f"{prefix}{name}.", each) for name, each in _held_items(held, "_modules")]
        waiting += [
            (name, each) for name, each in reversed(modules) if issubclass(type(each), nn.Module)
        ]


def _held_items(held: dict[str, Any], part: str) -> list[tuple[Any, Any]]:
    box = held.get(part)
    return list(dict.items(box)) if isinstance(box, dict) else []


class _Walk:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is one's own only as long as one lives

    def parts(self, value: Any, path: str, depth: int, may_open: bool) -> Iterator[tuple[str, Any]]:
        """Yield the parts of a value; `may_open`: also the attributes of any object."""
        kind = type(value)
        if issubclass(kind, _PLAIN) or depth > _MAX_DEPTH:
            yield path, value
        elif as_known(value):
            if self._is_new(value):
                yield path, value
        elif not self._is_new(value):
            return
        elif _is_long_and_plain(value):
            yield path, value
        elif issubclass(kind, nn.Module):
            yield from self._of_module(value, path)
        elif issubclass(kind, Optimizer):
            yield from self._of_optimizer(value, path, depth)
        elif (pairs := self._pairs(value)) is not None:
            for key, item in pairs:
                yield from self.parts(item, f"{path}[{_key(key)}]", depth + 1, may_open)
        elif issubclass(kind, tuple) and (names := _field_names(kind)):
            for name, item in zip(names, tuple.__iter__(value), strict=False):
                yield from self.parts(item, f"{path}.{name}".lstrip("."), depth + 1, may_open)
        elif base := next((each for each in _SERIES if issubclass(kind, each)), None):
            for index, item in enumerate(list(base.__iter__(value))):
                yield from self.parts(item, f"{path}[{index}]", depth + 1, may_open)
        elif has(kind, "__dataclass_fields__"):
            for name in (field.name for field in dataclasses.fields(kind)):
                held = _held_as(value, name)
                if held:
                    yield from self.parts(
                        held[0], f"{path}.{name}".lstrip("."), depth + 1, may_open
                    )
        elif may_open and not issubclass(kind, _OPAQUE) and held_by(value):
            yield from self._of_object(value, path, depth)
        else:
            yield path, value

    def _of_object(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield an object's attributes, or the object itself if it has no tensors and no plain
        public values.
        """
        found = []
        is_open = False
        for name, item in list(held_by(value).items()):
            is_open = is_open or (
                type(name) is str and name[:1] != "_" and issubclass(type(item), _PLAIN)
            )
            parts = list(self.parts(item, f"{path}.{name}".lstrip("."), depth + 1, False))
            is_open = is_open or any(as_known(part) for _, part in parts)
            found += parts
        yield from found if is_open else [(path, value)]

    def _pairs(self, value: Any) -> list[tuple[Any, Any]] | None:
        """Return the items of a mapping; None if it is not one."""
        kind = type(value)
        if issubclass(kind, dict):
            return list(dict.items(value))
        if issubclass(kind, collections.UserDict) and type(held_by(value).get("data")) is dict:
            return list(held_by(value)["data"].items())
        return None

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _of_module(self, module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
        dot = "." if path else ""
        for found in (parameters_of(module), _held_tensors(module, "_buffers")):
            for name, tensor in found:
                if self._is_new(tensor):
                    yield f"{path}{dot}{name}", tensor

    def _of_optimizer(
        self, optimizer: Optimizer, path: str, depth: int
    ) -> Iterator[tuple[str, Any]]:
        dot = "." if path else ""
        held = held_by(optimizer)
        if not {"param_groups", "state"} <= held.keys():  # a wrapper's are properties
            yield from self._of_object(optimizer, path, depth)
            return
        groups = list(held["param_groups"])
        names = _names_of(groups)
        for index, group in enumerate(groups):
            at = f"{path}{dot}param_groups[{index}]"
            settings = {
                key: value
                for key, value in list(dict.items(group))
                if key not in ("params", "param_names")
            }
            plain = {key: value for key, value in settings.items() if _is_plain(value, 1)}
            # Settings that are off have no place in the line.
            yield (
                at,
                {k: each for k, each in plain.items() if each is not None and each is not False},
            )
            for key, value in settings.items():
                if key not in plain:
                    yield from self.parts(value, f"{at}.{key}", depth + 1, False)
            for position, parameter in enumerate(list(group["params"])):
                if self._is_new(parameter):
                    called = names.get(id(parameter), f"params[{position}]")
                    yield f"{at}.{called}", parameter
        for number, parameter in enumerate(each for group in groups for each in group["params"]):
            names.setdefault(id(parameter), str(number))  # as in a state_dict
        for parameter, kept in list(dict.items(held["state"])):
            called = names.get(id(parameter), "?")
            inside = dict.items(kept) if issubclass(type(kept), dict) else [("", kept)]
            for key, value in list(inside):
                yield from self.parts(value, f"{path}{dot}state[{called}].{key}", depth + 1, False)


def _names_of(groups: list[dict[str, Any]]) -> dict[int, str]:
    """Return the names of an optimizer's parameters, by their ids: those that the optimizer was
    given, else those that the models among the rank's names have for them.
    """
    names: dict[int, str] = {}
    for group in groups:
        given = group.get("param_names") or ()
        names |= {id(one): name for one, name in zip(group["params"], given, strict=False)}
    wanted = {id(one) for group in groups for one in group["params"]} - names.keys()
    if not wanted:
        return names
    owners = []
    for variable, value in list(vars(sys.modules["__main__"]).items()):
        if issubclass(type(value), nn.Module) and not variable.startswith("_"):
            held = {id(one): f"{variable}.{name}" for name, one in parameters_of(value)}
            held = {key: name for key, name in held.items() if key in wanted}
            owners.append((-len(held), sum(map(len, held.values())), held))
    # The model that has most of them; of a model and what wraps it, the one with the short names.
    for _, _, held in sorted(owners, key=lambda owner: owner[:2]):
        names = held | names
    return names


def _is_long_and_plain(value: Any) -> bool:
    """Return whether a container is shown as one item; decided by its first items, because it may
    have millions.
    """
    return _size_of(value) > FEW and all(_is_plain(each, 2) for each in _first_of(value, FEW) or ())


def _is_plain(value: Any, depth: int) -> bool:
    if issubclass(type(value), _PLAIN):
        return True
    if not depth or as_known(value):
        return False
    first = _first_of(value, FEW if depth > 1 else _FEW_DEEP)
    return first is not None and all(_is_plain(each, depth - 1) for each in first)


def _size_of(value: Any) -> int:
    kind = type(value)
    base = next((each for each in (dict, *_SERIES) if issubclass(kind, each)), None)
    return base.__len__(value) if base else 0


def _first_of(value: Any, count: int) -> list[Any] | None:
    """Return the first items of a container or an object's attributes; None if there are none."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(islice(dict.values(value), count))
    base = next((each for each in _SERIES if issubclass(kind, each)), None)
    if base:
        return list(islice(base.__iter__(value), count))
    held = held_by(value)
    return list(islice(held.values(), count)) if held else None


def _field_names(kind: type) -> tuple[str, ...]:
    """Return the field names of a named tuple."""
    try:
        names = in_classes(kind, "_fields")
    except Unknown:
        return ()
    return names if type(names) is tuple and all(type(name) is str for name in names) else ()


def _held_as(value: Any, name: str) -> tuple[Any, ...]:
    """Return an object's value under a name, from its ``__dict__`` or a slot; () if there is
    none.
    """
    held = held_by(value)
    if name in held:
        return (held[name],)
    with contextlib.suppress(Unknown, AttributeError):  # an empty slot
        slot = in_classes(type(value), name)
        if type(slot) in SLOTS:
            return (type(slot).__get__(slot, value, type(value)),)
        return () if has(type(slot), "__get__") else (slot,)
    return ()


def as_known(value: Any) -> bool:
    """Return whether a value is a tensor or an array of numbers, which are shown as a whole and not
    searched for tensors.
    """
    if issubclass(type(value), torch.Tensor):
        return True
    return (
        type(value).__module__ in ("numpy", *MASKED)
        and hasattr(value, "__array_interface__")
        and (as_tensor(value[:0] if getattr(value, "ndim", 0) else value) is not None)
    )


def _key(key: Any) -> str:
    """Return a text of a dict's key; of unusual keys, their type."""
    text = _written(key)
    return text if len(text) <= 80 else text[:79] + "…"


def _written(key: Any) -> str:
    kind = type(key)
    if kind is tuple:
        return f"({', '.join(map(_written, key))}{',' * (len(key) == 1)})"
    # An enum of texts is told as its text: its own repr is code.
    base: Any = next((each for each in _PLAIN if issubclass(kind, each)), None)
    return base.__repr__(key) if base is not None else f"<{kind.__name__}>"
