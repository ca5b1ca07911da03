"""Reads attributes of objects, classes, exceptions and frames without running their own code, which
may raise, or end the process.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

_DICTS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def held_by(value: Any) -> dict[str, Any]:
    """Return an object's own ``__dict__``, whatever its class defines.

    It is read by Python's own descriptor, not by a user's property ``__dict__`` or ``__getattr__``,
    which may recurse in objects whose ``__init__`` has not completed.
    """
    for kind in classes_of(type(value)):
        if type(descriptor := vars_of(kind).get("__dict__")) in _DICTS:
            held = descriptor.__get__(value)  # type: ignore[union-attr]
            return held if type(held) is dict else {}
    return {}


def classes_of(kind: type) -> tuple[type, ...]:
    """Return a class and its bases, in the order of attribute lookup."""
    return type.__dict__["__mro__"].__get__(kind)  # type: ignore[no-any-return]


def vars_of(kind: type) -> Mapping[str, Any]:
    """Return the attributes that a class itself defines, without its bases'."""
    return type.__dict__["__dict__"].__get__(kind)  # type: ignore[no-any-return]


def has(kind: type, name: str) -> bool:
    """Return whether a class or one of its bases defines an attribute."""
    return any(name in vars_of(each) for each in classes_of(kind))


def module_of(frame: types.FrameType | None) -> str:
    """Return the module name in a frame's globals, "" if it has none; a dict subclass's methods are
    not run.
    """
    name = None if frame is None else dict.get(frame.f_globals, "__name__")
    return name if type(name) is str else ""


MAX_TEXT = 10_000


def _slot(owner: type, name: str) -> Any:
    """Return a function that reads an attribute as Python's own class defines it, even if a
    subclass overrides it.
    """
    return owner.__dict__[name].__get__


_name, _cause, _context, _args, _traceback = (
    _slot(type, "__name__"),
    *(_slot(BaseException, name) for name in ("__cause__", "__context__", "args", "__traceback__")),
)


def name_of(error: BaseException) -> str:
    """Return the name of an exception's class."""
    return str(_name(type(error)))[:200]


def text_of(error: BaseException) -> str:
    """Return an exception's ``str``, truncated; if that raises, a text in angle brackets."""
    try:
        text = str.__str__(str(error))  # a subclass of str could not be encoded
    except BaseException as why:  # a SystemExit would end the rank
        return f"<its str() raised {name_of(why)}>"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def args_of(error: BaseException) -> tuple[Any, ...]:
    """Return the arguments with which an exception was made."""
    return tuple(_args(error))


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of an exception."""
    found: types.TracebackType | None = _traceback(error)
    return found


def handled_by(error: BaseException) -> BaseException | None:
    """Return the exception that was being handled when this one was raised (its `__context__`), or
    None.
    """
    found: BaseException | None = _context(error)
    return found


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then its cause or context, then the cause or context of that, and so on;
    each once.
    """
    seen: set[int] = set()  # user code can make causes circular
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        cause = _cause(each)
        each = _context(each) if cause is None else cause


def plain_traceback(error: BaseException, tb: types.TracebackType | None) -> str:
    """Return a traceback without causes, for an exception that IPython and Python cannot render, or
    take too long to render.
    """
    frames = "".join(traceback.format_tb(tb, limit=-20))
    notes = held_by(error).get("__notes__")  # may include advice of cellmesh
    lines = [note for note in notes if type(note) is str] if type(notes) is list else []
    said = "\n".join((f"{name_of(error)}: {text_of(error)}", *lines))
    return f"Traceback (most recent call last):\n{frames}{said}"
