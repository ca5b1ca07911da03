"""Names that a rank was given and that a cell binds to something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellmesh.workers.rank.given_names import GivenNames


@pytest.fixture
def namespace() -> dict[str, Any]:
    return {"rank": 300, "world_size": 2, "device": torch.device("cpu"), "mesh": None, "step": 1}


def test_another_value_is_said_once_with_the_line_that_undoes_it(namespace: dict[str, Any]) -> None:
    given = GivenNames(namespace)
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
    given = GivenNames(namespace)
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
    given = GivenNames(namespace)
    namespace[name] = value
    assert given.say().count("restores it") == 1


def test_names_that_the_notebook_pushes_or_a_cell_deletes_are_not_said(
    namespace: dict[str, Any],
) -> None:
    given = GivenNames(namespace)
    namespace["rank"] = 1
    given.forget(["rank", "x"])
    del namespace["device"]
    assert not given.say()
