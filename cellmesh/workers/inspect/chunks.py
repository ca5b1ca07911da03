"""Reads a tensor piece by piece, so that inspecting a huge one needs no second copy of it."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .safe_read import DIRECT, SafeReader, UnreadableError, bytes_of, check_beside

# Elements in a piece: on CPUs what fits their caches, on others what keeps them busy.
_CPU_PIECE = 1 << 17
_DEVICE_PIECE = 1 << 21


def readable(local: torch.Tensor, is_beside: bool = False) -> tuple[torch.Tensor, str]:
    """Return a dense tensor of the elements that a rank's tensor stores, and what was left out.

    Args:
        local: a tensor of this rank's own, no DTensor.
        is_beside: the main thread may be running.

    Returns:
        A tensor that `pieces` takes, and what is to be said of it, "" mostly: of a sparse tensor,
        only the elements that it stores.

    Raises:
        UnreadableError: it has none; waiting for them would be a collective; its memory has been
            freed; or it could be, while it is read.
    """
    data, note = _stored(_unwrapped(local).detach())
    if is_beside and data.numel():
        check_beside(data)
    return data, note


def _stored(local: torch.Tensor) -> tuple[torch.Tensor, str]:
    if local.is_meta:
        raise UnreadableError("a meta tensor has no values")
    if local.layout in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc):
        return local.values(), _of_stored(local, local.values())
    if local.layout == torch.sparse_coo:
        stored = local._values()
        twice = (
            ""
            if local.is_coalesced()
            else "; it is not coalesced: some may be stored more than once"
        )
        return stored, _of_stored(local, stored) + twice
    if local.is_nested:
        return local.values(), "the numbers are of all its tensors together"
    if local.layout != torch.strided:
        raise UnreadableError(f"its layout, {layout_of(local)}, is not read")
    _check_memory(local)
    if local.is_complex():
        return local, "the numbers are of real and imaginary parts alike"
    return local, "the numbers are of what it stands for" if local.is_quantized else ""


def layout_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's layout: ``strided``, ``sparse_coo``, ..."""
    return str(tensor.layout).removeprefix("torch.")


def _unwrapped(local: torch.Tensor) -> torch.Tensor:
    kind = type(local).__name__
    if isinstance(local, UninitializedTensorMixin):
        raise UnreadableError("it is not initialised: its module has not run yet")
    if kind == "AsyncCollectiveTensor":
        if not getattr(local, "completed", False):
            raise UnreadableError("its collective has not been waited for")
        return local.elem  # type: ignore[attr-defined, no-any-return]
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if fakes is not None and isinstance(local, fakes.FakeTensor):
        raise UnreadableError("a fake tensor has no values")
    if torch._C._functorch.is_functorch_wrapped_tensor(local):
        raise UnreadableError("it is inside a function transform (vmap, grad)")
    return local


def _of_stored(whole: torch.Tensor, stored: torch.Tensor) -> str:
    return (
        f"the numbers are of the {stored.numel():,} elements that it stores, of "
        f"{whole.numel():,}; the others are zero"
    )


def _check_memory(local: torch.Tensor) -> None:
    """Raise UnreadableError if FSDP has freed a tensor's memory: reading it would crash."""
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or not local.numel():
        return
    last = local.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)
    )
    if (last + 1) * local.element_size() > local.untyped_storage().nbytes():
        raise UnreadableError("its memory has been freed (FSDP does so with gathered parameters)")


def piece_size(data: torch.Tensor) -> int:
    """Return how many elements of a tensor are read at a time."""
    return _CPU_PIECE if data.device.type == "cpu" else _DEVICE_PIECE


def pieces(data: torch.Tensor, size: int = 0) -> Iterator[torch.Tensor]:
    """Yield views that make up a tensor, in row-major order.

    Args:
        data: see `readable`.
        size: of each, in elements, at most; 0 for a good one.
    """
    size = size or piece_size(data)
    if data.numel() <= size:
        if data.numel():
            yield data
    elif data.is_contiguous() and not data.is_quantized:
        yield from torch.split(data.view(-1), size)
    else:
        num_rows = size // (data.numel() // data.shape[0])
        if num_rows:
            yield from torch.split(data, num_rows)
        else:
            for row in data.unbind():
                yield from pieces(row, size)


