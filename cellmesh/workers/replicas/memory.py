"""The bytes of a CPU storage."""

from __future__ import annotations

import ctypes

import torch


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """A CPU storage's bytes, to be read and written, without a copy.

    As ``numpy()`` of a tensor would give them, but for this: torch never again resizes memory that numpy has
    seen, and FSDP2 resizes what holds its parameters.
    """
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    array.storage = storage  # type: ignore[attr-defined]  # lives as long as the view does
    return memoryview(array).cast("B")
