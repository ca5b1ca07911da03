"""Odd values, looked at as a rank does: each is told, drawn or refused, and costs no other its
place.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cellmesh.wire.inspect import Overview
from tests.support.inspected_ranks import ask


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
