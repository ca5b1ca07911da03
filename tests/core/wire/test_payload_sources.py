"""Code that is sent: source lines travel with it, and one definition makes one class."""

from __future__ import annotations

import copy
import linecache
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from cellmesh.wire import payload
from cellmesh.workers.rank import tracebacks

NAME = "<cell of a test>"
SOURCE = """def divide(x):
    # by nothing
    def inner():
        return x / 0
    return inner()

class Kind:
    def method(self):
        return divide(1)
"""


@pytest.fixture
def typed() -> Iterator[dict[str, Any]]:
    """What a cell has defined: cloudpickle takes it by value."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, NAME, "exec"), namespace)
    linecache.cache[NAME] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), NAME)
    yield namespace
    linecache.cache.pop(NAME, None)


def travel(value: Any) -> Any:
    """To a process that does not know the cell."""
    pickled, buffers = payload.dumps(value, "value")
    linecache.cache.pop(NAME, None)
    return payload.loads(pickled, buffers)


def test_tracebacks_have_their_lines_there(typed: dict[str, Any]) -> None:
    arrived = travel(typed["Kind"])
    with pytest.raises(ZeroDivisionError) as caught:
        arrived().method()
    text = "".join(traceback.format_exception(caught.value))
    assert all(line in text for line in ("return divide(1)", "return inner()", "return x / 0"))
    assert payload.cell_of(NAME) == 0


def test_code_keeps_its_file_name_whatever_cloudpickle_makes_of_it(
    typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]

    def hide(code: types.CodeType) -> Any:
        make, args = reduce(code)
        return make, tuple("<dynamic-code>" if each == NAME else each for each in args)

    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, types.CodeType, hide)
    arrived = travel(typed["divide"]).__code__
    inner = next(each for each in arrived.co_consts if isinstance(each, types.CodeType))
    assert arrived.co_filename == inner.co_filename == NAME
    assert arrived == typed["divide"].__code__


def test_each_text_travels_once(typed: dict[str, Any]) -> None:
    pickled, buffers = payload.dumps((typed["divide"], typed["Kind"], typed["Kind"]()), "value")
    assert pickled.stream.count(b"# by nothing") == 1
    known = linecache.cache[NAME]
    payload.loads(pickled, buffers)
    assert linecache.cache[NAME] is known


def test_the_cells_number_travels_on(
    typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import IPython

    shell = types.SimpleNamespace(compile=types.SimpleNamespace(_filename_map={NAME: 7}))
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    arrived = travel(typed["divide"])
    assert payload.cell_of(NAME) == 7
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    travel(arrived)
    assert payload.cell_of(NAME) == 7


def test_source_in_a_file_or_too_long_or_sent_does_not_travel(
    typed: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, str(path), "exec"), namespace)
    assert linecache.getline(str(path), 2).strip() == "# by nothing"
    assert b"# by nothing" not in payload.dumps(namespace["divide"], "value")[0].stream

    long = SOURCE + "#" * (1 << 20)
    linecache.cache[NAME] = (len(long), None, long.splitlines(keepends=True), NAME)
    assert b"# by nothing" not in payload.dumps(typed["divide"], "value")[0].stream


def test_a_rank_keeps_the_text_of_the_newest_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "_MAX_CELLS", 3)
    cells = tracebacks.RankCompiler()
    texts = [f"x = {n}" for n in range(10)]
    names = [cells.cache(text, number) for number, text in enumerate(texts)]
    names.append(cells.cache(texts[6], 6))  # run again
    kept = [number for number, name in enumerate(names[:-1]) if name in linecache.cache]
    assert kept == [6, 8, 9]
    assert cells._filename_map.keys() == {names[number] for number in kept}


IMPORTS = """
import abc, dataclasses, enum, functools, typing
from dataclasses import dataclass, field
"""
# A definition of C, and the change of its text that makes another class.
DEFINITIONS: dict[str, tuple[str, tuple[str, str] | None]] = {
    "dataclass": (
        "@dataclass\nclass C:\n    x: int = 1\n    y: list = field(default_factory=list)",
        ("x: int = 1", "x: int = 2"),
    ),
    "frozen dataclass": (
        "@dataclass(frozen=True, slots=True)\nclass C:\n    x: int",
        ("x: int", "x: float"),
    ),
    "enum": ("class C(enum.Enum):\n    A = 1\n    B = 'two'", ("'two'", "'three'")),
    "plain": (
        "class C:\n    limit = 3\n    def f(self, n=2): return n * self.limit",
        ("n * self", "n + self"),
    ),
    "nested": ("class C:\n    class D:\n        def f(self): return 1", ("return 1", "return 2")),
    "globals": (
        "def helper(): return rank\nclass C:\n    def f(self): return helper() + rank",
        None,
    ),
    "generic": ("T = typing.TypeVar('T')\nclass C(typing.Generic[T]):\n    x: T", ("x: T", "y: T")),
    "descriptors": (
        "class C:\n    __slots__ = ('a', 'b')\n    @property\n    def f(self): return 1\n"
        "    @classmethod\n    def g(cls): return cls\n"
        "    @staticmethod\n    def h(): return {1, 2}",
        ("{1, 2}", "{1, 3}"),
    ),
    "base": ("class B:\n    y = 1\nclass C(B):\n    x = {'a', 'b', 'c'}", ("y = 1", "y = 2")),
    "closure": (
        "def make(n):\n    class C:\n        def f(self): return n\n    return C\nC = make(3)",
        ("make(3)", "make(4)"),
    ),
    "itself": ("class C:\n    pass\nC.default = C()\nC.others = [C]", None),
    "metaclass": (
        "class M(type):\n    def f(cls): return 1\nclass C(metaclass=M): pass",
        ("return 1", "return 2"),
    ),
    "protocol": ("class C(typing.Protocol):\n    def f(self) -> int: ...", None),
}


def define_class(source: str, rank: int = 0) -> type:
    namespace: dict[str, Any] = {"__name__": "__main__", "rank": rank}
    name = f"<cell {rank}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(f"{IMPORTS}{rank * chr(10)}{source}", name, "exec"), namespace)
    kind = namespace["C"]
    assert isinstance(kind, type)
    return kind


@pytest.mark.parametrize(("source", "change"), DEFINITIONS.values(), ids=DEFINITIONS)
def test_ranks_that_run_one_definition_have_one_class(
    source: str, change: tuple[str, str] | None
) -> None:
    first, second = (define_class(source, rank) for rank in (0, 1))
    assert first is not second
    assert payload.digest(first) == payload.digest(second)
    if change is not None:
        assert change[0] in source
        assert payload.digest(define_class(source.replace(*change))) != payload.digest(first)


def test_attributes_that_differ_by_rank_make_two_classes() -> None:
    source = "class C:\n    rank = rank"
    assert payload.digest(define_class(source, 0)) != payload.digest(define_class(source, 1))


def test_a_class_stays_the_same_when_an_instance_has_been_pickled() -> None:
    kind = define_class(DEFINITIONS["dataclass"][0])
    before = payload.digest(kind)
    copy.copy(kind())
    assert "__slotnames__" in vars(kind)
    assert payload.digest(kind) == before
