"""Explains a name from a rank's namespace, as ``name?`` does.

IPython's inspector asks an object for its help: by `getdoc`, ``__len__``, ``__repr__``,
``__signature__``, .... Here the same facts are read from what the object and its classes hold, and
IPython formats them.
"""

from __future__ import annotations

import ast
import collections
import collections.abc
import functools
import inspect
import linecache
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from IPython.core.oinspect import InfoDict, _render_signature
from IPython.utils.path import compress_user
from torch import nn

from ...wire.completion import Explain
from ..inspect.safe_repr import full_name_of, name_of, quiet_text
from ..inspect.static_eval import Unknown, in_classes
from ..rank.shell import RankShell
from ..static_lookup import classes_of, held_by, vars_of
from .complete import called
from .inference import C_FUNCTIONS, InstanceOf, attribute, find_name, is_property, resolve

_SIZED = (str, bytes, range, list, tuple, dict, set, frozenset, collections.deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, *C_FUNCTIONS)
_DOCUMENTED = (*_FUNCTIONS, types.GetSetDescriptorType, property)
_MODULES_OF_METACLASSES = ("", "abc", "enum", "torch")
_CALLABLE = type(collections.abc.Callable[[], None])
_LITERALS = (str, int, bool, type(None), type(...))
_MAX_SUBCLASSES = 10


def explain(shell: RankShell, subject: Explain) -> str:
    """Return the help for a name, as ``name?`` and ``name??`` show it; "" if this rank has none."""
    try:
        found = _find(subject.name, shell.user_ns)
    except Unknown:
        return ""
    facts = dict.fromkeys(InfoDict.__annotations__) | _facts(found, subject, shell)
    function = found if type(found) in _FUNCTIONS else None
    inspector: Any = shell.inspector
    fields = inspector._make_info_unformatted(function, facts, None, subject.detail, ())
    return str(inspector.format_mime(fields)["text/plain"])


def _find(name: str, namespace: Mapping[str, Any]) -> Any:
    """Return the object that a name stands for; a property itself, as its value would run code."""
    owner, dot, last = name.rpartition(".")
    if dot and last.isidentifier():
        known = resolve(owner, lambda each: find_name(each, namespace))
        if isinstance(known, InstanceOf) or not issubclass(
            type(known.value), type | types.ModuleType
        ):
            kind = known.type if isinstance(known, InstanceOf) else type(known.value)
            if is_property(kind, last):
                return in_classes(kind, last)
        known = attribute(known, last)
    else:
        known = resolve(name, lambda each: find_name(each, namespace))
    return known.type if isinstance(known, InstanceOf) else known.value


def _facts(found: Any, subject: Explain, shell: RankShell) -> dict[str, Any]:
    """Return the fields that IPython's inspector shows of an object."""
    kind = type(found)
    is_class = issubclass(kind, type)
    function = _function_of(found)
    source = _source_of(found, function) if subject.detail else None
    signature = _signature_of(found, subject.name)
    init = in_classes(found if is_class else kind, "__init__")
    has_init = type(init) is types.FunctionType and kind not in _FUNCTIONS
    own_doc = _text(_own_doc(found))
    kind_doc = None if is_class or kind in _FUNCTIONS else _doc_of(kind)
    file = _file_of(found, function)
    cell = shell.cell_of(file)
    return {
        "name": subject.name,
        "found": True,
        "isclass": is_class,
        "isalias": False,
        "ismagic": False,
        "namespace": "ranks",
        "type_name": name_of(kind),
        "string_form": _text_of(found),
        "length": str(len(found)) if kind in _SIZED else None,
        "file": f"In[{cell}]" if cell else compress_user(file) or None,
        "source": source,
        "definition": None if is_class else signature,
        "init_definition": signature if is_class else None,
        "docstring": None if source else own_doc or kind_doc or "<no docstring>",
        "class_docstring": kind_doc if own_doc and own_doc != kind_doc else None,
        "init_docstring": _text(init.__doc__) if has_init else None,
        "subclasses": _subclasses_of(found) if is_class else None,
    }


def _function_of(found: Any) -> types.FunctionType | None:
    """Return the Python function of an object, a property or a method."""
    kind = type(found)
    if kind is property:
        return called(found.fget)
    if kind is functools.cached_property:
        return called(found.func)
    if kind in (staticmethod, classmethod):
        return called(found.__func__)
    return called(found) if kind in _FUNCTIONS else None


def _text_of(found: Any) -> str:
    is_module = issubclass(type(found), nn.Module)
    return str(found) if is_module and _is_torchs(found) else quiet_text(found)


def _is_torchs(module: Any) -> bool:
    """Return whether a module and its submodules are torch's, whose repr reads no elements."""
    parts = held_by(module).get("_modules") or {}
    return type(module).__module__.startswith("torch.") and all(
        part is None or _is_torchs(part) for part in list(parts.values())
    )


