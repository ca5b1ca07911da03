"""Completes code at a cursor from a rank's namespace.

IPython's completer is not used for it: jedi takes a second to import and, like `dir`, runs
properties, ``__getattr__`` and ``__dir__`` of objects that the main thread may be working on.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import pkgutil
import types
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from ...wire.completion import Complete, Completions
from ..inspect.names import users_names
from ..inspect.static_eval import WRAPPED, Unknown, boxes, in_classes
from ..rank.shell import RankShell
from ..static_lookup import classes_of, held_by, vars_of
from .cursor import Spot, find_spot, names_in
from .inference import C_FUNCTIONS, InferredValue, InstanceOf, Known, Lookup, loaded, resolve

_ROUTINES = (
    *C_FUNCTIONS, types.FunctionType, types.MethodType, types.WrapperDescriptorType,
    types.MethodWrapperType,
    staticmethod, classmethod, type(functools.lru_cache(int)),
)  # fmt: skip
_MAX_WRAPPERS = 50


def members(owner: Known) -> dict[str, str]:
    """Return the attributes of an inferred value or type, and the kind of each."""
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
    """Return the keys of an inferred container, in order: texts and numbers only."""
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
    """Return the keyword arguments that an inferred function or class takes when called."""
    function = called(owner.value) if isinstance(owner, InferredValue) else None
    if function is None:
        return []
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names[code.co_posonlyargcount :] if name not in ("self", "cls")]


def called(value: Any) -> types.FunctionType | None:
    """Return the Python function that calling a class, an instance or a wrapper executes."""
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
    """Return what a class or its bases have under a name; of a static method, its function."""
    found = in_classes(kind, name, None)
    return found.__func__ if type(found) is staticmethod else found


def kind_of(value: Any) -> str:
    """Return the kind of a value in the words of front ends: ``class``, ``function``, ..."""
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


_MAX_TEXTS = 5000
_MAX_KEY = 200


def complete(shell: RankShell, subject: Complete) -> Completions:
    """Return what could stand at the cursor of a `Complete` request; runs no user code."""
    spot = find_spot(subject.code[: subject.cursor])
    kinds, lookup = names_in(subject.code, subject.cursor, shell.user_ns)
    try:
        if spot.kind == "name" and subject.users_only:
            found = {name: kind_of(value) for name, value in users_names(shell).items()}
            is_whole = True
        else:
            found, is_whole = _candidates(spot, kinds, lookup, shell.user_ns)
    except Unknown:
        found, is_whole = {}, False
    users = {*shell.user_ns, *kinds} if spot.kind in ("name", "key") else set()
    chosen = [(text, kind) for text, kind in found.items() if _fits(text, spot)]
    chosen.sort(key=lambda each: _order(each[0], each[1], users))
    chosen = chosen[:_MAX_TEXTS]
    return Completions(
        spot.begin,
        subject.cursor,
        tuple(text for text, _ in chosen),
        tuple(kind for _, kind in chosen),
        is_whole and bool(chosen),
    )


def _candidates(
    spot: Spot, kinds: Mapping[str, str], lookup: Lookup, namespace: Mapping[str, Any]
) -> tuple[dict[str, str], bool]:
    """Return all completions at a place in code, and whether nothing else can stand there."""
    match spot.kind:
        case "attribute":
            return members(resolve(spot.expression, lookup)), True
        case "key":
            found = _key_texts(keys(resolve(spot.expression, lookup)), spot.quote)
            if spot.quote:
                return found, True
            return {**found, **_names(kinds, namespace)}, False  # an index may be any expression
        case "member":
            module = loaded(spot.expression)
            return {**_submodules(module), **members(module)}, True
        case "module" if spot.expression:
            return _submodules(loaded(spot.expression)), True
        case "name":
            found = _names(kinds, namespace)
            if spot.call:
                found.update((f"{name}=", "param") for name in _arguments(spot.call, lookup))
            return found, False
    return {}, False


def _names(kinds: Mapping[str, str], namespace: Mapping[str, Any]) -> dict[str, str]:
    found = {name: kind_of(value) for name, value in vars(builtins).items()}
    found.update((name, kind_of(value)) for name, value in list(namespace.items()))
    found.update((name, kind) for name, kind in kinds.items() if name not in found)
    found.update(dict.fromkeys(keyword.kwlist, "keyword"))
    return found


def _arguments(function: str, lookup: Lookup) -> list[str]:
    try:
        return parameters(resolve(function, lookup))
    except Unknown:
        return []


def _submodules(module: Known) -> dict[str, str]:
    """Return the modules of a package, imported or not."""
    path: Any = (
        held_by(module.value).get("__path__", ()) if isinstance(module, InferredValue) else ()
    )
    return {found.name: "module" for found in pkgutil.iter_modules(list(path))}


def _key_texts(found: Iterable[str | int], quote: str) -> dict[str, str]:
    texts = {}
    for key in found:
        if not quote:
            text = repr(key)
        elif isinstance(key, str):
            text = repr(key)[1:-1].replace("\\'", "'").replace(quote, f"\\{quote}")
        else:
            continue
        if len(text) <= _MAX_KEY:
            texts[text] = "dict key"
    return texts


def _fits(text: str, spot: Spot) -> bool:
    is_hidden = spot.kind != "key" and text.startswith("_") and not spot.typed.startswith("_")
    return text.startswith(spot.typed) and not is_hidden


def _order(text: str, kind: str, users: Container[str]) -> tuple[int, int, str]:
    """Sort candidates: keys keep their order; else arguments of the call, the user's names,
    others, private names.
    """
    if kind == "dict key":
        return 0, 0, ""
    place = 1 if text.endswith("=") else 2 if text in users else 3
    return place, len(text) - len(text.lstrip("_")), text
