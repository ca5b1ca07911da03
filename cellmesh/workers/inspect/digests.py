"""Digests of tensors, bit for bit, at about the speed of memory; equal digests mean equal
replicas.

A small tensor's is a hash of its bytes. A large one is hashed where it lies, on a GPU as well: its
elements, as words of 32 bits, go through a mixing function that maps no two words to one, and are
summed up with odd weights by their position, twice, block by block; what crosses to the CPU is two
sums a block, which are hashed. Of two tensors that differ in one word only, a sum always differs;
of others, both sums agree by a chance of about 2^-64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from .chunks import pieces, readable, run_of, unordered
from .cpu_memory import bytes_of
from .safe_read import DIRECT, SafeReader, UnreadableError

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
    """Return a digest of the tensors that `readable` has returned.

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
    """Return a digest of each run of elements, in row-major order.

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
    """Return a piece as a contiguous flat tensor."""
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
    """Return two sums of each block of words."""
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
    """Return odd numbers without a pattern."""
    counted = (
        torch.arange(_BLOCK, dtype=torch.int32, device=device).mul_(-1640531527).add_(seed * 40503)
    )
    mixed, beside = torch.empty_like(counted), torch.empty_like(counted)
    _mix(counted, mixed, beside)
    return mixed.bitwise_or_(1)
