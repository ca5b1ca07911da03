"""What help tells of an object, found without asking it, as IPython would: by `getdoc`, `__len__`,
...
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from typing import Any

from IPython.core.oinspect import InfoDict

from ..inspect.safe_repr import name_of, quiet_text, whole_text
from ..inspect.static_eval import Unknown, in_classes
from ..static_lookup import classes_of, has, held_by, vars_of
from .inference import C_FUNCTIONS

_SIZED = (str, bytes, range, list, tuple, dict, set, frozenset, collections.deque)
_DESCRIPTORS = (property, functools.cached_property, staticmethod, classmethod)
_TOLD_BY_NAME = (type, types.FunctionType, *C_FUNCTIONS)
_MODULES_OF_ANNOTATIONS = ("builtins", "types", "typing")
_METACLASSES_OF = ("builtins", "abc", "enum", "typing", "torch")
# What a class would answer itself if it were asked.
_ASKED = ("getdoc", "__signature__", "__wrapped__")


def is_pythons(found: Any) -> bool:
    """Whether asking for an object's attributes, signature and source runs nobody's code.

    So it is with functions, classes and modules, unless they have something of the kind themselves.
    """
    kind = type(found)
    if kind is types.MethodType:
        found = found.__func__
        kind = type(found)
    if kind is types.FunctionType:
        held = held_by(found)
        if (
            "getdoc" in held
            or "__signature__" in held
            or not is_pythons(held.get("__wrapped__", len))
        ):
            return False
        defaults = [*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()]
        return all(type(each) in _TOLD_BY_NAME or whole_text(each) for each in defaults) and all(
            type(each).__module__ in _MODULES_OF_ANNOTATIONS
            for each in found.__annotations__.values()
        )
    if issubclass(kind, types.ModuleType):
        return kind is types.ModuleType and "__getattr__" not in held_by(found)
    if issubclass(kind, type):
        is_known = all(_is_known(each) for each in classes_of(kind))
        makers = [
            vars_of(each).get(name)
            for each in classes_of(found)
            for name in ("__init__", "__new__")
        ]
        return (
            is_known
            and not any(has(found, name) for name in _ASKED)
            and all(type(each) is not types.FunctionType or is_pythons(each) for each in makers)
        )
    if kind in _DESCRIPTORS:
        function = held_by(found).get("func") if kind is functools.cached_property else None
        inner = function or (found.fget if kind is property else found.__func__)
        return type(inner) is types.FunctionType and is_pythons(inner)
    return kind in C_FUNCTIONS


def _is_known(metaclass: type) -> bool:
    module = vars_of(metaclass).get("__module__")
    return metaclass in (type, object) or (
        type(module) is str and module.split(".")[0] in _METACLASSES_OF
    )


def facts_of(found: Any, name: str, text: str, has_source: bool) -> InfoDict:
    """What IPython's inspector shows of an object; `has_source`: with the source of it, or of its
    class.
    """
    kind = type(found)
    facts: dict[str, Any] = dict.fromkeys(InfoDict.__annotations__)
    if kind is types.FunctionType or kind is types.MethodType:
        call, kind_doc, own_doc = found, None, _text(found.__doc__)
    else:
        call = _of_class(kind, "__call__")
        kind_doc, own_doc = _doc_of(kind), _text(held_by(found).get("__doc__"))
    if issubclass(kind, type):
        own_doc, call = _doc_of(found), _of_class(found, "__init__")
    init = _of_class(kind, "__init__")
    facts |= {
        "name": name,
        "found": True,
        "isclass": False,
        "isalias": False,
        "ismagic": False,
        "namespace": "ranks",
        "type_name": name_of(kind),
        "string_form": text,
        "length": str(len(found)) if kind in _SIZED else None,
        "source": _source_of(found) if has_source else None,
        "definition": _signature_of(call, name),
        "docstring": own_doc or kind_doc or "<no docstring>",
        "class_docstring": kind_doc if own_doc and own_doc != kind_doc else None,
        "init_docstring": _text(init.__doc__) if init is not None else None,
    }
    return facts  # type: ignore[return-value]


def _source_of(found: Any) -> str | None:
    function = getattr(found, "__func__", None) if type(found) is types.MethodType else found
    source: Any = function.__code__ if type(function) is types.FunctionType else type(found)
    if issubclass(type(source), type) and not (
        is_pythons(source) and source.__module__ != "__main__"
    ):
        return None
    try:
        return inspect.getsource(source).rstrip()
    except (OSError, TypeError):
        return None


def _of_class(kind: type, name: str) -> types.FunctionType | None:
    try:
        found = in_classes(kind, name)
    except Unknown:
        return None
    return found if type(found) is types.FunctionType else None


def _doc_of(kind: type) -> str | None:
    return next(
        filter(None, (_text(vars_of(each).get("__doc__")) for each in classes_of(kind))), None
    )


def _text(doc: Any) -> str | None:
    return inspect.cleandoc(doc) if type(doc) is str else None


def _signature_of(call: Any, name: str) -> str | None:
    """How it is called; what the defaults are is told in short."""
    is_function = type(call) is types.FunctionType
    function = call if is_function else getattr(call, "__func__", None)
    if type(function) is not types.FunctionType:
        return None
    code = function.__code__
    num_before = code.co_argcount
    names = code.co_varnames[: num_before + code.co_kwonlyargcount]
    defaults = function.__defaults__ or ()
    told = dict(zip(names[num_before - len(defaults) : num_before], defaults, strict=True))
    told |= function.__kwdefaults__ or {}
    parts = [f"{each}={quiet_text(told[each])}" if each in told else each for each in names]
    rest = list(code.co_varnames[len(names) :])
    has_rest = bool(code.co_flags & inspect.CO_VARARGS)
    keywords = parts[num_before:]
    parts = parts[:num_before]
    if has_rest or keywords:
        parts.append(f"*{rest.pop(0)}" if has_rest else "*")
    parts += keywords
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parts.append(f"**{rest[0]}")
    if names[:1] in (("self",), ("cls",)):
        parts = parts[1:]
    return f"{name}({', '.join(parts)})"
