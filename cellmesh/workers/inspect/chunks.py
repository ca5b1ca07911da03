"""Computes statistics, histograms and digests of a tensor piece by piece, so that a huge tensor
needs no second copy.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .safe_read import DIRECT, SafeReader, UnreadableError, bytes_of, check_beside

# Elements in a piece: on CPUs, so that it fits the caches; on other devices, to keep them busy.
_CPU_PIECE = 1 << 17
_DEVICE_PIECE = 1 << 21


def readable(local: torch.Tensor, is_beside: bool = False) -> tuple[torch.Tensor, str]:
    """Return the elements that a rank's tensor stores as a dense tensor, and a note for the user on
    what that tensor omits.

    Args:
        local: a tensor of this rank, not a DTensor.
        is_beside: whether the main thread may be running.

    Returns:
        A tensor for `pieces`, and a note for the user, mostly "": for example, that a sparse tensor
        is represented only by the elements that it stores.

    Raises:
        UnreadableError: the tensor has no elements to read, needs a collective for them, has lost
            its memory, or may lose it while it is read.
    """
    local = _unwrapped(local).detach()
    note = ""
    if local.is_nested or local.layout != torch.strided:
        data = local._values() if local.layout == torch.sparse_coo else local.values()
        note = f"the numbers are of the {data.numel():,} elements that it stores"
    else:
        _check_memory(local)
        data = local
        if data.is_complex():
            note = "the numbers are of real and imaginary parts alike"
    if is_beside and data.numel():
        check_beside(data)
    if data.is_quantized:
        return data.dequantize(), "the numbers are of what it stands for"
    return data, note


def _unwrapped(local: torch.Tensor) -> torch.Tensor:
    if isinstance(local, UninitializedTensorMixin):
        raise UnreadableError("it is not initialised: its module has not run yet")
    if type(local).__name__ == "AsyncCollectiveTensor":
        if not getattr(local, "completed", False):
            raise UnreadableError("its collective has not been waited for")
        local = local.elem  # type: ignore[attr-defined]
    if local.is_meta:
        raise UnreadableError("a meta tensor has no values")
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if fakes is not None and isinstance(local, fakes.FakeTensor):
        raise UnreadableError("a fake tensor has no values")
    if torch._C._functorch.is_functorch_wrapped_tensor(local):
        raise UnreadableError("it is inside a function transform (vmap, grad)")
    return local


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
    """Return the number of elements of a tensor that are read at a time."""
    return _CPU_PIECE if data.device.type == "cpu" else _DEVICE_PIECE


def pieces(data: torch.Tensor, size: int = 0) -> Iterator[torch.Tensor]:
    """Yield views that make up a tensor, in row-major order.

    Args:
        data: a tensor as `readable` returns it.
        size: maximum number of elements in a view; 0 for the default of the device.
    """
    size = size or piece_size(data)
    if data.numel() <= size:
        if data.numel():
            yield data
    elif data.is_contiguous():
        yield from torch.split(data.view(-1), size)
    else:
        num_rows = size // (data.numel() // data.shape[0])
        if num_rows:
            yield from torch.split(data, num_rows)
        else:
            for row in data.unbind():
                yield from pieces(row, size)


def unordered(data: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the elements of a tensor without repetitions, in the order of its memory, which is
    fast to read, and how often an expanded tensor repeats each.
    """
    repeated = 1
    for dim in reversed(range(data.ndim)):
        if data.stride(dim) == 0 and data.shape[dim] > 1:
            repeated *= data.shape[dim]
            data = data.select(dim, 0)
    return data.permute(sorted(range(data.ndim), key=data.stride, reverse=True)), repeated


def numbers_of(piece: torch.Tensor) -> torch.Tensor:
    """Return a piece of a tensor as a flat float64 tensor; complex numbers as real and imaginary
    parts.
    """
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj())
    return piece.to(torch.float64).reshape(-1)