# ---------------------------------------------------------------- docstrings


def _own_doc(found: Any) -> Any:
    kind = type(found)
    if issubclass(kind, type):
        return _doc_of(found)
    if kind in _DOCUMENTED:
        return found.__doc__
    return held_by(found).get("__doc__")


def _doc_of(kind: type) -> str | None:
    docs = (_text(vars_of(each).get("__doc__")) for each in classes_of(kind) if each is not object)
    return next(filter(None, docs), None)


def _text(doc: Any) -> str | None:
    return inspect.cleandoc(doc) if type(doc) is str else None


def _subclasses_of(kind: type) -> str:
    subclasses: list[type] = type.__subclasses__(kind)
    names = [name_of(each) for each in subclasses[:_MAX_SUBCLASSES]]
    return ", ".join([*names, "..."] if len(subclasses) > _MAX_SUBCLASSES else names)


# ---------------------------------------------------------------- signatures


class _Shown(str):
    """A text that stands for a value in a signature; its repr is the text."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature_of(found: Any, name: str) -> str | None:
    """Return the signature of a callable."""
    asked: Any = found if type(found) in C_FUNCTIONS else called(found)
    own = held_by(asked).get("__signature__")
    if asked is None or (own is not None and type(own) is not inspect.Signature):
        return None
    try:
        signature = inspect.signature(asked, follow_wrapped=False)
    except (ValueError, TypeError):  # C code that says nothing of it
        return None
    parameters = [_shown(each) for each in signature.parameters.values()]
    if parameters and parameters[0].name in ("self", "cls", "_cls"):
        del parameters[0]
    returned = _annotation(signature.return_annotation)
    return _render_signature(inspect.Signature(parameters, return_annotation=returned), name)


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a signature's parameter with texts in place of its default and annotation, so that
    showing it runs no user code.
    """
    default = parameter.default
    if default is not inspect.Parameter.empty:
        default = _Shown(quiet_text(default))
    return parameter.replace(default=default, annotation=_annotation(parameter.annotation))


def _annotation(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    if issubclass(type(annotation), type):
        return _Shown(full_name_of(annotation))
    if _is_quiet(annotation):
        return _Shown(inspect.formatannotation(annotation))
    return _Shown(quiet_text(annotation))


def _is_quiet(annotation: Any) -> bool:
    """Return whether an annotation's repr runs no user code; `Annotated` may contain any object."""
    kind = type(annotation)
    module = full_name_of(kind).rpartition(".")[0].partition(".")[0]  # "" of the builtins
    if issubclass(kind, type):
        return module in _MODULES_OF_METACLASSES
    if kind is list:
        return all(map(_is_quiet, annotation))
    if module in ("types", "typing") or kind is _CALLABLE:
        return all(map(_is_quiet, typing.get_args(annotation)))
    return kind in _LITERALS


# ---------------------------------------------------------------- sources


def _file_of(found: Any, function: types.FunctionType | None) -> str:
    if function is not None:
        return function.__code__.co_filename
    if issubclass(type(found), types.ModuleType):
        file = held_by(found).get("__file__")
        return file if type(file) is str else ""
    kind = found if issubclass(type(found), type) else type(found)
    return next(iter(_places_of(kind)), "")


def _source_of(found: Any, function: types.FunctionType | None) -> str | None:
    """Return the source of a function, a class, or an instance's class."""
    if function is None:
        return _source_of_class(found if issubclass(type(found), type) else type(found))
    linecache.checkcache(function.__code__.co_filename)
    try:
        return inspect.getsource(function.__code__).rstrip()
    except (OSError, TypeError):
        return None


def _places_of(kind: type) -> dict[str, list[int]]:
    """Return the files in which a class may be defined, and numbers of its lines in each."""
    module = vars_of(kind).get("__module__")
    places: dict[str, list[int]] = {}
    if type(module) is not str:
        return places
    for function in list(vars_of(kind).values()):
        if (
            type(function) is types.FunctionType
            and function.__globals__.get("__name__") == module  # none that a decorator put there
        ):
            code = function.__code__
            places.setdefault(code.co_filename, []).append(code.co_firstlineno)
    places.pop("<string>", None)  # of a dataclass
    file = held_by(sys.modules.get(module)).get("__file__")
    if not places and type(file) is str and file.endswith(".py"):
        places[file] = []
    return places


def _source_of_class(kind: type) -> str | None:
    """Return a class's source, also if the class was made in a cell or its metaclass would run
    code.
    """
    for file, lines in _places_of(kind).items():
        text = linecache.getlines(file)
        try:
            tree = ast.parse("".join(text))
        except SyntaxError:
            continue
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
            end = node.end_lineno or 0
            is_there = not lines or any(node.lineno <= line <= end for line in lines)
            if node.name == name_of(kind) and is_there:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(text[first - 1 : end]).rstrip("\n")
    return None
