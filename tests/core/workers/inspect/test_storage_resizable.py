"""What a look leaves of a tensor: whether torch can still resize its memory, as FSDP does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cellmesh.wire.inspect import (
    AnyRequest,
    Digests,
    Element,
    Gradients,
    Histogram,
    Names,
    Overview,
    Picture,
    Refusal,
    Sample,
)
from cellmesh.workers.inspect.handler import InspectHandler

PARTS = ((0, 3), (4, 6))
PICTURES: list[AnyRequest] = [
    Picture("x", "", (), (0, 1), (0, 2), (0, 3), side, side, reduction)
    for side in (1, 9)
    for reduction in ("mean", "absmax", "stride")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("is_beside", [False, True], ids=["idle", "beside"])
def test_inspected_storage_can_still_be_resized(dtype: torch.dtype, is_beside: bool) -> None:
    value = torch.arange(6).reshape(2, 3).to(dtype)
    one = torch.tensor(3).to(dtype)
    model = torch.nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    subjects: list[AnyRequest] = [
        Overview("x"),
        Histogram("x", "", 0.0, 5.0, 3),
        *PICTURES,
        Element("x", "", (1, 1)),
        Digests("x", "", PARTS),
        Sample("x", "", PARTS, 9),
        Sample("x", "", ((0, 6),), 9),
        Sample("one", "", ((0, 1),), 9),
        Gradients("model"),
        Names(),
    ]
    shell: Any = SimpleNamespace(
        user_ns={"x": value, "one": one, "model": model}, user_ns_hidden={}
    )
    looker = InspectHandler(SimpleNamespace(shell=shell))  # type: ignore[arg-type]
    for subject in subjects:
        answer = looker.answer(subject, is_beside)
        assert not isinstance(answer, Refusal), (subject, answer)
        for tensor in (value, one, model.weight, model.weight.grad):
            assert tensor is not None
            assert tensor.untyped_storage().resizable(), subject
