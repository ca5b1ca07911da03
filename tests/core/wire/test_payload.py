"""Values as pickles: what travels, in what memory it lands, and what is said of what cannot
travel.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import MeshUsageError, UnpicklableError
from cellmesh.wire import payload
from cellmesh.wire.payload import OUT_OF_BAND_BYTES


def travel(value: Any) -> Any:
    """What arrives of a value: its buffers land in memory of their own, as they do from a
    socket.
    """
    pickled, buffers = payload.dumps(value, "value")
    assert pickled.num_buffers == len(buffers)
    return payload.loads(pickled, [bytearray(buffer) for buffer in buffers])


@pytest.fixture
def notebook() -> Iterator[types.ModuleType]:
    """A ``__main__`` as a notebook has it: cloudpickle takes what is defined there by value."""
    module = types.ModuleType("__main__")
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield module
    finally:
        sys.modules["__main__"] = before


def define(module: types.ModuleType, source: str, name: str) -> Any:
    exec(source, vars(module))
    return vars(module)[name]


# ---- what travels

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def test_a_class_with_a_cached_property_travels(notebook: types.ModuleType) -> None:
    source = """
import functools
class Model:
    @functools.cached_property
    def size(self):
        return 3
"""
    made = travel(define(notebook, source, "Model"))()
    assert (made.size, vars(made)) == (3, {"size": 3})


@given(PLAIN)
def test_plain_values_travel(value: Any) -> None:
    assert travel(value) == value


@pytest.mark.parametrize("nbytes", [0, OUT_OF_BAND_BYTES - 8, OUT_OF_BAND_BYTES])
def test_arrays_travel_and_can_be_written_to(nbytes: int) -> None:
    array = np.arange(nbytes // 8, dtype=np.float64)
    arrived = travel(array)
    np.testing.assert_array_equal(arrived, array)
    assert arrived.flags.writeable
    arrived += 1


def test_large_arrays_travel_out_of_band_without_a_copy() -> None:
    array = np.arange(OUT_OF_BAND_BYTES, dtype=np.uint8)
    pickled, buffers = payload.dumps({"a": array, "b": [array[::1], 3]}, "value")
    assert len(pickled.stream) < 2000
    assert sum(len(buffer) for buffer in buffers) >= array.nbytes
    assert np.shares_memory(np.frombuffer(buffers[0], np.uint8), array)


def test_what_torch_makes_travels() -> None:
    tensor, model = torch.zeros(3), torch.nn.Linear(3, 2)
    tied = travel({"weight": tensor, "tied": [tensor]})
    tied["weight"].fill_(5)
    assert tied["tied"][0].tolist() == [5, 5, 5]
    inputs = torch.ones(1, 3)
    assert torch.equal(travel(model)(inputs), model(inputs))


# Definitions in a notebook, a name among them, and an expression of what has arrived.
SOURCES = {
    "a function": ("factor = 3\ndef scale(x):\n    return factor * x", "scale", "it(14) == 42"),
    "a class and its instance": (
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "    def double(self): return 2 * self.x\npair = Point, Point(21)",
        "pair",
        "type(it[1]) is it[0] and it[1].double() == 42",
    ),
    "a dataclass and a subclass": (
        "from dataclasses import dataclass\n@dataclass\nclass Base:\n    x: int = 1\n"
        "@dataclass\nclass Derived(Base):\n    y: int = 2\nderived = Derived(y=5)",
        "derived",
        "(it.x, it.y, repr(it)) == (1, 5, 'Derived(x=1, y=5)')",
    ),
    "a lambda and a closure": (
        "def make(offset, total):\n    def add(x): return x + offset + sum(total)\n"
        "    return lambda x: add(x) * 2\ndouble = make(10, [1, 2])",
        "double",
        "it(1) == 28",
    ),
}


@pytest.mark.parametrize(("source", "name", "holds"), SOURCES.values(), ids=SOURCES)
def test_what_a_notebook_defines_travels_by_value(
    notebook: types.ModuleType, source: str, name: str, holds: str
) -> None:
    pickled, buffers = payload.dumps(define(notebook, source, name), "value")
    vars(notebook).clear()  # on the rank there is no such notebook
    assert eval(holds, {"it": payload.loads(pickled, buffers)})


# ---- the reducer


def test_the_reducer_may_refuse_with_a_hint() -> None:
    def refuse(value: Any) -> Any:
        if isinstance(value, Holder):
            raise UnpicklableError("a holder stays here: send what it holds")
        return NotImplemented

    with pytest.raises(UnpicklableError, match="'basket': a holder stays here: send what it holds"):
        payload.dumps({"deep": [Holder()]}, "basket", refuse)


# ---- what cannot travel


class Holder:
    """Something with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None: ...


class Refuses:
    """Something with its own opinion on pickling."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def lock_in_a_closure() -> Callable[[], Any]:
    lock = threading.Lock()
    return lambda: lock


def cycle_around_a_lock() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop.update(itself=loop, lock=threading.Lock())
    return loop


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (threading.Lock(), ""),
        ({"a": 1, "b": threading.Lock()}, "v['b']"),
        ([1, (2, threading.Lock())], "v[1][1]"),
        (Holder(model=Holder(lock=threading.Lock())), "v.model.lock"),
        (Holder(lock=threading.Lock()).method, "v.__self__.lock"),
        ({"f": lock_in_a_closure()}, "v['f'] -> closure variable lock"),
        ({frozenset(), Refuses()}, "v{...}"),
        (cycle_around_a_lock(), "v['lock']"),
        (eval("lambda: lock", {"lock": threading.Lock()}), "v -> global lock"),
    ],
    ids=["itself", "dict", "nested", "attributes", "method", "closure", "set", "cycle", "global"],
)
def test_the_part_that_cannot_travel_is_named(value: Any, where: str) -> None:
    with pytest.raises(UnpicklableError) as caught:
        payload.dumps(value, "v")
    message = str(caught.value)
    assert message.startswith("'v' cannot be pickled")
    if where:
        assert f": {where} is what cannot (a " in message
    assert "_thread.lock" in message or "RuntimeError: not me" in message
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value, MeshUsageError)


def test_value_nested_too_deeply_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(UnpicklableError, match="'nest' cannot be pickled: it nests too deeply"):
        payload.dumps(value, "nest")


def test_a_tensor_on_a_device_that_is_not_here_says_what_to_send() -> None:
    with pytest.raises(MeshUsageError, match=r"a tensor on cuda:77 was sent .*`x.cpu\(\)`"):
        payload.move_storage(torch.ones(3).untyped_storage(), None, "cuda:77")
