"""Paths are followed to the value that Python gives, and nobody's code runs on the way."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from cellmesh.wire.inspect import Overview
from cellmesh.workers.inspect.safe_read import DIRECT
from cellmesh.workers.inspect.static_eval import NeedsCode, follow
from cellmesh.workers.inspect.summary import overview
from tests.support.loud_values import RAN, Loud, LoudTensor, noting


class Sly:
    __getattribute__ = noting("getattribute", 1)


class Slotted:
    __slots__ = ("here", "not_yet")

    def __init__(self) -> None:
        self.here = 5


class LoudDict(dict[str, int]):
    __getitem__, __missing__ = noting("getitem", 4), noting("missing", 5)
    __getattr__ = noting("getattr", 6)


@dataclasses.dataclass
class Config:
    rate: float = 0.5
    limit: ClassVar[None] = None


Pair = collections.namedtuple("Pair", "left right")


def names() -> dict[str, Any]:
    loud = Loud()
    tensor = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensor.sum().backward()
    return {
        "x": tensor,
        "i": 1,
        "key": "b",
        "array": np.arange(6).reshape(2, 3),
        "model": nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(1, 1)})),
        "lists": nn.ParameterList([torch.ones(1), torch.ones(2)]),
        "dicts": nn.ParameterDict({"p": torch.ones(1)}),
        "optimizer": torch.optim.SGD([tensor], lr=0.5),
        "nest": {"a": [10, (20, 30)], "b": {1: "one", (0, 1): "pair"}, None: 7},
        "ordered": collections.OrderedDict(a=1),
        "makes": collections.defaultdict(list, a=[1]),
        "pair": Pair(1, [2]),
        "config": Config(),
        "slotted": Slotted(),
        "module": types.SimpleNamespace(inner=sys),
        "text": "text",
        "size": torch.Size([2, 3]),
        "loud": loud,
        "sly": Sly(),
        "loud_dict": LoudDict(a=1),
        "loud_keys": {loud: 1, "b": 2},
        "loud_tensor": torch.ones(2).as_subclass(LoudTensor),
        "loud_class": Loud,
    }


@pytest.mark.parametrize(
    "expression",
    [
        "x", " x ", "x[0]", "x[-1, 2:]", "x[..., None]", "x[i]", "x[:, 1:3]", "x.grad",
        "x.grad[0]", "x.T",
        "x.shape", "x.requires_grad", "array[0]", "array[:, 1]", "model[0].weight",
        "model[-1]['a'].bias[0]", "model[0].in_features", "model.training", "lists[0]", "lists[-1]",
        "dicts['p']", "dicts.p", "optimizer.param_groups[0]['lr']",
        "optimizer.param_groups[0]['params'][0][1]", "nest['a'][1][0]", "nest[key][i]",
        "nest['b'][0, 1]",
        "nest[None]", "nest['a'][0:1]", "ordered['a']", "makes['a']", "pair[1][0]",
        "pair.right[0]", "config.rate", "config.limit", "Config.limit", "Config",
        "slotted.here", "module.inner.path", "text[0]", "size[1]", "size[0:1]", "loud.held",
        "loud.kind",
        "loud_class.kind", "loud_class.__init__", "print", "3",
    ],
)  # fmt: skip
def test_a_path_leads_to_the_value_that_python_gives(expression: str) -> None:
    space = {**names(), "Config": Config}
    RAN.clear()
    found = follow(expression, space)
    assert RAN == []
    wanted = eval(expression.strip(), space)
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor | np.ndarray):
        assert found.shape == wanted.shape
        assert bool((found == wanted).all())
    else:
        assert found is wanted or found == wanted


@pytest.mark.parametrize(
    "expression",
    [
        "loud.weight", "loud.nothing", "loud[0]", "sly.any", "loud_dict['a']", "loud_dict.a",
        "loud_keys['a']", "loud_tensor[0]", "loud_tensor.T", "loud_class.weight", "makes['b']",
        "f()", "x.sum()", "x.sum",
        "x + 1", "[x]", "x[x > 0]", "x[[0, 1]]", "x[True]", "x[loud]", "model[0:1]", "lists[0:1]",
        "nest[loud]", "nest[x[0]]", "slotted.__class__", "f'{x}'", "lambda: x", "x if i else i",
        "x; i", "",
        "x.", "(y := x)", "await x", "*x", "optimizer.state[x]", "loud.__dict__",
        "x" + "[0]" * 5000,
    ],
)  # fmt: skip
def test_expression_that_needs_code_is_reported_and_not_run(expression: str) -> None:
    space = names()
    RAN.clear()
    with pytest.raises(NeedsCode) as caught:
        follow(expression, space)
    assert RAN == []
    assert str(caught.value)
    assert list(space["makes"]) == ["a"]


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("gone", NameError), ("x.gone", AttributeError), ("model.gone", AttributeError),
        ("slotted.not_yet", AttributeError), ("nest['gone']", KeyError),
        ("nest['a'][9]", IndexError),
        ("x[7]", IndexError), ("lists[2]", IndexError), ("config.gone", AttributeError),
        ("model[1]['gone']", KeyError),
    ],
)  # fmt: skip
def test_missing_name_gives_pythons_error(expression: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        follow(expression, names())


def test_a_gradient_that_is_not_kept_is_said_to_be_none_and_torch_does_not_warn() -> None:
    leaf = torch.ones(3, requires_grad=True)
    tensor, kept = leaf * 2, leaf * 3
    kept.retain_grad()
    (tensor + kept).sum().backward()
    space = {"leaf": leaf, "tensor": tensor, "kept": kept, "parts": {"tensor": tensor}}
    with pytest.raises(AttributeError, match="no leaf"):
        follow("tensor.grad", space)
    assert follow("leaf.grad", space) is leaf.grad
    assert follow("kept.grad", space) is kept.grad
    model = nn.Linear(3, 1)
    model._parameters["weight"] = tensor  # type: ignore[assignment]  # as torch's functional calls do
    found = overview(model, Overview("model", grads=True), DIRECT)
    assert [(item.path, item.text) for item in found.items] == [("bias.grad", "None")]
