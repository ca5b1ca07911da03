"""Completes code at a cursor from a rank's namespace.

IPython's completer is not used for it: jedi takes a second to import and, like `dir`, runs
properties, ``__getattr__`` and ``__dir__`` of objects that the main thread may be working on.
"""

from __future__ import annotations

import builtins
import keyword
import pkgutil
from collections.abc import Container, Iterable, Mapping
from typing import Any

from ...wire.completion import Complete, Completions
from ..inspect.names import users_names
from ..inspect.static_eval import Unknown
from ..rank.shell import RankShell
from ..static_lookup import held_by
from .cell_names import names_in
from .cursor import Spot, find_spot
from .inference import InferredValue, Known, Lookup, loaded, resolve
from .members import keys, kind_of, members, parameters

_MAX_TEXTS = 5000
_MAX_KEY = 200


def complete(shell: RankShell, subject: Complete) -> Completions:
    """Return what could stand at the cursor; runs no user code."""
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
    """Return all candidates at a spot, and whether nothing else can stand there."""
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
