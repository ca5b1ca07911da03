"""Names that a rank was given and that a cell binds to something else."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

from cellmesh.workers.rank.given_names import GivenNames
from cellmesh.workers.rank.value_transfer import bind_missing_names


@pytest.fixture
def namespace() -> dict[str, Any]:
    return {"rank": 300, "world_size": 2, "device": torch.device("cpu"), "mesh": None, "step": 1}


def test_another_value_is_said_once_with_the_line_that_undoes_it(namespace: dict[str, Any]) -> None:
    given = GivenNames(namespace, {})
    namespace.update(rank=1, step=2)
    text = given.say()
    assert "`rank = dist.get_rank()`" in text
    assert "step" not in text
    namespace["rank"] = 5
    assert not given.say()
    namespace["rank"] = 7
    given.renew(("rank",))
    assert not given.say()
    namespace["rank"] = 8
    assert given.say()


@pytest.mark.parametrize(
    "values", [{"rank": int("300")}, {"device": "cpu"}, {"device": torch.device("cpu", 0)}]
)
def test_an_equal_value_is_not_said(namespace: dict[str, Any], values: dict[str, Any]) -> None:
    namespace["device"] = torch.device("cpu", 0)
    given = GivenNames(namespace, {})
    namespace.update(values)
    assert not given.say()


class Hostile:
    """Raises at every question."""

    def __eq__(self, other: object) -> bool:
        raise SystemExit

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [Hostile(), "meta", True, 300.0])
@pytest.mark.parametrize("name", ["rank", "device"])
def test_another_kind_of_value_is_said_without_asking_it(
    namespace: dict[str, Any], name: str, value: object
) -> None:
    given = GivenNames(namespace, {})
    namespace[name] = value
    assert given.say().count("restores it") == 1


def test_names_that_are_pushed_or_deleted_are_not_said(namespace: dict[str, Any]) -> None:
    given = GivenNames(namespace, {})
    namespace["rank"] = 1
    given.forget(["rank", "x"])
    del namespace["device"]
    assert not given.say()


NAMESPACE = {"rank": 3, "len": "not this one", "math": "nor this one"}


def travel(value: Any) -> Any:
    """As it arrives on a rank."""
    return pickle.loads(cloudpickle.dumps(value))


def local_functions() -> dict[str, Callable[[], Any]]:
    def inner() -> Any:
        return rank  # type: ignore[name-defined]  # noqa: F821

    class Counter:
        def count(self) -> Any:
            return rank  # type: ignore[name-defined]  # noqa: F821

    class Derived(Counter):
        pass

    class Static:
        @staticmethod
        def static() -> Any:
            return rank  # type: ignore[name-defined]  # noqa: F821

    class Property:
        @property
        def value(self) -> Any:
            return rank  # type: ignore[name-defined]  # noqa: F821

    return {
        "itself": inner,
        "in a closure": lambda: inner(),
        "a nested one": lambda: (lambda: rank)(),  # type: ignore[name-defined]  # noqa: F821
        "a partial": functools.partial(inner),
        "a method": Counter().count,
        "a method made there": lambda: Counter().count(),
        "a static method": lambda: Static.static(),
        "a property": lambda: Property().value,
        "a base's method": lambda: Derived().count(),
    }


@pytest.mark.parametrize("name", local_functions())
def test_name_that_was_not_sent_is_the_ranks(name: str) -> None:
    function = travel(local_functions()[name])
    bind_missing_names([(function, {"key": 1})], NAMESPACE)
    assert function() == 3


def test_sent_names_and_builtins_keep_their_values() -> None:
    function = travel(lambda: (math.pi, len("ab")))
    bind_missing_names([function], NAMESPACE)
    assert function() == (math.pi, 2)
