"""Pickles a rank's values for the notebook."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ...errors import UnpicklableError
from ...wire.inspect import Refusal
from ..exceptions import name_of, text_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def reduce_for_notebook(value: Any) -> Any:
    """The pickle reducer of tensors for a process without GPUs and process groups (see
    `payload.dumps`).
    """
    if type(value) in (types.GeneratorType, types.AsyncGeneratorType):
        raise UnpicklableError(
            "a generator stays where its code runs: return `list(...)` of what it yields"
        )
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            raise UnpicklableError(
                "a DTensor cannot leave its process group: pull `.to_local()` (each rank's part) "
                "or `.full_tensor()` (the whole) of it"
            )
        if value.device.type not in ("cpu", "meta"):
            return value.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return NotImplemented


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; imports DTensor only if something else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(type(value), module.DTensor)


def refusal(error: BaseException) -> Refusal:
    """An error's name and text for a message, even if the error's own methods raise."""
    return Refusal(name_of(error), text_of(error).encode("utf-8", "replace").decode())
