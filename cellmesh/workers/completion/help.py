"""The help for a name, by a rank's own namespace."""

from __future__ import annotations

import ast
import copy
import linecache
import math
import os
import types
from collections.abc import Mapping
from typing import Any

from IPython.core.oinspect import OInfo, find_file
from IPython.utils.path import compress_user
from torch import nn

from ...wire.completion import Explain
from ..inspect.safe_repr import quiet_text
from ..inspect.static_eval import Unknown, in_classes
from ..rank.shell import RankShell
from ..static_lookup import held_by, vars_of
from .inference import InstanceOf, attribute, find_name, is_property, resolve
from .instances import facts_of, is_pythons


def explain(shell: RankShell, subject: Explain) -> str:
    """The help for a name, as ``name?`` and ``name??`` show it; "" if there is none here."""
    try:
        found = _find(subject.name, shell.user_ns)
    except Unknown:
        return ""
    info = OInfo(
        ismagic=False, isalias=False, found=True, namespace="ranks", parent=None, obj=found
    )
    inspector = _quiet(shell.inspector, _text_of(found))
    source = _source_of_class(found) if subject.detail else ""
    if is_pythons(found):
        bundle = inspector._get_info(found, subject.name, info=info, detail_level=subject.detail)
        text = _name_cell(str(bundle["text/plain"]), found, shell)
    else:
        facts = facts_of(found, subject.name, _text_of(found), bool(subject.detail))
        fields = inspector._make_info_unformatted(None, facts, None, subject.detail, ())
        text = str(inspector.format_mime(fields)["text/plain"])
    return f"{text.rstrip()}\nSource:\n{source}\n" if source else text


def _quiet(inspector: Any, text: str) -> Any:
    """An inspector that tells this text of its object, and does not ask it for one.

    A tensor's text reads its elements, which may be freed meanwhile; others' is code of the user's.
    """
    quiet = copy.copy(inspector)
    quiet.str_detail_level = math.inf
    tell = quiet.info
    quiet.info = lambda *args, **fields: {**tell(*args, **fields), "string_form": text}
    return quiet


def _text_of(found: Any) -> str:
    return (
        str(found)
        if issubclass(type(found), nn.Module) and _is_torchs(found)
        else quiet_text(found)
    )


def _is_torchs(module: Any) -> bool:
    """Whether a module, and all in it, are of torch's classes: their texts are, too, and read no
    elements.
    """
    parts = held_by(module).get("_modules") or {}
    return type(module).__module__.startswith("torch.") and all(
        part is None or _is_torchs(part) for part in list(parts.values())
    )


def _name_cell(text: str, found: Any, shell: RankShell) -> str:
    """What was typed into a cell has no file that one could open."""
    file = find_file(found) or ""
    cell = shell.cell_of(file) or shell.cell_of(os.path.basename(file))
    return text.replace(compress_user(file), f"In[{cell}]") if cell else text


def _find(name: str, namespace: Mapping[str, Any]) -> Any:
    """What there is to explain: a property itself, as code would have to tell what it gives."""
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


def _source_of_class(found: Any) -> str:
    """The source of a class made in a cell, or of an instance's, which `inspect` does not find."""
    kind = found if issubclass(type(found), type) else type(found)
    if kind.__module__ != "__main__":
        return ""
    functions = [item for item in vars_of(kind).values() if type(item) is types.FunctionType]
    for function in functions:
        lines = linecache.getlines(function.__code__.co_filename)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
            is_it = node.name == kind.__name__
            if is_it and node.lineno <= function.__code__.co_firstlineno <= (node.end_lineno or 0):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).rstrip("\n")
    return ""
