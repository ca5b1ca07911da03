"""Infers the value or the type of an expression in code that has not run.

As in `static_eval`, no code of the user's is run: a rank is asked while its main thread runs. Where
a value would take code, as what a function returns, the function's annotation gives the type.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..inspect import static_eval
from ..inspect.static_eval import Unknown, boxes, in_classes
from ..static_lookup import has, held_by


@dataclass(frozen=True)
class InferredValue:
    """An expression's value, as it was inferred without running the expression."""

    value: Any


@dataclass(frozen=True)
class InstanceOf:
    """An expression's type, as it was inferred; the expression's value is not known."""

    type: type


Known = InferredValue | InstanceOf
Lookup = Callable[[str], Known]

_RETURNS_TENSOR = re.compile(r"->\s*Tensor\b")
C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_MAX_DEPTH = 50


def resolve(expression: str | ast.expr, lookup: Lookup, depth: int = 0) -> Known:
    """Infer the value or type of an expression.

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
            return InferredValue(value)
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
    """Infer the value or type of an attribute of an inferred value or type.

    Raises:
        Unknown: there is none, or it takes code to tell.
    """
    if isinstance(owner, InstanceOf):
        return _of_class(owner.type, name)
    value = owner.value
    if issubclass(type(value), type):
        return _plain(in_classes(value, name))
    if not issubclass(type(value), torch.Tensor):  # of a tensor, the type says enough
        with contextlib.suppress(Unknown, AttributeError):
            return InferredValue(static_eval.attribute(value, name))
    if issubclass(type(value), types.ModuleType):
        return loaded(f"{held_by(value).get('__name__')}.{name}")
    for box in boxes(value):  # what code gives is likely what the object holds
        if name in box:
            return InferredValue(box[name])
    return _of_class(type(value), name)


def is_property(kind: type, name: str) -> bool:
    """Return whether an attribute of a class's instances is computed by code."""
    found = in_classes(kind, name, None)
    return type(found) in (property, functools.cached_property, types.GetSetDescriptorType)


def _of_class(kind: type, name: str) -> Known:
    """Infer the value or type of an instance's attribute from the instance's class alone."""
    if issubclass(kind, torch.Tensor) and name in static_eval.OF_TENSORS:
        return InstanceOf(static_eval.OF_TENSORS[name])
    return _plain(in_classes(kind, name))


def _plain(found: Any) -> Known:
    """Infer the value or type of an attribute found in a class, without running descriptors of user
    code.
    """
    kind = type(found)
    if kind in (staticmethod, classmethod):
        return InferredValue(found.__func__)
    if kind is property:
        return _annotated(found.fget)
    if kind is functools.cached_property:
        return _annotated(found.func)
    if kind in (types.FunctionType, *C_FUNCTIONS) or not has(kind, "__get__"):
        return InferredValue(found)
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
    try:
        key = static_eval.index_of(index, lambda node: _value_of(resolve(node, lookup)))
        return InferredValue(static_eval.item(owner.value, key))
    except (LookupError, TypeError) as e:
        raise Unknown from e


def _value_of(known: Known) -> Any:
    if isinstance(known, InferredValue):
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
    """Infer the type of what a function returns from its annotation."""
    if type(function) is types.MethodType:
        function = function.__func__
    if type(function) is not types.FunctionType:
        raise Unknown
    return annotated(function.__annotations__.get("return"), function.__globals__)


def annotated(annotation: Any, namespace: Mapping[str, Any]) -> InstanceOf:
    """Return the type that an annotation names; the first of several.

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
        annotation = _value_of(resolve(node, lambda name: find_name(name, namespace)))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = typing.get_args(annotation)[0]
    origin = typing.get_origin(annotation) or annotation
    if not isinstance(origin, type) or origin is type(None):
        raise Unknown
    return InstanceOf(origin)


def loaded(name: str) -> InferredValue:
    """Return a module as an inferred value, if it is imported.

    Raises:
        Unknown: it has not.
    """
    module = sys.modules.get(name)
    if module is None:
        raise Unknown
    return InferredValue(module)


def find_name(name: str, namespace: Mapping[str, Any]) -> Known:
    """Find a name in a namespace or among the builtins.

    Raises:
        Unknown: nothing.
    """
    for place in (namespace, vars(builtins)):
        if name in place:
            return InferredValue(place[name])
    raise Unknown
