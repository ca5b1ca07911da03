"""Yields the tensors in a value: the value itself, or those in a module, optimizer or container."""

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
from .static_eval import Unknown, attribute, in_classes, keeps_grad

# Types that are listed beside tensors: a loss, a step, a name.
_PLAIN = (bool, int, float, complex, str, type(None))
_SERIES: tuple[Any, ...] = (list, tuple, set, frozenset, collections.deque)
# Types whose ``__dict__`` is not worth showing.
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, BaseException)
# Maximum number of listed values that are no tensors.
MAX_PLAIN = 1000
_MAX_DEPTH = 8


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a value, and the numbers and texts beside them, each tensor once.

    Runs no user code: mappings and modules that store their items in a way of their own are not
    opened, and no property is read.

    Args:
        value: any value. Of an object of an unknown class, its attributes are yielded, but not the
            attributes of unknown objects in them.

    Yields:
        A path and the part at it; the path is "" for the value itself, if it has no parts.
    """
    num_seen: dict[str, int] = {}
    num_plain = 0
    for path, part in _Walk().parts(value, "", 0, True):
        num_plain += not as_known(part)
        if num_plain > MAX_PLAIN and not as_known(part):
            yield path, part  # not listed: its path need not be unique
            continue
        num_seen[path] = number = num_seen.get(path, 0) + 1  # different keys may have equal texts
        yield (path if number == 1 else f"{path} ({number})"), part


def find(value: Any, path: str) -> Any:
    """Return the part of a value at a path that `walk` has yielded, or the gradient of that part.

    Raises:
        LookupError: the value has no such part now.
    """
    if not path:
        return value
    owner, _, last = path.rpartition(".")
    for at, part in walk(value):
        if at == path:
            return part
        if last == "grad" and at == owner and issubclass(type(part), torch.Tensor):
            return part.grad if keeps_grad(part) else None
    raise LookupError(f"there is no {path} in it now")


def tensors_of(module: nn.Module, part: str = "_parameters") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters like `named_parameters`, but without user code that overrides it;
    or the tensors in another dict of modules, as ``_buffers``.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", module)]
    while waiting:
        prefix, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), torch.Tensor):
            yield prefix, value
        elif issubclass(type(value), nn.Module):
            dot = "." if prefix else ""
            boxes = [held_by(value).get(name) for name in (part, "_modules")]
            items = [item for box in boxes if isinstance(box, dict) for item in dict.items(box)]
            waiting += [(f"{prefix}{dot}{name}", each) for name, each in reversed(items)]


class _Walk:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # keeps objects alive, as ids of freed ones are reused

    def parts(self, value: Any, path: str, depth: int, may_open: bool) -> Iterator[tuple[str, Any]]:
        """Yield the parts of a value; `may_open`: also the attributes of an unknown object."""
        if issubclass(type(value), _PLAIN) or depth > _MAX_DEPTH:
            yield path, value
            return
        if not self._is_new(value):
            return
        if as_known(value) or _is_long_and_plain(value):
            yield path, value
        elif issubclass(type(value), Optimizer) and {"param_groups", "state"} <= {*held_by(value)}:
            yield from self._of_optimizer(held_by(value), path, depth)
        elif (inside := _inside(value)) is not None:
            for name, item in inside:
                yield from self.parts(item, f"{path}{name}".lstrip("."), depth + 1, may_open)
        elif may_open and not issubclass(type(value), _OPAQUE):
            yield from self._of_object(value, path, depth)
        else:
            yield path, value

    def _of_object(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield an object's attributes, or the object itself if it has no tensors and no plain
        public values.
        """
        held = {name: item for name, item in list(held_by(value).items()) if type(name) is str}
        is_open = any(name[:1] != "_" and issubclass(type(held[name]), _PLAIN) for name in held)
        found = [
            part
            for name, item in held.items()
            for part in self.parts(item, f"{path}.{name}".lstrip("."), depth + 1, False)
        ]
        is_open = is_open or any(as_known(part) for _, part in found)
        yield from found if is_open else [(path, value)]

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _of_optimizer(
        self, held: dict[str, Any], path: str, depth: int
    ) -> Iterator[tuple[str, Any]]:
        """Yield each parameter group's settings and parameters, then each parameter's state."""
        dot, groups = "." if path else "", list(held["param_groups"])
        names = _names_of(groups)
        for index, group in enumerate(groups):
            at = f"{path}{dot}param_groups[{index}]"
            plain, tensors = {}, []
            for key, value in list(dict.items(group)):
                if key == "params":
                    named = [names.get(id(one), f"params[{i}]") for i, one in enumerate(value)]
                    tensors = [*zip(named, value, strict=False)]
                elif issubclass(type(value), (*_PLAIN, tuple)):
                    if value is not None and value is not False:  # omit settings that are off
                        plain[key] = value
                elif key != "param_names":
                    yield from self.parts(value, f"{at}.{key}", depth + 1, False)
            yield at, plain
            for name, tensor in tensors:
                yield from self.parts(tensor, f"{at}.{name}", depth + 1, False)
        for number, parameter in enumerate(one for group in groups for one in group["params"]):
            names.setdefault(id(parameter), str(number))  # as in a state_dict
        for parameter, kept in list(dict.items(held["state"])):
            at = f"{path}{dot}state[{names.get(id(parameter), '?')}]"
            for key, value in list(dict.items(kept)) if issubclass(type(kept), dict) else ():
                yield from self.parts(value, f"{at}.{key}", depth + 1, False)


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a container or module, each with its name there as a suffix of the path;
    None for any other value.
    """
    kind = type(value)
    if issubclass(kind, nn.Module):
        boxes = (tensors_of(value), tensors_of(value, "_buffers"))
        return [(f".{name}", tensor) for box in boxes for name, tensor in box]
    if issubclass(kind, collections.UserDict):
        value = held_by(value).get("data")
        kind = type(value)
    if issubclass(kind, dict):
        return [(f"[{_key(key)}]", item) for key, item in list(dict.items(value))]
    if issubclass(kind, tuple):
        names = in_classes(kind, "_fields", ())
        if type(names) is tuple and names:
            return [
                (f".{name}", item) for name, item in zip(names, tuple.__iter__(value), strict=False)
            ]
    if base := next((each for each in _SERIES if issubclass(kind, each)), None):
        return [(f"[{index}]", item) for index, item in enumerate(list(base.__iter__(value)))]
    if has(kind, "__dataclass_fields__"):
        found = []
        for field in dataclasses.fields(kind):
            with contextlib.suppress(Unknown, AttributeError):
                found.append((f".{field.name}", attribute(value, field.name)))
        return found
    return None


def _names_of(groups: list[dict[str, Any]]) -> dict[int, str]:
    """Return the names of an optimizer's parameters, by their ids: the names given to the
    optimizer, else those in models among the rank's variables.
    """
    wanted = {id(one) for group in groups for one in group["params"]}
    models = [
        {id(one): f"{variable}.{name}" for name, one in tensors_of(value) if id(one) in wanted}
        for variable, value in list(vars(sys.modules["__main__"]).items())
        if issubclass(type(value), nn.Module) and not variable.startswith("_")
    ]
    # Prefer the model that has most of them; of a model and its wrapper, the one with shorter
    # names.
    models.sort(key=lambda held: (-len(held), sum(map(len, held.values()))))
    names: dict[int, str] = {}
    for held in models:
        names = held | names
    for group in groups:
        given = group.get("param_names") or ()
        names |= {id(one): name for one, name in zip(group["params"], given, strict=False)}
    return names


def _is_long_and_plain(value: Any) -> bool:
    """Return whether a container is long and has only plain items, and so is shown as one item;
    only its first items are looked at, as it may have millions.
    """
    base = next((each for each in (dict, *_SERIES) if issubclass(type(value), each)), None)
    return base is not None and base.__len__(value) > FEW and _is_plain(value, 3)


def _is_plain(value: Any, depth: int) -> bool:
    if issubclass(type(value), _PLAIN):
        return True
    base = next((each for each in (dict, *_SERIES) if issubclass(type(value), each)), None)
    if base is None or not depth:
        return False
    items = dict.values(value) if base is dict else base.__iter__(value)
    return all(_is_plain(each, depth - 1) for each in list(islice(items, FEW)))


def as_known(value: Any) -> bool:
    """Return whether a value is a tensor or an array of numbers, which is shown as a whole and not
    searched for tensors.
    """
    if issubclass(type(value), torch.Tensor):
        return True
    return (
        type(value).__module__ == "numpy"
        and hasattr(value, "__array_interface__")
        and as_tensor(value[:0] if getattr(value, "ndim", 0) else value) is not None
    )


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor unchanged, an array of numbers as a tensor, None for any other value."""
    if issubclass(type(value), torch.Tensor):
        return value  # type: ignore[no-any-return]
    if type(value).__module__ != "numpy" or not hasattr(value, "__array_interface__"):
        return None
    try:
        if getattr(value.flags, "writeable", False) and value.dtype.isnative:
            return torch.from_numpy(value)
    except (TypeError, ValueError):  # negative strides, or elements that are no numbers
        pass
    try:
        # Copy, as torch accepts no negative strides, foreign byte orders or read-only memory.
        return torch.as_tensor(value.astype(value.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError:  # elements that are no numbers
        return None


def _key(key: Any) -> str:
    """Return the text of a dict's key; for unusual keys, their type."""
    text = _written(key)
    return text if len(text) <= 80 else text[:79] + "…"


def _written(key: Any) -> str:
    kind = type(key)
    if kind is tuple:
        return f"({', '.join(map(_written, key))}{',' * (len(key) == 1)})"
    # A str enum is shown by its text, as its own repr is code.
    base: Any = next((each for each in _PLAIN if issubclass(kind, each)), None)
    return base.__repr__(key) if base is not None else f"<{kind.__name__}>"
