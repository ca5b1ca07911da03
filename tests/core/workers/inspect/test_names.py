"""The ranks' names: what each rank tells, and how that is folded."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from cellmesh.magics.render.inspections import fold_names
from cellmesh.wire.inspect import Names, TensorSummary
from cellmesh.workers.inspect.names import describe_shortly, names
from cellmesh.workers.inspect.safe_read import DIRECT
from cellmesh.workers.rank.given_names import GivenNames
from tests.support.loud_values import RAN, Loud, LoudTensor, noting


def ask(namespace: dict[Any, Any], subject: Names, hidden: dict[str, Any] | None = None) -> Any:
    shell: Any = types.SimpleNamespace(user_ns=namespace, user_ns_hidden=hidden or {})
    return names(shell, subject, DIRECT)


def rows(told: dict[int, Sequence[TensorSummary]]) -> list[dict[str, str]]:
    table = fold_names(told, "*", [])
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


# ---- what a rank tells


class Odd:
    def __repr__(self) -> NoReturn:
        raise AssertionError("the user's code ran")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("<b>", "'<b>'"),
        ([1, torch.ones(2, 3), Odd()], "[1, Tensor[2, 3], <Odd>]"),
        ({"a": {"b": Odd()}}, "{'a': {'b': <Odd>}}"),
        (Odd(), ""),
        ([1, -(1 << 999)], "[1, <int of 1,000 bits>]"),
        (b"x" * 100, f"b'{'x' * 77}…"),
        ({3, 1, 2}, "{1, 2, 3}"),
        ({"b": 1, "a": 2}, "{'a': 2, 'b': 1}"),
        (set(range(2000)), "<set of 2,000>"),
        ([[[[[1]]]]], "[[[[...]]]]"),
        (torch, "torch"),
        (nn.Linear(2, 3), "9 parameters"),
        (torch.tensor(0.25), "0.25"),
        (torch.ones(2), ""),
    ],
)
def test_short_values(value: Any, text: str) -> None:
    assert describe_shortly(value).text == text


LAYER = nn.Linear(2, 3)
OPTIMIZER = torch.optim.SGD(LAYER.parameters(), lr=0.1, momentum=0.9)
LAYER(torch.ones(1, 2)).sum().backward()
OPTIMIZER.step()


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (nn.Sequential(LAYER, LAYER), 36),  # shared parameters count once
        (OPTIMIZER, 36),
        ([torch.ones(2), torch.ones(1), "x"], 12),
        ({"a": torch.ones(2)}, 8),
        (Odd(), 0),
    ],
)
def test_sizes(value: Any, num_bytes: int) -> None:
    assert describe_shortly(value).num_bytes == num_bytes


def test_only_names_of_the_user_are_listed() -> None:
    hidden = {"exit": object(), "quit": object(), "rank": 300, "torch": torch}
    namespace = {**hidden, "quit": 1, "_private": 1, "b": 1, "A": 2, "torch": torch}
    given = GivenNames(namespace, hidden)
    namespace["world_size"] = 4
    given.renew(("world_size",))
    namespace["c"] = 3
    listed = [named.path for named in ask(namespace, Names(), hidden)]
    assert listed == ["quit", "b", "A", "c"]
    namespace["world_size"] = 5
    assert "world_size" in [named.path for named in ask(namespace, Names(), hidden)]
    given.renew(("world_size",))
    assert "world_size" not in [named.path for named in ask(namespace, Names(), hidden)]


class Named_(type):
    __name__ = property(noting("class name", ""))  # type: ignore[assignment]


class Long(str):
    __len__ = noting("len", 3)


def test_no_code_of_the_users_runs_and_no_value_costs_the_others_their_rows() -> None:
    class Metal(metaclass=Named_): ...

    class Torn(torch.Tensor):
        shape = property(noting("shape", RuntimeError("odd")))  # type: ignore[assignment]

    namespace = {
        "keys": {Loud(): 1, Loud(): 2}, "members": {Loud(), Loud()}, "metal": Metal(),
        "cls": Metal, "long": Long("abc"), "torn": torch.ones(2).as_subclass(Torn),
        "tensor": torch.ones(3).as_subclass(LoudTensor), "rank": 10**5000, "z": 1,
    }  # fmt: skip
    RAN.clear()
    told = {named.path: named for named in ask(namespace, Names())}
    assert {*RAN} == {"shape"}  # which a tensor's class may compute where nothing else runs
    assert told.keys() == namespace.keys()
    assert told["keys"].text == "{<Loud>: 1, <Loud>: 2}"
    assert told["members"].text == "{<Loud>, <Loud>}"
    assert (told["torn"].text, told["z"].text) == ("<Torn>", "1")
    tensor = told["tensor"]
    assert (tensor.shape, tensor.num_bytes, tensor.digest) == ((3,), 12, "")


# ---- folding


def test_names_are_folded_over_the_ranks() -> None:
    told = {0: ask({"B": 1, "a": 1}, Names()), 1: ask({"B": 1, "d": 1}, Names())}
    assert [(row["name"], row["between ranks"]) for row in rows(told)] == [
        ("a", "not on rank 1"), ("B", "alike"), ("d", "not on rank 0")
    ]  # fmt: skip
