"""Which definitions make one class, and which make two."""

from __future__ import annotations

import copy
import linecache
from typing import Any

import pytest

from cellmesh.wire import payload

IMPORTS = """
import abc, dataclasses, enum, functools, typing
from dataclasses import dataclass, field
"""
DEFINITIONS = {
    "dataclass": "@dataclass\nclass C:\n    x: int = 1\n    y: list = field(default_factory=list)",
    "frozen dataclass": "@dataclass(frozen=True, slots=True)\nclass C:\n    x: int",
    "enum": "class C(enum.Enum):\n    A = 1\n    B = 'two'",
    "flags": "class C(enum.IntFlag):\n    A = 1\n    B = 2",
    "plain": "class C:\n    limit = 3\n    def f(self, n=2): return n * self.limit",
    "named tuple": "class C(typing.NamedTuple):\n    a: int\n    b: str = 'x'",
    "nested": "class C:\n    class D:\n        def f(self): return 1",
    "exception": "class C(ValueError):\n    def __init__(self, n): super().__init__(n)",
    "globals": "def helper(): return rank\nclass C:\n    def f(self): return helper() + rank",
    "abstract": "class C(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...",
    "generic": "T = typing.TypeVar('T')\nclass C(typing.Generic[T]):\n    x: T",
    "cached": "class C:\n    @functools.lru_cache\n    def f(self): return 1",
    "descriptors": "class C:\n    __slots__ = ('a', 'b')\n"
    "    @property\n    def f(self): return 1\n"
    "    @classmethod\n    def g(cls): return cls\n    @staticmethod\n    def h(): return {1, 2}",
    "base": "class B:\n    y = 1\nclass C(B):\n    x = {'a', 'b', 'c'}",
    "closure": "def make(n):\n    class C:\n        def f(self): return n\n    return C\n"
    "C = make(3)",
    "itself": "class C:\n    pass\nC.default = C()\nC.others = [C]",
    "metaclass": "class M(type):\n    def f(cls): return 1\nclass C(metaclass=M): pass",
    "protocol": "class C(typing.Protocol):\n    def f(self) -> int: ...",
    "typed dict": "class C(typing.TypedDict):\n    a: int",
}
CHANGES = {
    "dataclass": ("x: int = 1", "x: int = 2"),
    "frozen dataclass": ("x: int", "x: float"),
    "enum": ("'two'", "'three'"),
    "flags": ("B = 2", "B = 4"),
    "plain": ("n * self", "n + self"),
    "named tuple": ("'x'", "'y'"),
    "nested": ("return 1", "return 2"),
    "exception": ("ValueError", "KeyError"),
    "abstract": ("@abc.abstractmethod", ""),
    "generic": ("x: T", "y: T"),
    "cached": ("return 1", "return 2"),
    "descriptors": ("{1, 2}", "{1, 3}"),
    "base": ("y = 1", "y = 2"),
    "closure": ("make(3)", "make(4)"),
    "metaclass": ("return 1", "return 2"),
    "typed dict": ("a: int", "a: str"),
}


def define(source: str, rank: int = 0) -> type:
    namespace: dict[str, Any] = {"__name__": "__main__", "rank": rank}
    name = f"<cell {rank}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(f"{IMPORTS}{rank * chr(10)}{source}", name, "exec"), namespace)
    kind = namespace["C"]
    assert isinstance(kind, type)
    return kind


@pytest.mark.parametrize("name", DEFINITIONS)
def test_ranks_that_run_one_definition_have_one_class(name: str) -> None:
    first, second = (define(DEFINITIONS[name], rank) for rank in (0, 1))
    assert first is not second
    assert payload.digest(first) == payload.digest(second)


@pytest.mark.parametrize("name", CHANGES)
def test_another_definition_is_another_class(name: str) -> None:
    source, (old, new) = DEFINITIONS[name], CHANGES[name]
    assert old in source
    assert payload.digest(define(source)) != payload.digest(define(source.replace(old, new)))


def test_attributes_that_differ_by_rank_make_two_classes() -> None:
    source = "class C:\n    rank = rank"
    assert payload.digest(define(source, 0)) != payload.digest(define(source, 1))


def test_a_class_stays_the_same_when_an_instance_has_been_pickled() -> None:
    kind = define(DEFINITIONS["dataclass"])
    before = payload.digest(kind)
    copy.copy(kind())
    assert "__slotnames__" in vars(kind)
    assert payload.digest(kind) == before
