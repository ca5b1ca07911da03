"""What an expression of code that has not run stands for: its value, or only its type.

As in `static_eval`, no code of the user's is run: a rank is asked while its main thread runs. Where
a value would take code, as what a function returns, the function's annotation gives the type.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..inspect.static_eval import SLOTS, Unknown, boxes, in_classes, item
from ..static_lookup import has, held_by


@dataclass(frozen=True)
class Value:
    """An expression's value."""

    value: Any


@dataclass(frozen=True)
class InstanceOf:
    """The type of an expression's value."""

    type: type


Known = Value | InstanceOf
Lookup = Callable[[str], Known]

# What attributes of a tensor are; to read them may make a tensor.
_OF_TENSORS: Mapping[str, type] = {
    **dict.fromkeys(("grad", "data", "T", "H", "mT", "mH", "real", "imag"), torch.Tensor),
    "shape": torch.Size, "dtype": torch.dtype, "device": torch.device,
}  # fmt: skip
_RETURNS_TENSOR = re.compile(r"->\s*Tensor\b")
C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_MAX_DEPTH = 50


def resolve(expression: str | ast.expr, lookup: Lookup, depth: int = 0) -> Known:
    """What an expression stands for.

    Args:
        expression: of names, attributes, indices and calls.
        lookup: what a name stands for; raises `Unknown`.
        depth: how deep this is in other expressions.

    Raises:
        Unknown: it cannot be told.
    """
    if isinstance(expression, str):
        try:
            expression = ast.parse(expression.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError) as e:
            raise Unknown from e
    if depth > _MAX_DEPTH:
        raise Unknown
    match expression:
        case ast.Name(id=name):
            return lookup(name)
        case ast.Constant(value=value):
            return Value(value)
        case ast.Attribute(value=owner, attr=name):
            return attribute(resolve(owner, lookup, depth + 1), name)
        case ast.Subscript(value=owner, slice=index):
            return _item(resolve(owner, lookup, depth + 1), index, lookup)
        case ast.Call(func=function):
            return _returned(resolve(function, lookup, depth + 1))
        case ast.List() | ast.ListComp():
            return InstanceOf(list)
        case ast.Dict() | ast.DictComp():
            return InstanceOf(dict)
        case ast.Tuple():
            return InstanceOf(tuple)
        case ast.Set() | ast.SetComp():
            return InstanceOf(set)
        case ast.JoinedStr():
            return InstanceOf(str)
    raise Unknown


# ---------------------------------------------------------------- attributes


def attribute(owner: Known, name: str) -> Known:
    """An attribute of something.

    Raises:
        Unknown: there is none, or it takes code to tell.
    """
    if isinstance(owner, InstanceOf):
        return _of_class(owner.type, name)
    value = owner.value
    if issubclass(type(value), types.ModuleType):
        held = held_by(value)
        if name in held:
            return Value(held[name])
        return loaded(f"{held.get('__name__')}.{name}")
    if issubclass(type(value), type):
        return _plain(in_classes(value, name), None)
    for box in boxes(value):
        if name in box:
            return Value(box[name])
    return _of_class(type(value), name, value)


def is_property(kind: type, name: str) -> bool:
    """Whether an attribute of a class's instances is what code gives."""
    try:
        found = type(in_classes(kind, name))
    except Unknown:
        return False
    return found in (property, functools.cached_property, types.GetSetDescriptorType)


def _of_class(kind: type, name: str, instance: Any = None) -> Known:
    """What an instance of a class has from the class."""
    if issubclass(kind, torch.Tensor) and name in _OF_TENSORS:
        return InstanceOf(_OF_TENSORS[name])
    return _plain(in_classes(kind, name), instance)


def _plain(found: Any, instance: Any) -> Known:
    """What an attribute of a class comes to on one of its instances; None: on the class itself."""
    kind = type(found)
    if kind in (staticmethod, classmethod):
        return Value(found.__func__)
    if kind is property:
        return _annotated(found.fget)
    if kind is functools.cached_property:
        return _annotated(found.func)
    if instance is not None and kind in SLOTS:
        try:
            return Value(kind.__get__(found, instance, type(instance)))
        except AttributeError as e:  # a slot that is empty
            raise Unknown from e
    if kind in (types.FunctionType, *C_FUNCTIONS) or not has(kind, "__get__"):
        return Value(found)
    raise Unknown


# ---------------------------------------------------------------- indices and calls


def _item(owner: Known, index: ast.expr, lookup: Lookup) -> Known:
    kind = owner.type if isinstance(owner, InstanceOf) else type(owner.value)
    if issubclass(kind, torch.Tensor | str):
        return InstanceOf(str if issubclass(kind, str) else torch.Tensor)
    if f"{kind.__module__}.{kind.__qualname__}" == "torch.distributed.device_mesh.DeviceMesh":
        return InstanceOf(kind)
    if isinstance(owner, InstanceOf):
        raise Unknown
    if isinstance(index, ast.Slice):
        return InstanceOf(kind)
    key = _key(index, lookup)
    try:
        return Value(item(owner.value, key))
    except (LookupError, TypeError) as e:
        raise Unknown from e


def _key(index: ast.expr, lookup: Lookup) -> Any:
    match index:
        case ast.Constant(value=key):
            return key
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.Tuple(elts=parts):
            return tuple(_key(part, lookup) for part in parts)
    known = resolve(index, lookup)
    if isinstance(known, Value):
        return known.value
    raise Unknown


def _returned(function: Known) -> Known:
    if isinstance(function, InstanceOf):
        raise Unknown
    value = function.value
    kind = type(value)
    if issubclass(kind, type):
        return InstanceOf(value)
    if issubclass(kind, torch.nn.Module):
        return _annotated(in_classes(kind, "forward"))
    if kind in C_FUNCTIONS and _RETURNS_TENSOR.search((value.__doc__ or "")[:2000]):
        return InstanceOf(torch.Tensor)
    return _annotated(value)


def _annotated(function: Any) -> InstanceOf:
    """What a function returns, by its annotation."""
    if type(function) is types.MethodType:
        function = function.__func__
    if type(function) is not types.FunctionType:
        raise Unknown
    return annotated(function.__annotations__.get("return"), function.__globals__)


def annotated(annotation: Any, namespace: Mapping[str, Any]) -> InstanceOf:
    """The type that an annotation names; the first of several.

    Raises:
        Unknown: it names none.
    """
    if isinstance(annotation, str):
        try:
            node = ast.parse(annotation.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError) as e:
            raise Unknown from e
        while isinstance(node, ast.BinOp | ast.Subscript):  # int | None, list[int]
            node = node.left if isinstance(node, ast.BinOp) else node.value
        known = resolve(node, lambda name: find_name(name, namespace))
        annotation = known.value if isinstance(known, Value) else None
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = typing.get_args(annotation)[0]
    origin = typing.get_origin(annotation) or annotation
    if not isinstance(origin, type) or origin is type(None):
        raise Unknown
    return InstanceOf(origin)


def loaded(name: str) -> Value:
    """A module that has been imported.

    Raises:
        Unknown: it has not.
    """
    module = sys.modules.get(name)
    if module is None:
        raise Unknown
    return Value(module)


def find_name(name: str, namespace: Mapping[str, Any]) -> Known:
    """What a name stands for in a namespace or among the builtins.

    Raises:
        Unknown: nothing.
    """
    for place in (namespace, vars(builtins)):
        if name in place:
            return Value(place[name])
    raise Unknown
