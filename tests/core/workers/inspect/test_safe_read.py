"""Copies of tensors that another thread may free: what they hold, and that nothing crashes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cellmesh.wire.inspect import (
    AnyRequest,
    Histogram,
    Names,
    Overview,
    Picture,
    Pixels,
    Refusal,
)
from cellmesh.workers.inspect import safe_read as reading_module
from cellmesh.workers.inspect.chunks import pieces
from cellmesh.workers.inspect.safe_read import Copier, UnreadableError, reading
from tests.support.inspected_ranks import looker

from .test_chunks import tensors

ONE = torch.arange(60.0).reshape(3, 4, 5)
COMPLEX = torch.randn(40, 50, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


def check(view: torch.Tensor) -> None:
    with reading(is_beside=True) as read:
        taken = read.take(view)
        assert (taken.shape, taken.dtype) == (view.shape, view.dtype)
        assert torch.equal(taken, view)
        if view.numel() and view.ndim:
            assert taken.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_a_copy_has_the_same_elements() -> None:
    for view in (ONE[..., None].expand(3, 4, 5, 9), ONE > 7, COMPLEX.conj(), torch.empty(0, 3)):
        check(view)


@given(tensors(), st.integers(1, 50))
def test_so_have_the_pieces_of_any_tensor(value: torch.Tensor, size: int) -> None:
    check(value)
    with reading(is_beside=True) as read:
        found = [read.take(piece).reshape(-1).clone() for piece in pieces(value, size)]
    assert torch.equal(torch.cat(found), value.reshape(-1))


def subjects(path: str, rows: int, cols: int) -> list[AnyRequest]:
    pictures: list[AnyRequest] = [
        Picture(
            "x", path, dims=dims, rows=(0, sizes[0]), cols=(1, sizes[1]), height=height,
            width=width, reduction=reduction,
        )
        for dims, sizes in (((0, 1), (rows, cols)), ((1, 0), (cols, rows)))
        for height, width in ((9999, 9999), (7, 13))
        for reduction in ("mean", "absmax")
    ]  # fmt: skip
    return [
        Overview("x", path),
        Histogram("x", path, low=-2.0, high=2.0, num_bins=5),
        *pictures,
        Overview("x", grads=True),
    ]


def test_read_during_a_cell_equals_read_without_a_cell() -> None:
    value = [
        torch.randn(61, 47, generator=torch.Generator().manual_seed(1), requires_grad=True),
        torch.randn(700, 900, generator=torch.Generator().manual_seed(2)).t(),
        (torch.randn(90, 80, generator=torch.Generator().manual_seed(3)) * 9).long()[:, ::3],
    ]
    rank = looker({"x": value})
    for position, tensor in enumerate(value):
        for subject in subjects(f"[{position}]", *tensor.shape):
            idle, beside = (rank.answer(subject, is_beside) for is_beside in (False, True))
            assert not isinstance(idle, Refusal), (subject, idle)
            if isinstance(idle, Pixels):
                assert np.array_equal(idle.values, beside.values), subject
            elif isinstance(subject, Overview):
                assert idle.items == beside.items
            else:
                assert idle == beside, subject


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("is_beside", [False, True], ids=["idle", "beside"])
def test_inspected_storage_can_still_be_resized(dtype: torch.dtype, is_beside: bool) -> None:
    """FSDP resizes the memory of parameters, which torch refuses once numpy has had it."""
    value, one = torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(3).to(dtype)
    model = nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    rank = looker({"x": {"v": value, "one": one, "model": model}})
    number = Overview("x", "['one']")
    for subject in (*subjects("['v']", 2, 3), number, Names()):
        answer = rank.answer(subject, is_beside)
        assert not isinstance(answer, Refusal), (subject, answer)
        for tensor in (value, one, model.weight, model.weight.grad):
            assert tensor is not None
            assert tensor.untyped_storage().resizable(), subject


def test_copied_chunk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "_MAX_BYTES", 1 << 12)
    monkeypatch.setattr(reading_module, "_MIN_BYTES", 1)
    sizes: list[int] = []
    make_room = Copier._make_room

    def noted(copier: Copier, num_bytes: int) -> None:
        sizes.append(num_bytes)
        make_room(copier, num_bytes)

    monkeypatch.setattr(Copier, "_make_room", noted)
    whole = torch.arange(90_000.0).reshape(300, 10, 30)
    check(whole)
    for view in (whole[:, :, 0], whole[:, 0, 0], whole.permute(1, 2, 0), COMPLEX.conj()):
        check(view)
    check(whole[:, 1].expand(2, 300, 30))
    assert len(sizes) > 5
    assert max(sizes) <= 1 << 12


def test_memory_that_is_freed_between_two_pieces_is_not_read() -> None:
    value = torch.ones(1 << 22)
    first, second, *_ = pieces(value)
    with reading(is_beside=True) as read:
        assert read.take(first).sum() == len(first)
        value.untyped_storage().resize_(0)
        with pytest.raises(UnreadableError, match="freed"):
            read.take(second)
        value.untyped_storage().resize_(1 << 10)
        assert len(read.take(value[:100])) == 100


def test_memory_that_is_gone_behind_the_back_of_its_tensor_is_not_read() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    value = torch.frombuffer(memory, dtype=torch.float32)
    protect = ctypes.CDLL(None).mprotect
    address, size = ctypes.c_void_p(value.data_ptr()), ctypes.c_size_t(1 << 20)
    assert protect(address, size, 0) == 0
    try:
        with reading(is_beside=True) as read, pytest.raises(UnreadableError, match="Bad address"):
            read.take(value)
    finally:
        assert protect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_read_without_the_kernels_copy_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "_COPIED", ())  # as if all tensors lay on a GPU
    model = nn.Linear(47, 61)
    model(torch.ones(47)).sum().backward()
    rank = looker({"x": {"w": model.weight, "s": model.weight.to_sparse()}})
    for path in ("['w']", "['s']"):
        for subject in subjects(path, 61, 47):
            answer = rank.answer(subject, is_beside=True)
            if isinstance(subject, Overview):
                (item,) = answer.items
                assert (item.shape, item.max, item.digest) == ((61, 47), None, "")
                answer = item.note
            text = str(answer)
            assert "on cpu is not read beside a cell" in text or "only dense" in text, subject
    with (
        reading(is_beside=True) as read,
        pytest.raises(UnreadableError, match="refresh when none runs"),
    ):
        read.take(model.weight)


# ---- torch's threads


def in_thread(function: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def threads_of_others(is_beside: bool) -> int:
    """Return with how many threads torch computes in a thread that begins during a look."""
    with reading(is_beside):
        assert torch.get_num_threads() == 1
        return in_thread(torch.get_num_threads)


def test_only_the_look_computes_with_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert threads_of_others(is_beside=False) == 3
        assert torch.get_num_threads() == 3
        assert in_thread(lambda: threads_of_others(is_beside=True)) == 3
        assert (torch.get_num_threads(), in_thread(torch.get_num_threads)) == (3, 3)
    finally:
        torch.set_num_threads(before)
