"""Pickles tensors and arrays with their memory out of band, without a copy."""

from __future__ import annotations

import ctypes
import pickle
import sys
import types
from typing import Any

from ..errors import MeshUsageError, UnpicklableError
from .limits import CHECKED_BYTES

# From here on a strided array is worth a contiguous copy, and memory is used where it arrives.
LARGE_BYTES = 64 * 1024


def reduce(value: Any) -> Any:
    """Return how pickle is to reduce a tensor, storage or array (see
    `pickle.Pickler.reducer_override`).

    Args:
        value: an object of a class that ``torch`` or ``numpy`` defines, or a function of
            ``torch._utils``, by which torch rebuilds tensors.

    Returns:
        ``NotImplemented`` where its class knows best.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kind = type(value)
    if numpy is not None and kind is numpy.ndarray:
        flags = value.flags
        if flags.forc or value.dtype.hasobject or value.nbytes < LARGE_BYTES:
            return NotImplemented
        _check_fits(value.nbytes)
        return numpy.ascontiguousarray(value).__reduce_ex__(5)
    if torch is None:
        return NotImplemented
    if kind is types.FunctionType:
        is_of_new_dtypes = value is getattr(torch._utils, "_rebuild_tensor_v3", None)
        return (find_rebuild, ()) if is_of_new_dtypes else NotImplemented
    if kind is torch.storage.TypedStorage:
        return _reduce_storage(value._untyped_storage, value.dtype)
    if kind is torch.UntypedStorage:
        return _reduce_storage(value, None)
    if kind is torch.Tensor and value.layout is torch._mkldnn:
        raise UnpicklableError("a tensor in the layout of mkldnn: send `x.to_dense()`")
    if kind.__name__ == "FakeTensor":
        raise UnpicklableError(
            "a FakeTensor, which has no values: send a tensor on `meta` (`torch.empty_like(x, "
            'device="meta")`)'
        )
    if kind is torch.Tensor and _is_part(value, torch):
        _check_fits(value.nbytes)
        copy = value.detach().clone().requires_grad_(value.requires_grad)
        return copy.__reduce_ex__(5)
    return NotImplemented


def find_rebuild() -> Any:
    """Return the function that rebuilds tensors of torch's newer dtypes (float8, uint16, ...).

    torch reduces these with an untyped storage, and rebuilds them on a typed one: `torch.load` has
    changed it by then.
    """
    return _rebuild_tensor


def _rebuild_tensor(storage: Any, *args: Any) -> Any:
    import torch

    return torch._utils._rebuild_tensor_v3(_typed(storage, torch.uint8), *args)  # type: ignore[no-untyped-call]


def make_storage(num_bytes: int, dtype: Any, device: str) -> Any:
    """Make a torch storage that has no contents to send: an empty one, or one on ``meta``.

    Args:
        num_bytes: its size.
        dtype: as of `rebuild_storage`.
        device: torch's name of it.
    """
    import torch

    storage = torch.UntypedStorage(num_bytes, device=device)  # type: ignore[no-untyped-call]
    return storage if dtype is None else _typed(storage, dtype)


def rebuild_storage(buffer: Any, dtype: Any) -> Any:
    """Rebuild a torch storage on the memory in which it was received.

    Args:
        buffer: writable memory.
        dtype: of a typed storage; None for an untyped one.
    """
    import torch

    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    if storage.nbytes() < LARGE_BYTES:
        storage = storage.clone()  # type: ignore[no-untyped-call]  # memory of torch's own, which it can resize
    return storage if dtype is None else _typed(storage, dtype)


def move_storage(storage: Any, dtype: Any, device: str) -> Any:
    """Move a received torch storage to the device that it was sent from.

    Args:
        storage: as it has arrived, on the CPU.
        dtype: as of `rebuild_storage`.
        device: torch's name of it.

    Raises:
        MeshUsageError: this process has no such device.
    """
    import torch

    try:
        there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    except (RuntimeError, AssertionError) as e:  # the latter where torch is built without it
        raise MeshUsageError(
            f"a tensor on {device} was sent to a process that has no such device: send `x.cpu()`, "
            "or, with a device for each rank, a part to each with `push(x=x, shard=0)`"
        ) from e
    there.copy_(storage)
    return there if dtype is None else _typed(there, dtype)


def _typed(storage: Any, dtype: Any) -> Any:
    typed: Any = sys.modules["torch"].storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


def _reduce_storage(storage: Any, dtype: Any) -> Any:
    num_bytes = storage.nbytes()
    if not num_bytes or storage.device.type == "meta":
        return make_storage, (num_bytes, dtype, "meta" if storage.device.type == "meta" else "cpu")
    if storage.device.type != "cpu":
        _check_fits(num_bytes)
        return move_storage, (storage.cpu(), dtype, str(storage.device))
    memory = (ctypes.c_char * num_bytes).from_address(storage.data_ptr())
    memory.storage = storage  # keeps it alive as long as its memory is used
    return rebuild_storage, (pickle.PickleBuffer(memory), dtype)


def _check_fits(num_bytes: int) -> None:
    """Check that the copy of a value for its pickle fits into memory, if the value is large."""
    if num_bytes >= CHECKED_BYTES:
        from . import limits

        limits.check_fits(num_bytes)


def _is_part(tensor: Any, torch: Any) -> bool:
    """Return whether a tensor is less than half of a large storage, which would travel whole."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    num_bytes = tensor.untyped_storage().nbytes()
    return bool(num_bytes >= LARGE_BYTES and 2 * tensor.nbytes < num_bytes)
