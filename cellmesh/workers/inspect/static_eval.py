"""Evaluates paths of names, attributes and indices without running user code.

Names, attributes and constant indices are resolved from stored values only: an attribute is read
from an object's ``__dict__`` or its classes, never by a property or ``__getattr__``. A value found
so is the value that Python would return; all other cases raise `NeedsCode`. So the values of a rank
can be inspected while its main thread runs.
"""

from __future__ import annotations

import ast
import builtins
import collections
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..rank.value_transfer import is_dtensor
from ..static_lookup import classes_of, has, held_by, vars_of


class Unknown(Exception):
    """Raised for a name, attribute or value that cannot be found without running code."""


class NeedsCode(Unknown):
    """Raised for an expression whose evaluation may run code; the text gives the reason."""


SLOTS = (types.MemberDescriptorType, type(collections.namedtuple("_", "a").a))  # type: ignore[attr-defined]
# Attributes under which torch's wrappers (compile, FSDP, checkpointing) keep the wrapped module, to
# which they forward attribute access.
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")

# Types of indices and keys, which Python itself hashes and compares.
_KEYS = (int, str, float, complex, bool, bytes, type(None), type(...))
_INDICES = (int, type(None), type(...), slice)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
# Attributes of tensors that are cheap to read, and their types.
OF_TENSORS: Mapping[str, type] = {
    **dict.fromkeys(("grad", "data", "T", "H", "mT", "mH", "real", "imag"), torch.Tensor),
    "shape": torch.Size, "dtype": torch.dtype, "device": torch.device,
    "ndim": int, "requires_grad": bool,
}  # fmt: skip
# Attributes that are read from subclasses of tensors, too, as reading them makes no new tensor.
_OF_ANY_TENSOR = ("grad", "requires_grad")
_NOTHING = object()
# Python's own attribute lookups; a class with any of these has no lookup of its own.
_LOOKUPS = tuple(
    kind.__getattribute__
    for kind in (object, types.ModuleType, types.SimpleNamespace, tuple, list, dict)
)
_SEQUENCES = (torch.Size, list, tuple, str, bytes, range)


def follow(expression: str, namespace: Mapping[str, Any]) -> Any:
    """Return the value of an expression of names, attributes and constant indices.

    Args:
        expression: the expression, as ``model.layers[0].weight``.
        namespace: values by name.

    Raises:
        NeedsCode: it is not such an expression, or its evaluation may run code.
        NameError, AttributeError, LookupError: the value does not exist.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NeedsCode(f"it is no expression ({error})") from None
    try:
        return _value(tree.body, namespace)
    except RecursionError:
        raise NeedsCode("it is nested too deeply") from None


def _value(node: ast.expr, namespace: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            for place in (namespace, vars(builtins)):
                if name in place:
                    return place[name]
            raise NameError(f"name {name!r} is not defined")
        case ast.Constant(value=value):
            return value
        case ast.Attribute(value=owner, attr=name):
            return attribute(_value(owner, namespace), name)
        case ast.Subscript(value=owner, slice=index):
            key = index_of(index, lambda node: _value(node, namespace))
            return item(_value(owner, namespace), key)
    raise NeedsCode("it is more than a path of names, attributes and indices")


# ---------------------------------------------------------------- attributes


def boxes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the dicts that contain an object's attributes, including a module's parameters."""
    held = held_by(value)
    yield held
    kind = type(value)
    if issubclass(kind, torch.nn.Module):
        for part in _MODULE_PARTS:
            if isinstance(held.get(part), dict):
                yield held[part]
        modules = held.get("_modules") or {}
        for wrapped in WRAPPED:
            if wrapped in modules:
                yield from boxes(modules[wrapped])


def keeps_grad(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf or retains its gradient; torch warns when code reads
    ``grad`` of other tensors.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            in_classes(torch.Tensor, name).__get__(tensor) for name in ("is_leaf", "retains_grad")
        )


