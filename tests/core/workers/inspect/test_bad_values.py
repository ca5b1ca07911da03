"""Odd values, looked at as a rank does: each is told, drawn or refused, and costs no other its
place.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cellmesh.magics.widgets.inspector.view_model import is_drawable
from cellmesh.wire.inspect import Element, Histogram, Overview, Picture, Refusal
from tests.support.inspected_ranks import ask

from .test_chunks import ODD, per_channel


def facts_of(value: Any) -> Any:
    return ask(value, Overview("x")).items[0]


class Raising(torch.Tensor):
    """A subclass of which nothing can be asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"no {func}")


def of_odd_type(name: str) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(4, 3, dtype=torch.uint8).view(getattr(torch, name))


MORE = {name: of_odd_type(name) for name in ("int4", "uint1", "bits8", "float4_e2m1fn_x2")}
MORE["infinite"] = lambda: torch.full((4, 3), math.inf)


@pytest.mark.parametrize(
    "make", [*(odd[0] for odd in ODD.values()), *MORE.values()], ids=[*ODD, *MORE]
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_values_marked_drawable_can_be_drawn(make: Callable[[], Any]) -> None:
    value = make()
    facts = facts_of(value)
    if not is_drawable(facts):
        return
    num_dims, shape = len(facts.local_shape), (1, *facts.local_shape)[-2:]
    dims, rows, cols = (max(num_dims - 2, -1), num_dims - 1), (0, shape[0]), (0, shape[1])
    for side, reduction in itertools.product((1, 9), ("mean", "absmax", "stride")):
        subject = Picture("x", "", (), dims, rows, cols, side, side, reduction)  # type: ignore[arg-type]
        drawn = ask(value, subject)
        assert not isinstance(drawn, Refusal), (subject, drawn)
    assert isinstance(ask(value, Element("x", "", (0,) * num_dims)), str)


def test_values_without_numbers_are_not_drawable_and_values_without_finite_numbers_are() -> None:
    for name, make in MORE.items():
        assert is_drawable(facts_of(make())) == (name == "infinite")


def test_channels_have_their_own_scales_in_a_picture() -> None:
    value = per_channel()
    plain = value.dequantize()
    for dims, wanted in (((0, 1), plain), ((1, 0), plain.t())):
        pixels = ask(value, Picture("x", "", (), dims, (0, 2), (0, 2), 9, 9, "mean"))
        assert pixels.values.tolist() == wanted.tolist()
        pixels = ask(value, Picture("x", "", (), dims, (0, 2), (0, 2), 1, 1, "absmax"))
        assert pixels.values.tolist() == [[plain.abs().max().item()]]


def test_the_widest_range_has_a_histogram() -> None:
    value = torch.tensor([1.7e308, -1.7e308, 1.7e308, 0.0], dtype=torch.float64)
    assert ask(value, Histogram("x", "", -1.7e308, 1.7e308, 4)) == (1, 0, 1, 2)


def test_masked_elements_are_nan() -> None:
    floats = facts_of(np.ma.masked_array([1.0, 2.0, 5.0], mask=[0, 0, 1], dtype=np.float32))
    assert (floats.dtype, floats.shape, floats.max, floats.num_nan) == ("float32", (3,), 2.0, 1)
    whole = facts_of(np.ma.masked_array([[1, 2], [3, 4]], mask=[[0, 1], [0, 0]]))
    assert (whole.shape, whole.max, whole.num_nan) == ((2, 2), 4.0, 1)
    assert facts_of(np.ma.masked_array(["a", "b"], mask=[0, 1])).shape is None


def test_tensor_whose_class_raises_is_described_by_its_storage() -> None:
    found = ask(
        [torch.ones(2), torch.full((3,), 2.0).as_subclass(Raising), torch.zeros(1)], Overview("x")
    )
    assert [item.max for item in found.items] == [1.0, 2.0, 0.0]


def test_half_of_a_character_is_not_sent() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            return "\ud800"

    def fail() -> None:
        raise OddError

    assert ask(["\ud800<b>"], Overview("x")).text == "['\\ud800<b>']"
    assert ask(fail, Overview("x()", runs=True)).text == "?"


def test_inspection_of_bad_values_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        facts_of([np.ma.masked_array([1.0], mask=[1]), torch.ones(2).as_subclass(Raising)])
