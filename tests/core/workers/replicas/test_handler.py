"""One rank's parts that should be equal on several ranks, and how far two parts are apart."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cellmesh.errors import MeshUsageError
from cellmesh.workers.replicas.handler import check, compare, distance, find_tensor
from cellmesh.workers.replicas.parts import rng_parts

from ....support.examples import examples


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def kinds_in(value: Any, expression: str = "v") -> dict[str, str]:
    return {entry.path: entry.kind for entry in check({"v": value}, expression)}


# ---- what a value holds


def test_a_model_is_its_parameters_and_buffers() -> None:
    found = check({"v": model_of()}, "v")
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert kinds_in(model_of()) == {
        **{f"v.{name}": "parameter" for name in parameters},
        **{f"v.{name}": "buffer" for name in buffers},
    }
    assert (found[0].shape, found[0].dtype) == ((4, 3), "float32")
    assert all(e.ranks == () for e in found)
    assert [e.path for e in found if e.why_differs] == [f"v.{name}" for name in buffers]


def test_optimizer_state_has_the_names_of_its_model() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = {e.path: e for e in check({"net": model, "v": optimizer}, "v")}
    assert {"v.state[net.weight].exp_avg", "v.state[net.bias].step"} <= set(found)
    assert found["v.state[net.weight].exp_avg"].kind == "optimizer state"
    assert found["v.param_groups[0].lr"].text == "0.25"
    assert "v.state[param_groups[0].params[1]].step" in kinds_in(optimizer)


class Trainer:
    """As users write them: with numbers that are the rank's own."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.rank = 3
        self.history = [1.0, 2.0]
        self.me = self


VALUE = {"a": [torch.ones(1), 2.5], 3: (np.ones(2), "x"), "g": torch.Generator(), "n": [1, 2]}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Trainer(), {"v.model.weight": "parameter", "v.model.bias": "parameter"}),
        (0.5, {"v": "number"}),
        (
            VALUE,
            {
                **{"v['a'][0]": "tensor", "v['a'][1]": "number", "v[3][0]": "tensor"},
                **{"v[3][1]": "number", "v['g']": "rng", "v['n']": "number"},
            },
        ),
    ],
    ids=["only tensors of an object", "number", "containers"],
)
def test_objects_numbers_and_containers(value: Any, found: dict[str, str]) -> None:
    assert kinds_in(value, " v ") == found


def test_default_check_covers_wrapped_models() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    names = {"model": model, "optimizer": optimizer, "_hidden": model_of(), "loss": nn.MSELoss()}
    assert [(e.path, e.kind) for e in check(names, "")] == [
        ("model", "not wrapped"),
        ("optimizer", "not wrapped"),
    ]


def test_generators_are_compared_where_that_is_asked() -> None:
    first = {e.path: e.digest for e in check({}, "rng")}
    assert set(first) == {"rng.torch", "rng.python", "rng.numpy"}
    assert {e.path: e.digest for e in check({}, "rng")} == first
    parts = list(rng_parts())
    drawn = random.random(), torch.rand(1).item(), np.random.rand()
    assert all(e.digest != first[e.path] for e in check({}, "rng"))
    assert check({"rng": 4}, "rng")[0].kind == "number"  # the user's own name goes first
    for part in parts:
        assert part.replace is not None
        part.replace(part.value)
    assert (random.random(), torch.rand(1).item(), np.random.rand()) == drawn


# ---- how far


def test_a_tensor_is_found_and_compared() -> None:
    ours, theirs = model_of(), model_of()
    with torch.no_grad():
        theirs[0].weight[2, 1] += 0.5
    sent = find_tensor({"m": theirs}, "m", "m.0.weight")
    found = compare({"m": ours}, "m", "m.0.weight", sent)
    assert (found.num_differing, found.num_elements, found.first_index) == (1, 12, (2, 1))
    assert found.max_abs == pytest.approx(0.5)
    assert float(found.theirs) - float(found.ours) == pytest.approx(0.5, abs=1e-4)
    assert sent.data_ptr() != theirs[0].weight.data_ptr()


def test_incomparable_values_are_reported() -> None:
    namespace = {"x": torch.ones(2)}
    with pytest.raises(MeshUsageError, match=r"no tensor x\.y"):
        find_tensor(namespace, "x", "x.y")
    with pytest.raises(MeshUsageError, match=r"\(2,\) torch.float32 here, and \(3,\)"):
        compare(namespace, "x", "x", torch.ones(3))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64,
        torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    ours, theirs = (torch.tensor(each).to(dtype) for each in ([0, 1, 0, 1], [0, 1, 1, 1]))
    found = distance(ours, theirs)
    assert (found.num_differing, found.max_abs, found.first_index) == (1, 1.0, (2,))
    assert distance(ours, ours.clone()).num_differing == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "dtype", "gap"),
    [
        (2**62, 2**62 + 3, torch.int64, 3.0),
        (2**63 + 1, 2**63 - 1, torch.uint64, 2.0),
        (-(2**63), 2**63 - 1, torch.int64, 2.0**64),
    ],
)
def test_large_integers_are_exact(ours: int, theirs: int, dtype: torch.dtype, gap: float) -> None:
    found = distance(*(torch.tensor([number, 7], dtype=dtype) for number in (ours, theirs)))
    assert (found.num_differing, found.max_abs) == (1, gap)
    assert (found.ours, found.theirs) == (str(ours), str(theirs))


@examples(50)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.data())
def test_distance_counts_what_differs(numbers: list[float], data: st.DataObject) -> None:
    other = [data.draw(st.one_of(st.just(x), st.floats(width=32))) for x in numbers]
    found = distance(torch.tensor(numbers), torch.tensor(other))
    pairs = zip(numbers, other, strict=True)
    differs = [a != b and not (math.isnan(a) and math.isnan(b)) for a, b in pairs]
    assert found.num_differing == sum(differs)
    assert found.first_index == ((differs.index(True),) if any(differs) else ())
