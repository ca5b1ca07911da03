"""Reads objects, classes, exceptions and frames without running their own code, which may raise,
or end the process.
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

_DICTS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def held_by(value: Any) -> dict[str, Any]:
    """An object's own ``__dict__``, whatever its class says of it.

    Python's own descriptor gives it, not a property ``__dict__`` of the user's, nor
    ``__getattr__``, which recurses where ``__init__`` has not got far enough.
    """
    for kind in classes_of(type(value)):
        if type(descriptor := vars_of(kind).get("__dict__")) in _DICTS:
            held = descriptor.__get__(value)  # type: ignore[union-attr]
            return held if type(held) is dict else {}
    return {}


def classes_of(kind: type) -> tuple[type, ...]:
    """A class and its bases, in the order in which they are asked."""
    return type.__dict__["__mro__"].__get__(kind)  # type: ignore[no-any-return]


def vars_of(kind: type) -> Mapping[str, Any]:
    """A class's own attributes."""
    return type.__dict__["__dict__"].__get__(kind)  # type: ignore[no-any-return]


def has(kind: type, name: str) -> bool:
    """Whether a class has something under a name, itself or from a base."""
    return any(name in vars_of(each) for each in classes_of(kind))


def module_of(frame: types.FrameType | None) -> str:
    """The module name in a frame's globals, "" if none; globals may be a mapping of the user's."""
    name = None if frame is None else dict.get(frame.f_globals, "__name__")
    return name if type(name) is str else ""


MAX_TEXT = 10_000


def _slot(owner: type, name: str) -> Any:
    """Read an attribute by Python's own descriptor, whatever a subclass puts in its place."""
    return owner.__dict__[name].__get__


_name, _cause, _context, _args, _traceback = (
    _slot(type, "__name__"),
    *(_slot(BaseException, name) for name in ("__cause__", "__context__", "args", "__traceback__")),
)


def name_of(error: BaseException) -> str:
    """The name of an exception's class."""
    return str(_name(type(error)))[:200]


def text_of(error: BaseException) -> str:
    """What an exception's own ``str`` gives, cut; in angle brackets why there is none."""
    try:
        text = str.__str__(str(error))  # a subclass of str would not be encoded
    except BaseException as why:  # SystemExit would end the rank
        return f"<its str() raised {name_of(why)}>"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


def args_of(error: BaseException) -> tuple[Any, ...]:
    """What an exception was made with."""
    return tuple(_args(error))


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """Where an exception was raised."""
    found: types.TracebackType | None = _traceback(error)
    return found


def handled_by(error: BaseException) -> BaseException | None:
    """What was being handled when an exception was raised."""
    found: BaseException | None = _context(error)
    return found


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, its cause or what it struck the handling of, and so on; each once."""
    seen: set[int] = set()  # user code can make a circle of causes
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        cause = _cause(each)
        each = _context(each) if cause is None else cause


def plain_traceback(error: BaseException, tb: types.TracebackType | None) -> str:
    """A traceback without its causes, of an exception that nothing else can render."""
    frames = "".join(traceback.format_tb(tb, limit=-20))
    return f"Traceback (most recent call last):\n{frames}{name_of(error)}: {text_of(error)}"