def in_classes(kind: type, name: str, *default: Any) -> Any:
    """Return the attribute that a class or its bases have under a name; else the default.

    Raises:
        Unknown: no class has the attribute, and no default is given.
    """
    for each in classes_of(kind):
        if name in vars_of(each):
            return vars_of(each)[name]
    if default:
        return default[0]
    raise Unknown


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object, without running user code.

    Raises:
        NeedsCode: reading the attribute may run code.
        AttributeError: the object has no such attribute.
    """
    kind = type(owner)
    if issubclass(kind, torch.Tensor):
        is_own = name in _OF_ANY_TENSOR or (kind in _PLAIN_TENSORS and name in OF_TENSORS)
        if is_own and _is_torchs(kind, name):
            if name == "grad" and not keeps_grad(owner):
                raise AttributeError(
                    "it is no leaf, and keeps its gradient only after retain_grad()"
                )
            with torch._C.DisableTorchFunctionSubclass():
                return getattr(owner, name)
    if issubclass(kind, type):
        return _of_class(owner, name)
    if all(in_classes(kind, "__getattribute__") is not each for each in _LOOKUPS):
        raise NeedsCode(f"{kind.__qualname__} has a __getattribute__")
    found = in_classes(kind, name, _NOTHING)
    if type(found) in SLOTS:
        return _slot(found, owner, name)
    if _comes_first(found):
        raise NeedsCode(_about(found, name, kind))
    for number, box in enumerate(boxes(owner)):
        if number and found is not _NOTHING:  # these precede a module's parts
            break
        if name in box:
            return box[name]
    if found is _NOTHING:
        return _missing(kind, name)
    if has(type(found), "__get__"):
        raise NeedsCode(_about(found, name, kind))
    return found


def _is_torchs(kind: type, name: str) -> bool:
    """Return whether a class of tensors inherits the attribute `name` of ``torch.Tensor``
    unchanged.
    """
    return in_classes(kind, name) is in_classes(torch.Tensor, name)


def _of_class(owner: type, name: str) -> Any:
    meta = type(owner)
    if in_classes(meta, "__getattribute__") is not vars_of(type)["__getattribute__"] or (
        has(meta, name) and _comes_first(in_classes(meta, name))
    ):
        raise NeedsCode(f"{name!r} of {owner.__qualname__} is its metaclass's affair")
    found = in_classes(owner, name, _NOTHING)
    if found is _NOTHING:
        return _missing(meta, name)
    if type(found) is not types.FunctionType and has(type(found), "__get__"):
        raise NeedsCode(_about(found, name, owner))
    return found


def _about(found: Any, name: str, kind: type) -> str:
    what = "a property" if type(found) is property else "worked out when it is asked for"
    return f"{name!r} of {kind.__qualname__} is {what}"


def _comes_first(found: Any) -> bool:
    """Return whether a class attribute takes precedence over an instance's of the same name, as a
    property does.
    """
    return has(type(found), "__set__") or has(type(found), "__delete__")


def _slot(found: Any, owner: Any, name: str) -> Any:
    try:
        return type(found).__get__(found, owner, type(owner))
    except AttributeError:
        return _missing(type(owner), name)


def _missing(kind: type, name: str) -> Any:
    asked = in_classes(kind, "__getattr__", None)
    if asked is not None and asked is not vars_of(nn.Module)["__getattr__"]:
        raise NeedsCode(f"{kind.__qualname__} has a __getattr__")
    if issubclass(kind, types.ModuleType):
        raise NeedsCode("a module may have a __getattr__")
    raise AttributeError(f"{kind.__qualname__!r} object has no attribute {name!r}")


# ---------------------------------------------------------------- indices


def index_of(node: ast.expr, evaluate: Callable[[ast.expr], Any]) -> Any:
    """Return the value of the expression in the brackets of an index.

    Args:
        node: the expression.
        evaluate: returns the value of a subexpression.

    Raises:
        NeedsCode: using the value as an index may run code.
    """
    match node:
        case ast.Slice(lower=lower, upper=upper, step=step):
            ends = [
                None if each is None else index_of(each, evaluate) for each in (lower, upper, step)
            ]
            if all(type(each) in (int, type(None)) for each in ends):
                return slice(*ends)
            raise NeedsCode("a slice's ends are no numbers")
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Tuple(elts=parts):
            return tuple(index_of(part, evaluate) for part in parts)
    key = evaluate(node)
    if type(key) in _KEYS:
        return key
    raise NeedsCode(f"an index is a {type(key).__qualname__}")


def item(owner: Any, index: Any) -> Any:
    """Return the item of a container, module or tensor at an index, without running user code.

    Raises:
        NeedsCode: the index, or the class of the owner, may run code.
        LookupError: the owner has no such item.
    """
    kind = type(owner)
    if is_dtensor(owner):
        raise NeedsCode(
            "indexing a DTensor is a collective: look at the whole, and choose in the heatmap"
        )
    if kind in _PLAIN_TENSORS or (kind.__module__, kind.__qualname__) == ("numpy", "ndarray"):
        parts = index if type(index) is tuple else (index,)
        if all(type(part) in _INDICES for part in parts):
            return owner[index]
        raise NeedsCode("an index is more than numbers and slices")
    if kind in _SEQUENCES or _gets_as(kind, list, tuple):
        base = next(each for each in _SEQUENCES if issubclass(kind, each))
        return in_classes(base, "__getitem__")(owner, index)
    if _gets_as(kind, dict):
        return _in_dict(kind, owner, index)
    if _gets_as(kind, nn.ModuleDict):
        return _in_dict(dict, _part(owner, "_modules"), index)
    if _gets_as(kind, nn.ModuleList, nn.Sequential) and type(index) is int:
        return list(_part(owner, "_modules").values())[index]
    if _gets_as(kind, nn.ParameterList) and type(index) is int:
        size = held_by(owner).get("_size", 0)
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of range")
        return attribute(owner, str(index % size))
    if _gets_as(kind, nn.ParameterDict) and type(index) is str:
        return attribute(owner, index)
    raise NeedsCode(f"indexing a {kind.__qualname__} runs its code")


def _gets_as(kind: type, *bases: type) -> bool:
    """Return whether a class inherits ``__getitem__`` unchanged from one of these classes."""
    return any(
        issubclass(kind, base)
        and in_classes(kind, "__getitem__") is in_classes(base, "__getitem__")
        for base in bases
    )


def _part(module: nn.Module, name: str) -> dict[str, Any]:
    part = held_by(module).get(name)
    if not isinstance(part, dict):
        raise NeedsCode("it keeps its modules in a way of its own")
    return part


def _in_dict(kind: type, items: dict[Any, Any], key: Any) -> Any:
    if not _is_plain(key):
        raise NeedsCode("a key is more than numbers and texts")
    # Keys of other classes may have an `__eq__` of user code, so only keys of the same type are
    # compared.
    for each, value in list(dict.items(items)):
        if type(each) is type(key) and _is_plain(each) and each == key:
            return value
    if has(kind, "__missing__") or any(not _is_plain(each) for each in list(dict.keys(items))):
        raise NeedsCode(f"{kind.__qualname__} has to be asked for {key!r}")
    raise KeyError(key)


def _is_plain(key: Any) -> bool:
    return type(key) in _KEYS or (type(key) is tuple and all(map(_is_plain, key)))
