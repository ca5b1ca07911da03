"""Functions that came by value find the rank's names, wherever they are in a value."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from cellmesh.workers.rank.value_transfer import bind_missing_names

NAMESPACE = {"rank": 3, "len": "not this one", "math": "nor this one"}


def travel(value: Any) -> Any:
    """As it arrives on a rank."""
    return pickle.loads(cloudpickle.dumps(value))


def helper() -> Any:
    return rank  # type: ignore[name-defined]  # noqa: F821


def local_functions() -> dict[str, Callable[[], Any]]:
    def inner() -> Any:
        return rank  # type: ignore[name-defined]  # noqa: F821

    class Counter:
        def count(self) -> Any:
            return rank  # type: ignore[name-defined]  # noqa: F821

    return {
        "itself": inner,
        "in a closure": lambda: inner(),
        "a nested one": lambda: (lambda: rank)(),  # type: ignore[name-defined]  # noqa: F821
        "a partial": functools.partial(inner),
        "a method": Counter().count,
        "a method made there": lambda: Counter().count(),
    }


@pytest.mark.parametrize("name", local_functions())
def test_name_that_was_not_sent_is_the_ranks(name: str) -> None:
    function = travel(local_functions()[name])
    bind_missing_names([(function, {"key": 1})], NAMESPACE)
    assert function() == 3


def test_sent_names_and_builtins_keep_their_values() -> None:
    function = travel(lambda: (math.pi, len("ab")))
    bind_missing_names(function, NAMESPACE)
    assert function() == (math.pi, 2)


def test_importable_functions_are_left_alone() -> None:
    bind_missing_names([helper, pytest.raises, math.sqrt], NAMESPACE)
    assert "rank" not in helper.__globals__


def test_value_that_contains_itself_is_handled_once() -> None:
    value: list[Any] = [travel(lambda: rank)]  # type: ignore[name-defined]  # noqa: F821
    value.append(value)
    bind_missing_names(value, NAMESPACE)
    assert value[0]() == 3