def unordered(data: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor's elements in the order of its memory, which is fast to read, and how often
    each element counts.
    """
    if data.is_quantized:
        return data, 1
    repeated = 1
    for dim in reversed(range(data.ndim)):
        if data.stride(dim) == 0 and data.shape[dim] > 1:
            repeated *= data.shape[dim]
            data = data.select(dim, 0)
    return data.permute(sorted(range(data.ndim), key=data.stride, reverse=True)), repeated


def numbers_of(piece: torch.Tensor) -> torch.Tensor:
    """Return a piece of a tensor as flat float64; of complex numbers, real and imaginary parts."""
    if piece.is_quantized:
        piece = piece.dequantize()
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj())
    return piece.to(torch.float64).reshape(-1)


def sample_of_parts(
    data: torch.Tensor,
    parts: Sequence[tuple[int, int]],
    max_elements: int,
    read: SafeReader = DIRECT,
) -> torch.Tensor:
    """Return elements of a tensor, evenly spaced over runs, in row-major order: see `Sample`.

    Args:
        data: see `readable`.
        parts: [begin, end) of each run, ascending and apart.
        max_elements: how many, at most; there are fewer only where the runs have fewer.
        read: how they are read.
    """
    sizes = [max(0, min(end, data.numel()) - begin) for begin, end in parts]
    total = sum(sizes)
    count = min(total, max_elements)
    wanted = torch.arange(count, device="cpu") * total // max(count, 1)
    ends = list(itertools.accumulate(sizes))
    bounds = torch.tensor(ends, dtype=torch.int64, device="cpu")
    part = torch.bucketize(wanted, bounds, right=True)
    shift = torch.tensor(
        [begin - (end - size) for (begin, _), size, end in zip(parts, sizes, ends, strict=True)],
        dtype=torch.int64,
        device="cpu",
    )
    where = (wanted + shift[part]).to(data.device)
    if not count:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    picked = (
        read.pick(data, torch.unravel_index(where, data.shape))
        if data.ndim
        else read.take(data.reshape(1))
    )
    if picked.is_quantized:
        picked = picked.dequantize()
    wide = torch.complex128 if picked.is_complex() else torch.float64
    wide = picked.dtype if picked.dtype in (torch.int64, torch.uint64) else wide
    return picked.resolve_conj().resolve_neg().to(wide, copy=True).cpu()


def run_of(data: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Yield views that make up a tensor's elements [begin, end), in row-major order."""
    begin, end = max(begin, 0), min(end, data.numel())
    if begin >= end:
        return
    if begin == 0 and end == data.numel():
        yield from pieces(data)
    elif data.is_contiguous() and not data.is_quantized:
        yield from torch.split(data.view(-1)[begin:end], piece_size(data))
    else:
        row = data.numel() // data.shape[0]
        first, last = begin // row, (end - 1) // row
        if first == last:
            yield from run_of(data[first], begin - first * row, end - first * row)
            return
        yield from run_of(data[first], begin - first * row, row)
        yield from pieces(data[first + 1 : last])
        yield from run_of(data[last], 0, end - last * row)


_BLOCK = 1 << 16
# Words in a tensor that is large.
_LARGE = 1 << 18
# An expanded tensor of more elements than these is not read again and again where once will do.
_MANY = 1 << 26


def digest_of_bytes(data: bytes) -> str:
    """Return a digest of bytes."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def digest_of_tensor(local: torch.Tensor, read: SafeReader = DIRECT) -> str:
    """Return a digest of a tensor, bit for bit; "" if the tensor cannot be read.

    It does not depend on strides, nor on the device.

    Args:
        local: a tensor of this rank's own, no DTensor.
        read: how it is read.
    """
    try:
        if local.layout not in (torch.strided, torch.jagged):
            return ""
        data, _ = readable(local, read.is_beside)
        return digest_of(data, read)
    except (UnreadableError, RuntimeError, TypeError, NotImplementedError):
        return ""


def digest_of(data: torch.Tensor, read: SafeReader = DIRECT) -> str:
    """Return a digest of the tensor that `readable` has returned.

    Args:
        data: that.
        read: how it is read.

    Raises:
        Exception: torch cannot view it as bytes.
    """
    if data.numel() > _MANY and not data.is_quantized and _is_repeated(data):
        data, repeated = unordered(data)
        return _digest(map(read.take, pieces(data)), data, data.numel(), f"{repeated} times")
    return _digest(map(read.take, pieces(data)), data, data.numel())


def digests_of_parts(
    data: torch.Tensor, parts: Sequence[tuple[int, int]], read: SafeReader = DIRECT
) -> tuple[str, ...]:
    """Return a digest of each range of a tensor's elements, which are in row-major order.

    Args:
        data: see `readable`.
        parts: [begin, end) of each, ascending and apart.
        read: how it is read.
    """
    return tuple(
        _digest(map(read.take, run_of(data, begin, end)), data, end - begin) for begin, end in parts
    )


def _is_repeated(data: torch.Tensor) -> bool:
    return data.numel() * data.element_size() > data.untyped_storage().nbytes()


def _digest(
    parts: Iterator[torch.Tensor], data: torch.Tensor, num_elements: int, remark: str = ""
) -> str:
    digest = hashlib.blake2b(remark.encode(), digest_size=12)
    num_words = num_elements * max(1, data.element_size() // 4)
    if num_words < _LARGE:
        for piece in parts:
            digest.update(bytes_of(_flat(piece).cpu()))
    else:
        digest.update(_sums(parts, num_words, data.device))
    return digest.hexdigest()


def _flat(piece: torch.Tensor) -> torch.Tensor:
    """Return a piece of a tensor as a contiguous flat tensor."""
    plain = piece.resolve_conj().resolve_neg()
    if plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.contiguous()
    # One element may be contiguous whatever its stride, which `view` then does not take.
    return plain.as_strided((plain.numel(),), (1,))


def _words(piece: torch.Tensor) -> torch.Tensor:
    flat = _flat(piece)
    if flat.element_size() >= 4:
        return flat.view(torch.int32)
    return flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16).to(torch.int32)


def _sums(parts: Iterator[torch.Tensor], num_words: int, device: torch.device) -> bytes:
    """Return two checksums of each block of 32-bit words of a tensor."""
    ones, others = _weights(1, device), _weights(2, device)
    mixed, beside = (torch.empty(_BLOCK, dtype=torch.int32, device=device) for _ in range(2))
    # One tensor: many small ones that are kept would lie between pieces that are freed, in whose
    # memory the next piece then has no room.
    totals = torch.zeros(-(-num_words // _BLOCK), 2, dtype=torch.int32, device=device)
    at = 0
    for piece in parts:
        words = _words(piece)
        while words.numel():
            begin = at % _BLOCK
            size = min(_BLOCK - begin, words.numel())
            out, more = mixed[:size], beside[:size]
            _mix(words[:size], out, more)
            torch.mul(out, ones[begin : begin + size], out=more)
            out.mul_(others[begin : begin + size])
            total = totals[at // _BLOCK]
            total[0] += more.sum(dtype=torch.int32)
            total[1] += out.sum(dtype=torch.int32)
            at += size
            words = words[size:]
    return b"".join((one % (1 << 32)).to_bytes(4, "little") for one in totals.view(-1).tolist())


def _mix(words: torch.Tensor, out: torch.Tensor, beside: torch.Tensor) -> None:
    """Mix words into `out` reversibly, so that each bit affects all others. `beside` is scratch
    memory.
    """
    torch.bitwise_right_shift(words, 16, out=beside)
    beside.bitwise_and_(
        0xFFFF
    )  # the shift keeps the sign, and so would map a word and its complement to one
    torch.bitwise_xor(words, beside, out=out)
    out.mul_(-2048144789)
    torch.bitwise_right_shift(out, 15, out=beside)
    out.bitwise_xor_(beside.bitwise_and_(0x1FFFF))


def _weights(seed: int, device: torch.device) -> torch.Tensor:
    """Return a block of odd pseudo-random 32-bit integers, derived from a seed, by which a
    digest multiplies the words of a tensor.
    """
    counted = (
        torch.arange(_BLOCK, dtype=torch.int32, device=device).mul_(-1640531527).add_(seed * 40503)
    )
    mixed, beside = torch.empty_like(counted), torch.empty_like(counted)
    _mix(counted, mixed, beside)
    return mixed.bitwise_or_(1)
