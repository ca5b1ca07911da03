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
from cellmesh.wire.inspect import Element, Overview, Picture, Refusal
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
    place: dict[str, Any] = {
        "index": (0,) * (num_dims - 2), "dims": (max(num_dims - 2, -1), num_dims - 1),
        "rows": (0, shape[0]), "cols": (0, shape[1]),
    }  # fmt: skip
    for side, reduction in itertools.product((1, 9), ("mean", "absmax")):
        subject = Picture("x", **place, height=side, width=side, reduction=reduction)
        drawn = ask(value, subject)
        assert not isinstance(drawn, Refusal), (subject, drawn)
    assert isinstance(ask(value, Element("x", index=(0,) * num_dims)), str)


def test_dense_values_with_numbers_are_drawable() -> None:
    drawable = {name for name, make in MORE.items() if is_drawable(facts_of(make()))}
    drawable |= {name for name, odd in ODD.items() if is_drawable(facts_of(odd[0]()))}
    assert drawable == {
        "infinite", "quantised", "per channel", "complex", "conjugate", "bool", "float8",
        "negated", "expanded", "refusing",
    }  # fmt: skip


def test_channels_have_their_own_scales_in_a_picture() -> None:
    value = per_channel()
    plain = value.dequantize()
    for dims, wanted in (((0, 1), plain), ((1, 0), plain.t())):
        whole = Picture("x", dims=dims, rows=(0, 2), cols=(0, 2), height=9, width=9)
        assert ask(value, whole).values.tolist() == wanted.tolist()


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
        facts_of([np.arange(3.0)[::-1], torch.ones(2).as_subclass(Raising)])
