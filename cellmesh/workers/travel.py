"""How a rank's values travel to the notebook."""

from __future__ import annotations

import types
from typing import Any

import torch

from ..errors import UnpicklableError
from .inspection import is_dtensor


def reduce_for_notebook(value: Any) -> Any:
    """How tensors travel to a process without GPUs and process groups (see `payload.dumps`)."""
    if type(value) in (types.GeneratorType, types.AsyncGeneratorType):
        raise UnpicklableError("a generator stays where its code runs: return `list(...)` of what it yields")
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            raise UnpicklableError(
                "a DTensor cannot leave its process group: pull `.to_local()` (each rank's part) or "
                "`.full_tensor()` (the whole) of it"
            )
        if value.device.type not in ("cpu", "meta"):
            return value.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return NotImplemented
