"""The tensors in a value: a tensor itself, or those of a module, an optimizer or any nest of them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..inspection import as_tensor

# What is told beside tensors: a loss, a step, a name.
_PLAIN = (bool, int, float, complex, str, type(None))
# What has no parts worth showing, though it has a ``__dict__``.
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, BaseException)
_MAX_DEPTH = 8


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in a value, and the numbers and texts beside them, each tensor once.

    Args:
        value: anything. Of an object that is none of the known ones, its attributes are looked at, but not
            the attributes of objects in those.

    Yields:
        A path and what is there: "" for the value itself, where it has no parts.
    """
    num_seen: dict[str, int] = {}
    for path, part in _Walk().parts(value, "", 0, True):
        num_seen[path] = number = num_seen.get(path, 0) + 1  # keys may be written alike
        yield (path if number == 1 else f"{path} ({number})"), part


def find(value: Any, path: str) -> Any:
    """What lies at a path that `walk` has given.

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
    """An optimizer in a line."""
    count = len(optimizer.param_groups)
    return f"{type(optimizer).__name__}, {count} parameter group{'s' if count != 1 else ''}"


class _Walk:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is one's own only as long as one lives

    def parts(self, value: Any, path: str, depth: int, may_open: bool) -> Iterator[tuple[str, Any]]:
        """The parts of a value; `may_open`: also the attributes of an object of any kind."""
        if isinstance(value, _PLAIN) or depth > _MAX_DEPTH:
            yield path, value
        elif as_known(value):
            if self._is_new(value):
                yield path, value
        elif not self._is_new(value):
            return
        elif isinstance(value, nn.Module):
            yield from self._of_module(value, path)
        elif isinstance(value, Optimizer):
            yield from self._of_optimizer(value, path, depth)
        elif isinstance(value, Mapping):
            for key, item in list(value.items()):
                yield from self.parts(item, f"{path}[{_key(key)}]", depth + 1, may_open)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            for name, item in zip(value._fields, value, strict=False):
                yield from self.parts(item, f"{path}.{name}".lstrip("."), depth + 1, may_open)
        elif isinstance(value, list | tuple | set | frozenset):
            for index, item in enumerate(list(value)):
                yield from self.parts(item, f"{path}[{index}]", depth + 1, may_open)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if hasattr(value, field.name):
                    item = getattr(value, field.name)
                    yield from self.parts(item, f"{path}.{field.name}".lstrip("."), depth + 1, may_open)
        elif may_open and hasattr(value, "__dict__") and not isinstance(value, _OPAQUE) and vars(value):
            for name, item in list(vars(value).items()):
                yield from self.parts(item, f"{path}.{name}".lstrip("."), depth + 1, False)
        else:
            yield path, value

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _of_module(self, module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
        dot = "." if path else ""
        for found in (module.named_parameters(), module.named_buffers()):
            for name, tensor in found:
                if self._is_new(tensor):
                    yield f"{path}{dot}{name}", tensor

    def _of_optimizer(self, optimizer: Optimizer, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        dot = "." if path else ""
        names: dict[int, str] = {}
        for index, group in enumerate(list(optimizer.param_groups)):
            at = f"{path}{dot}param_groups[{index}]"
            for key, value in list(group.items()):
                if key not in ("params", "param_names"):
                    yield from self.parts(value, f"{at}.{key}", depth + 1, False)
            known = group.get("param_names") or ()
            for position, parameter in enumerate(group["params"]):
                # Optimizers made of `named_parameters()` know what they are called.
                called = known[position] if position < len(known) else f"params[{position}]"
                names[id(parameter)] = called if known else str(len(names))  # as in a state_dict
                if self._is_new(parameter):
                    yield f"{at}.{called}", parameter
        for parameter, state in list(optimizer.state.items()):
            called = names.get(id(parameter), "?")
            inside = state if isinstance(state, Mapping) else {"": state}
            for key, value in list(inside.items()):
                yield from self.parts(value, f"{path}{dot}state[{called}].{key}", depth + 1, False)


def as_known(value: Any) -> bool:
    """Whether it is a tensor, or an array of numbers."""
    if isinstance(value, torch.Tensor):
        return True
    return (
        type(value).__module__ == "numpy"
        and hasattr(value, "__array_interface__")
        and (as_tensor(value[:0] if getattr(value, "ndim", 0) else value) is not None)
    )


def _key(key: Any) -> str:
    """A key as it is written; of odd keys, their type."""
    if isinstance(key, (*_PLAIN, tuple)):
        text = repr(key)
        return text if len(text) <= 80 else text[:79] + "…"
    return f"<{type(key).__name__}>"
