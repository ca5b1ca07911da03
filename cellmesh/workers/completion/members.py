"""Lists attributes, keys and arguments of something, as in `inference` without running code."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ..inspect.static_eval import WRAPPED, boxes, in_classes
from ..static_lookup import classes_of, held_by, vars_of
from .inference import C_FUNCTIONS, InferredValue, InstanceOf, Known

_ROUTINES = (
    *C_FUNCTIONS, types.FunctionType, types.MethodType, types.WrapperDescriptorType,
    types.MethodWrapperType,
    staticmethod, classmethod, type(functools.lru_cache(int)),
)  # fmt: skip
_MAX_WRAPPERS = 50


def members(owner: Known) -> dict[str, str]:
    """Return the attributes of something, and the kind of each."""
    found: dict[str, str] = {}
    value = owner.value if isinstance(owner, InferredValue) else None
    kind: type
    if isinstance(owner, InstanceOf):
        kind = owner.type
    elif issubclass(type(value), types.ModuleType):
        return {name: kind_of(item) for name, item in list(held_by(value).items())}
    else:
        kind = value if issubclass(type(value), type) and isinstance(value, type) else type(value)
        if kind is not value:
            for box in boxes(value):
                found.update(
                    (name, kind_of(item)) for name, item in list(box.items()) if type(name) is str
                )
    for each in classes_of(kind):
        if value is None:  # what its instances will have
            found.update(dict.fromkeys(_annotations_of(each), "instance"))
        for name, item in list(vars_of(each).items()):
            found.setdefault(name, kind_of(item))
    modules = held_by(value).get("_modules") if value is not None else None
    if isinstance(modules, dict):
        for wrapped in WRAPPED:
            if wrapped in modules:
                found = {**members(InferredValue(modules[wrapped])), **found}
    return found


def _annotations_of(kind: type) -> list[str]:
    annotations = vars_of(kind).get("__annotations__", {})
    return list(annotations) if type(annotations) is dict else []


def keys(owner: Known) -> list[str | int]:
    """Return the keys of something in order: texts and numbers only."""
    if isinstance(owner, InstanceOf):
        return []
    value = owner.value
    kind = type(value)
    found: list[Any] = []
    if issubclass(kind, dict):
        found = list(dict.keys(value))
    elif issubclass(kind, torch.nn.ModuleDict):
        found = list(held_by(value)["_modules"])
    elif issubclass(kind, torch.nn.ParameterDict):
        found = list(held_by(value).get("_keys", ()))
    elif kind.__module__.startswith("pandas.") and kind.__name__ == "DataFrame":
        found = list(value.columns)
    elif kind.__module__ == "numpy" and kind.__name__ in ("ndarray", "recarray"):
        found = list(value.dtype.names or ())
    elif kind.__module__.endswith("distributed.device_mesh") and kind.__name__ == "DeviceMesh":
        found = list(value.mesh_dim_names or ())
    return [key for key in found if type(key) in (str, int)]


def parameters(owner: Known) -> list[str]:
    """Return the names of the arguments that a call takes."""
    function = called(owner.value) if isinstance(owner, InferredValue) else None
    if function is None:
        return []
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names[code.co_posonlyargcount :] if name not in ("self", "cls")]


def called(value: Any) -> types.FunctionType | None:
    """Return the Python function that a call of something runs, without wrappers."""
    kind = type(value)
    if issubclass(kind, type):
        makers = (_in_classes(value, name) for name in ("__init__", "__new__"))
        value = next((each for each in makers if type(each) is types.FunctionType), None)
    elif issubclass(kind, torch.nn.Module):
        value = _in_classes(kind, "forward")
    elif kind not in _ROUTINES:
        value = _in_classes(kind, "__call__")
    for _ in range(_MAX_WRAPPERS):
        if type(value) is types.MethodType:
            value = value.__func__
        wrapped = held_by(value).get("__wrapped__")
        if wrapped is None:
            break
        value = wrapped
    return value if type(value) is types.FunctionType else None


def _in_classes(kind: type, name: str) -> Any:
    """Return what a class has under a name; of a static method, its function."""
    found = in_classes(kind, name, None)
    return found.__func__ if type(found) is staticmethod else found


def kind_of(value: Any) -> str:
    """Return the kind of something in the words of front ends."""
    kind = type(value)
    if issubclass(kind, type):
        return "class"
    if kind is property or kind is functools.cached_property:
        return "property"
    if issubclass(kind, types.ModuleType):
        return "module"
    if kind in _ROUTINES:
        return "function"
    return "instance"
