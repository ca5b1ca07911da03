"""Reads tensors in place, or by copies if the main thread may free their memory at any moment.

FSDP frees and reallocates the memory of gathered parameters while it trains. If another thread
reads the memory then, the system kills the rank. Checks cannot prevent that: torch frees memory in
Python with the interpreter's lock (`UntypedStorage.resize_`), but also in operations without it
(`Tensor.resize_`, compiled code). But the kernel can read safely: if the memory is unmapped, the
system call `write` fails. So a tensor is written, piece by piece, to a file in memory.

GPUs have no such call: a GPU kernel that reads freed memory breaks the rank's CUDA context, and so
ends the rank. GPU memory is not read while the main thread may be running.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a CPU storage as a writable view.

    Unlike ``numpy()`` of a tensor, this does not mark the storage: torch never resizes memory that
    is shared with numpy, and FSDP2 resizes the memory of its parameters.
    """
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    array.storage = storage  # type: ignore[attr-defined]  # keeps it alive with the view
    return memoryview(array).cast("B")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a writable view."""
    begin = tensor.storage_offset() * tensor.element_size()
    return memory_of(tensor.untyped_storage())[
        begin : begin + tensor.numel() * tensor.element_size()
    ]


# Maximum number of buffers in a call of `pwritev`.
_MAX_RUNS = 1024
# Scattered elements are copied in one run, with the gaps between them, if the run is at most this
# many times longer than its elements.
_GAPS = 32
_MIN_BYTES = 1 << 20
# A larger copy, including gaps, is made in several parts.
_MAX_BYTES = 1 << 23
# Types of devices whose memory the kernel can copy.
_COPIED = ("cpu",)


class UnreadableError(ValueError):
    """Raised if a tensor cannot be read; the text gives the reason."""


class SafeReader:
    """Reads tensors in place; used when no other thread can free their memory."""

    is_beside = False

    def take(self, view: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the elements of a view, valid until the next read."""
        return view


DIRECT = SafeReader()


class Copier(SafeReader):
    """Reads copies of tensors whose memory another thread may free at any moment.

    The copied values may be torn, half old and half new. If the memory has been freed, the copy
    raises an `UnreadableError`.
    """

    is_beside = True

    def __init__(self) -> None:
        self._file = -1
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def close(self) -> None:
        """Close the memfd that copies are written to; the last copy stays valid."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def take(self, view: torch.Tensor) -> torch.Tensor:
        """Return a copy of the elements of a view, valid until the next read."""
        if not view.numel():
            return view
        check_beside(view)
        # Strides of the copy; 0 for dims that repeat one element.
        strides = [0] * view.ndim
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        dims = [dim for dim in range(view.ndim) if view.stride(dim) and view.shape[dim] > 1]
        num, span = 1, 1  # number of elements in a run, and its length with gaps
        runs: list[int] = []
        for dim in sorted(dims, key=view.stride):
            size, stride = view.shape[dim], view.stride(dim)
            longer = span + (size - 1) * stride
            if not runs and longer <= _GAPS * num * size:
                strides[dim], num, span = stride, num * size, longer
            else:
                runs.append(dim)
        pitch = span
        for dim in runs:
            steps = torch.arange(view.shape[dim], dtype=torch.int64, device="cpu") * view.stride(
                dim
            )
            offsets = (steps[:, None] + offsets).reshape(-1)
            strides[dim], pitch = pitch, pitch * view.shape[dim]
        if dims and pitch * view.element_size() > _MAX_BYTES:
            return self._take_in_parts(view, max(dims, key=view.stride), pitch)
        flat = self._copy(view, offsets, span)
        return _as(view, flat.as_strided(view.shape, strides))

    def _take_in_parts(self, view: torch.Tensor, dim: int, span: int) -> torch.Tensor:
        taken = torch.empty_like(view)
        size = max(1, view.shape[dim] * _MAX_BYTES // (2 * span * view.element_size()))
        for part, into in zip(
            torch.split(view, size, dim), torch.split(taken, size, dim), strict=True
        ):
            into.copy_(self.take(part))
        return taken

    def _copy(self, data: torch.Tensor, offsets: torch.Tensor, num: int) -> torch.Tensor:
        """Copy a run of `num` elements from each of these offsets into one contiguous tensor."""
        each = num * data.element_size()
        total = each * len(offsets)
        self._make_room(total)
        storage = data.untyped_storage()
        begins: list[int] = (
            offsets.add(int(data.storage_offset())).mul(data.element_size()).tolist()
        )
        try:
            held = storage.data_ptr(), storage.nbytes()
            source = memory_of(storage)
            at = 0
            for first in range(0, len(begins), _MAX_RUNS):
                runs = [source[begin : begin + each] for begin in begins[first : first + _MAX_RUNS]]
                at += os.pwritev(self._file, runs, at)
            is_there = at == total and held == (storage.data_ptr(), storage.nbytes())
        except (OSError, RuntimeError) as error:  # a bad address, or a storage without data
            raise UnreadableError(f"its memory cannot be read now: {error}") from None
        if not is_there:
            raise UnreadableError(
                "its memory was freed while it was read (FSDP frees gathered parameters)"
            )
        return self._memory[:total].view(data.dtype)

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes <= len(self._memory):
            return
        self.close()
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        self._file = os.memfd_create("cellmesh-look")
        os.ftruncate(self._file, size)
        self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)


@contextmanager
def reading(is_beside: bool) -> Iterator[SafeReader]:
    """Enter a context with a reader of tensors, in which torch computes on this thread only,
    without autograd or code of tensor subclasses.

    Args:
        is_beside: whether the main thread may be running, and may free memory that is read.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), _one_thread():
        if not is_beside:
            yield DIRECT
            return
        copier = Copier()
        try:
            yield copier
        finally:
            copier.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Enter a context in which torch computes on this thread only.

    As pieces are small, waiting for other threads on busy cores costs ten times the time that they
    save. The number of threads is set for this thread only, not for a running main thread.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    # A thread that computes for the first time gets the number that any thread has set last.
    other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    other.start()
    other.join()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def check_beside(view: torch.Tensor) -> None:
    """Check that a tensor can be copied while a cell runs that may free the tensor's memory.

    Raises:
        UnreadableError: it cannot.
    """
    if view.device.type not in _COPIED:
        raise UnreadableError(
            f"what lies on {view.device} is not read beside a cell, which may free it: refresh "
            "when none runs"
        )
    if view.is_quantized:
        raise UnreadableError("it is quantised: it can be read when no cell runs")
    if torch._C._dispatch_keys(view).has(torch._C.DispatchKey.Python):
        raise UnreadableError(
            "its elements are made by code of its type: it can be read when no cell runs"
        )


def _as(view: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Apply the conjugate and negative bits of a tensor to a plain copy of its elements."""
    if view.is_conj():
        raw = raw.conj()
    return torch._neg_view(raw) if view.is_neg() else raw
