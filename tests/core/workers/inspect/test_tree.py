"""The tensors in a value: of tensors, modules, optimizers, nests, objects."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cellmesh.wire.inspect import Overview, ValueSummary
from cellmesh.workers.inspect.safe_read import DIRECT
from cellmesh.workers.inspect.summary import overview
from cellmesh.workers.inspect.tree import find, walk


def look(value: Any, **changes: Any) -> ValueSummary:
    return overview(value, Overview("x", **changes), DIRECT)


def paths(value: Any) -> list[str]:
    return [item.path for item in look(value).items]


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    name: str = "a"
    missing: int = dataclasses.field(init=False)


class Trainer:
    def __init__(self) -> None:
        self.model, self.loss = nn.Linear(2, 1), torch.ones(())
        self.inner, self.step = Inner(), 3


class Inner:
    def __init__(self) -> None:
        self.hidden = torch.ones(3)


ONE = torch.ones(1)
Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        *((one, [""]) for one in (torch.ones(2), np.ones(2), None, types, Batch)),
        ([], []),
        ({}, []),
        ({"a": [ONE, {"b": (ONE * 2, 5)}]}, ["['a'][0]", "['a'][1]['b'][0]", "['a'][1]['b'][1]"]),
        ([Batch(torch.ones(2))], ["[0].tokens", "[0].name"]),
        (Pair(torch.ones(1), 2), ["left", "right"]),
        (Trainer(), ["model.weight", "model.bias", "loss", "inner", "step"]),
        ([nn.Linear(1, 1), np.ones(3)], ["[0].weight", "[0].bias", "[1]"]),
        ({"deque": collections.deque([ONE, ONE * 2])}, ["['deque'][0]", "['deque'][1]"]),
    ],
)
def test_tensors_have_paths(value: Any, wanted: list[str]) -> None:
    assert paths(value) == wanted


def test_every_path_leads_to_what_it_names() -> None:
    value = {"a": [torch.ones(1), Batch(torch.ones(2))], "m": nn.Linear(2, 2), "o": Trainer()}
    for path, part in walk(value):
        assert find(value, path) is part
    assert find(value, "") is value
    with pytest.raises(LookupError, match="no gone in it now"):
        find(value, "gone")


def stepped(parameters: Any, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


def test_an_optimizers_state_has_names_of_the_ranks_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}]
    optimizer = stepped(groups, model)
    main = types.ModuleType("__main__")
    vars(main).update(layer=model[1], wrapped=nn.ModuleDict({"module": model}), net=model)
    monkeypatch.setitem(sys.modules, "__main__", main)
    found = paths(optimizer)
    assert [path for path in found if path.startswith("state")] == [
        f"state[net.{name}].momentum_buffer" for name, _ in model.named_parameters()
    ]
    assert {"param_groups[0]", "param_groups[0].net.0.weight", "param_groups[1]"} <= set(found)
    buffer = find(optimizer, "state[net.1.bias].momentum_buffer")
    assert buffer is optimizer.state[model[1].bias]["momentum_buffer"]


def test_many_plain_values_are_one_item_and_push_no_tensor_out() -> None:
    found = look(
        SimpleNamespace(losses=[0.5] * 30_000, tokens=[[1, 2]] * 200, weight=torch.ones(3))
    )
    assert [item.path for item in found.items] == ["losses", "tokens", "weight"]
    assert found.items[0].text == "30,000 items: [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]"
    mixed = look([torch.ones(1), *range(5000), torch.ones(2)], max_items=1500)
    assert (len(mixed.items), mixed.num_left_out, mixed.items[-1].path) == (1002, 4000, "[5001]")


def test_much_is_not_read_at_once() -> None:
    value = {"a": torch.ones(100), "b": torch.ones(100), "c": torch.ones(1)}
    found = look(value, max_elements=150)
    assert [item.max for item in found.items] == [1.0, None, 1.0]
    assert "choose it" in found.items[1].note
    assert look(value, max_elements=150, path="['b']").items[0].max == 1.0
    assert look(torch.ones(1000), max_elements=1).items[0].max == 1.0


# ---- gradients


def gradients(value: Any) -> dict[str, Any]:
    return {item.path: item for item in look(value, grads=True).items}


def test_gradients_are_those_of_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(1, 1))
    model[2].requires_grad_(False)
    model[1](torch.ones(2)).sum().backward()
    model[1].weight.grad = torch.tensor([[3.0, float("nan")]])
    found = gradients(model)
    assert list(found) == ["0.weight.grad", "0.bias.grad", "1.weight.grad", "1.bias.grad"]
    assert (found["0.weight.grad"].text, found["0.weight.grad"].shape) == ("None", None)
    weight = found["1.weight.grad"]
    assert (weight.norm, weight.max, weight.num_nan, weight.num_elements) == (3.0, 3.0, 1, 2)
    assert find(model, "1.weight.grad") is model[1].weight.grad
    assert find(model, "0.weight.grad") is None


def test_gradients_of_optimizers_and_nests() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(2)).sum().backward()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    at = "param_groups[0]"
    assert list(gradients(optimizer)) == [f"{at}.weight.grad", f"{at}.bias.grad"]
    assert list(gradients({"w": model.weight, "out": model.weight * 2})) == ["['w'].grad"]
    assert list(gradients(model.weight)) == ["grad"]
    assert find(model.weight, "grad") is model.weight.grad
    for value in (nn.ReLU(), [1, 2]):
        with pytest.raises(TypeError, match="has no parameters"):
            gradients(value)