def statistics(data: torch.Tensor, read: SafeReader = DIRECT) -> dict[str, Any]:
    """Compute the statistics of a tensor for its `TensorSummary`.

    Args:
        data: a tensor as `readable` returns it.
        read: reader of its memory.

    Raises:
        Exception: torch cannot convert its elements to numbers.
    """
    data, repeated = unordered(data)
    count = num_nan = num_inf = num_zeros = 0
    low, high = math.inf, -math.inf
    # Sums of the distances from a number in the middle of the first piece, and of their squares.
    middle = total = squares = 0.0
    for piece in map(read.take, pieces(data)):
        numbers = numbers_of(piece)
        # The extremes are the same as in float64, but the smaller type is faster to read.
        ends = _extremes(piece if piece.dtype == torch.float32 else numbers)
        if not all(map(math.isfinite, ends)):
            # Count a complex number once.
            pairs = numbers.view(-1, 2) if piece.is_complex() else numbers[:, None]
            num_nan += int(pairs.isnan().any(1).sum())
            num_inf += int(pairs.isinf().any(1).sum())
            numbers = numbers[numbers.isfinite()]
            if not numbers.numel():
                continue
            ends = _extremes(numbers)
        if ends[0] <= 0 <= ends[1]:
            zeros = piece if piece.is_complex() else numbers
            num_zeros += zeros.numel() - int(torch.count_nonzero(zeros))
        if not count:
            middle = min(max(numbers.mean().item(), ends[0]), ends[1])
        distances = numbers - middle
        count += numbers.numel()
        total += distances.sum().item()
        squares += torch.dot(distances, distances).item()
        low, high = min(low, ends[0]), max(high, ends[1])
    found: dict[str, Any] = {
        "num_nan": num_nan * repeated,
        "num_inf": num_inf * repeated,
        "num_zeros": num_zeros * repeated,
    }
    if count:
        mean = middle + total / count
        off = total / count
        variance = max(0.0, squares / count - off * off) if math.isfinite(squares) else math.inf
        norm = math.sqrt((variance + mean * mean) * count * repeated)
        found |= {"min": low, "max": high, "mean": mean, "std": math.sqrt(variance), "norm": norm}
    return found


def _extremes(numbers: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest number of a piece; NaN if the piece has a NaN."""
    low, high = torch.stack(torch.aminmax(numbers)).tolist()
    return low, high


def histogram_of(
    data: torch.Tensor, low: float, high: float, num_bins: int, read: SafeReader = DIRECT
) -> tuple[int, ...]:
    """Count a tensor's numbers in equal bins of [low, high]; numbers outside are in no bin.

    Args:
        data: a tensor as `readable` returns it.
        low, high: ends of the scale; if they are equal, numbers of this value are counted in the
            middle bin.
        num_bins: number of bins.
        read: reader of its memory.
    """
    data, repeated = unordered(data)
    counts = torch.zeros(num_bins, dtype=torch.int64, device=data.device)
    for numbers in map(numbers_of, map(read.take, pieces(data))):
        if low >= high:
            counts[num_bins // 2] += (numbers == low).sum()
        elif data.device.type == "cpu":
            counts += torch.histc(numbers, num_bins, low, high).long()  # ignores NaN
        else:  # as histc, which GPUs refuse under deterministic algorithms
            inside = numbers[(numbers >= low) & (numbers <= high)]
            bins = ((inside - low) * (num_bins / (high - low))).long().clamp_(0, num_bins - 1)
            counts += torch.bincount(bins, minlength=num_bins)
    return tuple(count * repeated for count in counts.tolist())


_BLOCK = 1 << 16
# Number of words from which a tensor is digested by checksums of blocks.
_LARGE = 1 << 18
# Number of elements from which an expanded tensor's repeated elements are read only once.
_MANY = 1 << 26


def digest_of_bytes(data: bytes) -> str:
    """Return a digest of bytes."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def digest_of_tensor(local: torch.Tensor, read: SafeReader = DIRECT) -> str:
    """Return a digest of a tensor's bits; "" if the tensor cannot be read.

    The digest does not depend on strides or device.

    Args:
        local: a tensor of this rank, not a DTensor.
        read: reader of its memory.
    """
    try:
        if local.layout not in (torch.strided, torch.jagged):
            return ""
        data, _ = readable(local, read.is_beside)
        return digest_of(data, read)
    except (UnreadableError, RuntimeError, TypeError, NotImplementedError):
        return ""


def digest_of(data: torch.Tensor, read: SafeReader = DIRECT) -> str:
    """Return a digest of a tensor that `readable` has returned.

    Args:
        data: the tensor.
        read: reader of its memory.

    Raises:
        Exception: torch cannot view it as bytes.
    """
    num_bytes, remark = data.numel() * data.element_size(), ""
    if data.numel() > _MANY and num_bytes > data.untyped_storage().nbytes():
        data, repeated = unordered(data)
        remark = f"{repeated} times"
    digest = hashlib.blake2b(remark.encode(), digest_size=12)
    parts = map(read.take, pieces(data))
    num_words = data.numel() * max(1, data.element_size() // 4)
    if num_words < _LARGE:
        for piece in parts:
            digest.update(bytes_of(_flat(piece).cpu()))
    else:
        digest.update(_sums(parts, num_words, data.device))
    return digest.hexdigest()


def _flat(piece: torch.Tensor) -> torch.Tensor:
    """Return a piece of a tensor as a contiguous flat tensor."""
    plain = piece.resolve_conj().resolve_neg()
    plain = plain.contiguous()
    # A tensor of one element is contiguous with any stride, but `view` does not accept any.
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
    # One tensor for all sums: many small ones would fragment the memory of the freed pieces, so
    # that later pieces do not fit.
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
    """Write a reversible hash of each 32-bit word in `words`, in which each bit affects all others,
    to `out`. `beside` is scratch memory.
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
