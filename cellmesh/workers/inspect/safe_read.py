"""Reads tensors in place, or copies them where the main thread may free them at any moment.

FSDP frees the memory of gathered parameters while it trains, and allocates it anew. A thread that
reads it then is ended by the system, and the rank with it. No check helps: torch frees memory in
Python, which holds the interpreter's lock (`UntypedStorage.resize_`), and in operations
(`Tensor.resize_`, compiled code), which do not. But the kernel can be told to read: where there is
no memory any more, the call `write` fails. So what is looked at is written, piece by piece, into a
file that lies in memory.

On GPUs there is no such call: a kernel that reads memory which has gone costs the rank its context,
and so its life. There nothing is read beside a main thread.
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


# What `pwritev` takes at once.
_MAX_RUNS = 1024
# Elements that lie apart are copied in one run with what is between them, which may be so many
# times more.
_GAPS = 32
_MIN_BYTES = 1 << 20
# Of more, with what lies between the elements, one part is copied after the other.
_MAX_BYTES = 1 << 23
# Devices whose memory the kernel copies.
_COPIED = ("cpu",)


class UnreadableError(ValueError):
    """Raised if a tensor cannot be read; the text says why."""


class SafeReader:
    """Reads tensors in place, where no other thread can free them."""

    is_beside = False

    def take(self, view: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the elements of a view, valid until the next read."""
        return view


DIRECT = SafeReader()


class Copier(SafeReader):
    """Copies tensors that another thread may free at any moment.

    Values may be torn: half old and half new. Where the memory has gone, an `UnreadableError` is
    raised.
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
        # Strides of the copy; those that are left out are of dims that repeat one element.
        strides = [0] * view.ndim
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        dims = [dim for dim in range(view.ndim) if view.stride(dim) and view.shape[dim] > 1]
        num, span = 1, 1  # elements in a run, and how far it reaches
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
        """Copy runs of elements, each of this length and at one of these offsets, to adjacent
        places.
        """
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
        except (OSError, RuntimeError) as error:  # bad address; a storage without data
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
    """Yield a reader of tensors; within the block, torch computes on this thread only, without
    autograd or subclasses' code.

    Args:
        is_beside: the main thread may be running, and free what is read.
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

    Pieces are small: where cores are taken, waiting for other threads at each costs ten times what
    they save. The number is each thread's own: a main thread that runs keeps its number.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    # A thread that computes for the first time takes the number that was set last by any thread.
    other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    other.start()
    other.join()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def check_beside(view: torch.Tensor) -> None:
    """Raise UnreadableError unless a `Copier` can read a tensor.

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
