"""Classes that are pickled by value: those of the notebook and of ranks' cells.

cloudpickle gives such a class a random number where it is first pickled, so that the same cell on
two ranks makes two classes: equal dataclasses of two ranks would differ in the notebook. Here the
number follows from the class's definition. A class that is defined again with other contents is
another class.
"""

from __future__ import annotations

import enum
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from cloudpickle import cloudpickle

# What Python adds to a class by itself, and what says only where it stands.
_LEFT_OUT = {
    "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__annotate_func__",
    "__annotations_cache__", "__slotnames__", "_abc_impl", "__abstractmethods__",
    "_member_map_", "_value2member_map_", "_member_names_", "_hashable_values_",
    "_unhashable_values_", "_unhashable_values_map_",
}  # fmt: skip
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_MAX_PARTS = 100_000


class LoadedClasses:
    """Reports the classes of ``__main__`` that this process loads."""

    listener: Callable[[type], object] | None = None

    def note(self, loaded: type) -> None:
        """Report a class that has been loaded."""
        if self.listener is not None and loaded.__module__ == "__main__":
            self.listener(loaded)


loaded = LoadedClasses()


def identify(kind: type) -> None:
    """Give a class that will be pickled by value the number of its definition, unless it has one.

    A class with contents that cannot be compared keeps a random number.
    """
    by_class = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
    if kind.__module__ != "__main__" or kind in by_class:
        return
    try:
        number = digest(kind)
    except Exception:  # of the user's own code, or there is too much of it
        return
    with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        by_class[kind] = number
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[number] = kind


def keep_qualname(kind: type, reduced: Any) -> bool:
    """Add a class's qualified name to how cloudpickle reduces it, which leaves that out; return
    whether it reduces the class by value at all.
    """
    if type(reduced) is not tuple or len(reduced) != 6:
        return False
    if reduced[0] is cloudpickle._make_skeleton_class:
        reduced[1][3]["__qualname__"] = kind.__qualname__
    return True


def reduce(kind: type, reduced: Any) -> Any:
    """Return how pickle is to reduce a class, given how cloudpickle does."""
    if not keep_qualname(kind, reduced):
        return reduced
    outer: Any = None
    names = kind.__qualname__.split(".")
    if len(names) > 1 and "<locals>" not in names:  # found in the class around it
        outer = _main().get(names[0])
    return *reduced[:2], (reduced[2], outer), None, None, fill


def fill(kind: type, state: tuple[Any, Any]) -> None:
    """Fill a class that has been created for a pickle, or that is there already.

    Functions of a class that this process has defined itself stay, where they are equal: they share
    the globals of its other code.
    """
    (attributes, slots), _ = state
    own = _main()
    kept = {
        name for name, value in attributes.items() if _is_same(vars(kind).get(name), value, own)
    }
    changed = {name: value for name, value in attributes.items() if name not in kept}
    cloudpickle._class_setstate(kind, (changed, slots))
    loaded.note(kind)


def _main() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _is_same(current: Any, given: Any, own: dict[str, Any]) -> bool:
    if type(current) is not type(given):
        return False
    if isinstance(current, types.FunctionType):
        return current.__globals__ is own and current.__code__ == given.__code__
    if isinstance(current, classmethod | staticmethod):
        return _is_same(current.__func__, given.__func__, own)
    return False


def digest(kind: type) -> str:
    """Return a number that classes of equal definitions have in all processes.

    The definition: name, bases, attributes, the code of methods, their defaults and closures; not
    the globals that methods use, nor where the class stands.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for part in _Parts().of(kind):
        hashed.update(part.encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.hexdigest()


class _Parts:
    """The parts of a class's definition, as texts."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used again
        self._num_parts = 0

    def of(self, value: Any) -> Iterator[str]:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ValueError("too many parts")
        kind = type(value)
        yield kind.__qualname__
        if kind in _PLAIN:
            yield repr(value)
            return
        if id(value) in self._seen:
            yield str(self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        yield from self._contents(value, kind)

    def _contents(self, value: Any, kind: type) -> Iterator[str]:
        if kind in (tuple, list):
            yield str(len(value))
            for each in value:
                yield from self.of(each)
        elif kind is dict:
            for key, each in value.items():
                yield from self.of(key)
                yield from self.of(each)
            yield "}"
        elif kind in (set, frozenset):
            yield from sorted("\0".join(_Parts().of(each)) for each in value)
        elif kind is types.CodeType:
            yield from self._code(value)
        elif isinstance(value, types.FunctionType | type):
            if cloudpickle._should_pickle_by_reference(value):
                yield f"{value.__module__}.{value.__qualname__}"
            elif isinstance(value, type):
                yield from self._class(value)
            else:
                yield from self._function(value)
        elif isinstance(value, classmethod | staticmethod):
            yield from self.of(value.__func__)
        elif kind is property:
            yield from self.of((value.fget, value.fset, value.fdel))
        elif kind in (types.MemberDescriptorType, types.GetSetDescriptorType, types.ModuleType):
            yield value.__name__
        elif kind is types.MappingProxyType:
            yield from self.of(dict(value))
        elif kind is types.CellType:
            yield from self.of(cloudpickle._get_cell_contents(value))
        else:
            yield from self._object(value)

    def _class(self, kind: type) -> Iterator[str]:
        yield kind.__qualname__
        yield from self.of((type(kind), *cloudpickle._get_bases(kind)))
        for name, each in sorted(vars(kind).items()):
            if name not in _LEFT_OUT:
                yield name
                yield from self.of(each)
        if issubclass(kind, enum.Enum):
            yield from self.of([(each.name, each.value) for each in kind])

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield from self._code(function.__code__)
        yield from self.of(
            (function.__defaults__, function.__kwdefaults__, function.__closure__, vars(function))
        )

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_qualname
        yield str((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
        yield str((code.co_names, code.co_varnames, code.co_freevars, code.co_flags))
        yield code.co_code.hex()
        yield from self.of(code.co_consts)

    def _object(self, value: Any) -> Iterator[str]:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):  # by name, as a function with a cache
            yield reduced
            yield from self.of(dict(getattr(value, "__dict__", {})))
            return
        for part in reduced:
            is_iterator = part is not None and hasattr(part, "__next__")
            yield from self.of(list(part) if is_iterator else part)
