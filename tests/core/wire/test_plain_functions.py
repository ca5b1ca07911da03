"""Functions that need nothing but their code are packed once, and equal those that cloudpickle
sends.
"""

from __future__ import annotations

import linecache
import pickle
import traceback
import types
from collections.abc import Iterator
from typing import Any

import pytest

from cellmesh.controller.rank_set import pack_call
from cellmesh.wire import payload, plain_functions
from cellmesh.wire.plain_functions import pack, unpack

NAME = "<cell of plain functions>"
COMMON = "import math\nlimit = 3\nclass Kind: pass\n"


@pytest.fixture(autouse=True)
def _caches() -> Iterator[None]:
    def clear() -> None:
        plain_functions._packed.clear()
        plain_functions._load.cache_clear()
        linecache.cache.pop(NAME, None)

    clear()
    yield
    clear()


def define(source: str, **names: Any) -> Any:
    """Run a cell; return the `f` that it has defined."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    text = COMMON + source
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)
    exec(compile(text, NAME, "exec", dont_inherit=True), namespace)
    return namespace["f"]


def facts(function: types.FunctionType) -> dict[str, Any]:
    """All that can be seen of a function."""
    names = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__dict__")
    names += ("__defaults__", "__kwdefaults__", "__closure__", "__code__", "__type_params__")
    code = function.__code__
    return {
        **{name: getattr(function, name, None) for name in names},
        "lines": (code.co_filename, [*code.co_lines()], [*code.co_positions()]),
        "globals": function.__globals__,
    }


PLAIN = {
    "nothing": "def f(): pass",
    "texts": "def f(x):\n    'Its doc.'\n    return [x, 'text', 1.5, b'b', (1, 2), {3, 4}]",
    "builtins": "def f(x): return len(str(x)) + sum(range(3))",
    "names of ranks": "def f(): return rank + world_size",
    "a global of its own": "def f():\n    global count\n    count = 1\n    return count",
    "imports": "def f():\n    import json\n    from os import path\n    return json, path",
    "inner functions": "def f():\n    def g(x): return lambda y: x + y\n    return g(1)(2)",
    "a class inside": "def f():\n    class A:\n        def m(self): return __class__\n    return A",
    "annotations": "def f(x: int, y: 'Kind' = None) -> None: ...\nf.__defaults__ = None",
    "a lambda": "f = lambda x, *a, k, **kw: (x, a, k, kw)",
    "a generator": "def f():\n    yield 1",
    "a coroutine": "async def f(): return 1",
    "another name": "def f(): return 1\nf.__name__, f.__qualname__ = 'g', 'A.g'",
}


@pytest.mark.parametrize("source", PLAIN.values(), ids=PLAIN)
def test_a_plain_function_arrives_as_by_cloudpickle(source: str) -> None:
    function = define(source, __file__="/notebook.py", __package__=None)
    packed = pack(function)
    assert packed
    assert pack(function) is packed
    pickled, _ = payload.dumps(function, "f")
    linecache.cache.pop(NAME)
    first, second, expected = unpack(packed), unpack(bytes(packed)), payload.loads(pickled, ())
    assert facts(first) == facts(second) == facts(expected)
    assert first.__code__ is second.__code__
    for name in ("__globals__", "__annotations__", "__dict__"):
        assert getattr(first, name) is not getattr(second, name)


OTHER = {
    "a global of the notebook": "def f(): return limit",
    "a module of the notebook": "def f(): return math.pi",
    "one inside": "def f():\n    def g(): return limit\n    return g",
    "one that it sets": "def f():\n    global limit\n    limit = 4",
    "itself": "def f(n): return n and f(n - 1)",
    "a closure": "def make(n):\n    return lambda: n\nf = make(1)",
    "a default": "def f(x=1): return x",
    "a default of a keyword": "def f(*, x=1): return x",
    "an attribute": "def f(): return 1\nf.limit = 3",
    "a class among annotations": "def f(x: Kind): return x",
    "a doc of another kind": "def f(): return 1\nf.__doc__ = Kind",
    "another module": "def f(): return 1\nf.__module__ = 'math'",
    "a partial": "import functools\nf = functools.partial(max, 1)",
    "a class": "f = Kind",
    "a text of its own": f"def f(): return {'x' * (1 << 16)!r}",
}


@pytest.mark.parametrize("source", OTHER.values(), ids=OTHER)
def test_a_function_that_needs_more_is_not_packed(source: str) -> None:
    assert pack(define(source)) == b""


CHANGES = {
    "f.__doc__ = 'new'": True,
    "f.__qualname__ = 'new'": True,
    "f.__annotations__['x'] = float": True,
    "f.__annotations__['x'] = Kind": False,
    "f.__code__ = (lambda x: rank - x).__code__": True,
    "f.__code__ = (lambda x: limit - x).__code__": False,
    "f.__defaults__ = (1,)": False,
    "__file__ = '/moved.py'": True,
    "rank = 7": False,
    "def f(x: int): return rank - x": True,
}


@pytest.mark.parametrize(("change", "is_plain"), CHANGES.items())
def test_a_change_of_a_packed_function_is_noticed(change: str, is_plain: bool) -> None:
    function = define("def f(x: int):\n    'Its doc.'\n    return rank + x")
    packed, known = pack(function), function.__globals__
    exec(change, known)
    again = pack(known["f"])
    assert bool(again) is is_plain
    if is_plain:
        assert again != packed
        assert again == payload.dumps(known["f"], "f")[0].stream


def test_functions_that_share_their_code_keep_their_annotations() -> None:
    source = "def f(note):\n    def g(x: note): return x\n    return g"
    make = define(source)
    packed = [pack(make(note)) for note in ("one", "two", int, [1], None)]
    assert [unpack(each).__annotations__["x"] if each else "-" for each in packed] == [
        *("one", "two", int, "-", None)
    ]


def test_a_call_leaves_nothing_for_the_next() -> None:
    packed = pack(define("def f():\n    global count\n    count = 1"))
    first = unpack(packed)
    first()
    first.__globals__["rank"] = 3
    first.__annotations__["x"] = int
    assert unpack(packed).__globals__.keys() == {"__name__", "__builtins__"}
    assert not unpack(packed).__annotations__


def test_tracebacks_have_their_lines_also_when_they_were_dropped() -> None:
    packed = pack(define("def f():\n    return 1 / 0  # the line"))
    for _ in range(2):
        linecache.clearcache()
        with pytest.raises(ZeroDivisionError) as caught:
            unpack(packed)()
        assert "# the line" in "".join(traceback.format_exception(caught.value))


def test_a_cell_that_is_run_again_is_packed_with_its_new_source() -> None:
    function = define("def f(): return 1")
    packed = pack(function)
    define("def f(): return 1  # another text")
    assert b"# another text" in pack(function)
    assert b"# another text" not in packed


def test_both_sides_keep_a_bounded_number_of_functions() -> None:
    for number in range(3 * plain_functions._MAX_KEPT):
        assert unpack(pack(define(f"f = lambda: {number}")))() == number
    assert len(plain_functions._packed) <= plain_functions._MAX_KEPT
    assert plain_functions._load.cache_info().currsize <= plain_functions._MAX_KEPT


class Text(str):
    """A text whose class cloudpickle sends."""


@pytest.mark.parametrize(
    ("args", "kwargs", "is_packed"),
    [
        ((), {}, True),
        ((1, True, 2.5, "a", b"b", None), {"x": -1}, True),
        ((1 << 200, float("inf")), {}, True),
        (("x" * 5000,), {}, False),
        (([1],), {}, False),
        ((Text("a"),), {}, False),
        ((), {Text("a"): 1}, False),
        ((), {"x": lambda: 1}, False),
    ],
)
def test_calls_with_numbers_and_short_texts_skip_cloudpickle(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_packed: bool
) -> None:
    call = pack_call(define("def f(*args, **kwargs): pass"), args, kwargs)
    assert (call is not None) is is_packed
    if call is not None:
        assert pickle.loads(call.payload.stream) == (args, kwargs)
