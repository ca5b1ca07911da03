"""Gives access to the bytes of CPU tensors without a copy."""

from __future__ import annotations

import ctypes

import torch


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a CPU storage as a writable view.

    As ``numpy()`` of a tensor would give them, but for this: torch never again resizes memory that
    numpy has seen, and FSDP2 resizes what holds its parameters.
    """
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    array.storage = storage  # type: ignore[attr-defined]  # lives as long as the view does
    return memoryview(array).cast("B")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view."""
    begin = tensor.storage_offset() * tensor.element_size()
    return memory_of(tensor.untyped_storage())[
        begin : begin + tensor.numel() * tensor.element_size()
    ]
