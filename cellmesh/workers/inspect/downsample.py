"""Reduces a part of a 2-D slice of a tensor to pixels, on the tensor's device.

A huge slice is reduced some pixels at a time, so that it needs little additional memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ...wire.inspect import Picture, Pixels
from .chunks import piece_size, readable
from .safe_read import SafeReader
from .summary import tensor_at

# If a slice exceeds the allowed number of elements, it is sampled: a share of that number is read,
# as samples are scattered in memory; a smaller share if they have to be copied one by one.
_SAMPLED_SHARE = 4
_COPIED_SHARE = 64
_MAX_FLOAT32 = torch.finfo(torch.float32).max


def picture(value: Any, subject: Picture, read: SafeReader) -> Pixels:
    """Return a part of a tensor's slice, reduced to pixels (the answer to `Picture`).

    Raises:
        ValueError: the tensor has no such part, or no values.
    """
    part = _part(_dense(value, subject.path, read), subject)
    height, width = min(subject.height, part.shape[0]), min(subject.width, part.shape[1])
    is_exact = (height, width) == part.shape
    is_sampled = not is_exact and part.numel() > subject.max_elements
    if is_sampled:
        share = _COPIED_SHARE if read.is_beside else _SAMPLED_SHARE
        part = _thin(part, height, width, subject.max_elements // share)
    pixels = _reduce(part, height, width, subject, read)
    limited = pixels.clamp(-_MAX_FLOAT32, _MAX_FLOAT32)  # finite numbers stay finite in float32
    pixels = torch.where(torch.isfinite(pixels), limited, pixels).float()
    values = pixels.contiguous().cpu().clone().numpy()  # a copy, as numpy keeps the memory
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return Pixels(values, low, high, is_exact, read.is_beside, is_sampled)


def _dense(value: Any, path: str, read: SafeReader) -> torch.Tensor:
    local = tensor_at(value, path, read.is_beside)
    if local.layout != torch.strided or local.is_nested:
        raise ValueError(
            "only dense tensors have pictures: inspect its `.to_dense()`, or of a nested one its "
            "`.to_padded_tensor(0)`"
        )
    return readable(local, read.is_beside)[0]


def _part(data: torch.Tensor, subject: Picture) -> torch.Tensor:
    """Return the rows and columns of a tensor that a `Picture` asks for, as a 2-D view."""
    chosen = [dim for dim in subject.dims if dim != -1]
    others = [dim for dim in range(data.ndim) if dim not in chosen]
    no_part = ValueError(f"a tensor of the shape {tuple(data.shape)} has no such slice: refresh")
    if len(subject.index) != len(others):
        raise no_part
    try:
        data = data.permute([*others, *chosen])[subject.index]
        for axis, dim in enumerate(subject.dims):
            if dim == -1:
                data = data.unsqueeze(axis)
        for axis, (begin, end) in enumerate((subject.rows, subject.cols)):
            data = data.narrow(axis, begin, end - begin)
    except (IndexError, RuntimeError):
        raise no_part from None
    return data


def _thin(part: torch.Tensor, height: int, width: int, max_elements: int) -> torch.Tensor:
    """Return a view of evenly spaced rows and columns, with at least one of each per pixel."""
    step = math.isqrt(part.numel() // max(max_elements, 1)) + 1
    for axis, side in enumerate((height, width)):
        each = min(step, part.shape[axis] // side)
        part = part.transpose(0, axis)[each // 2 :: each].transpose(0, axis)
    return part


def _reduce(
    part: torch.Tensor, height: int, width: int, subject: Picture, read: SafeReader
) -> torch.Tensor:
    """Return, for each pixel, the mean or the largest magnitude of the tensor's elements in it."""
    rows, cols = (
        torch.arange(side + 1, device="cpu") * size // max(side, 1)
        for side, size in zip((height, width), part.shape, strict=True)
    )
    # Number of pixels to read at once: whole rows of pixels, or a part of one row.
    num_pixels = max(1, 8 * piece_size(part) * height * width // max(1, part.numel()))
    band, strip = max(1, num_pixels // max(width, 1)), max(1, min(num_pixels, width))
    bands = [torch.empty(0, width, dtype=torch.float64, device=part.device)]
    for top in range(0, height, band):
        ys, strips = rows[top : top + band + 1], []
        for left in range(0, width, strip):
            xs = cols[left : left + strip + 1]
            block = read.take(part[ys[0] : ys[-1], xs[0] : xs[-1]])
            if block.is_complex():
                block = block.resolve_conj().abs()
            is_narrow = block.dtype.itemsize <= 2 or block.dtype == torch.float32
            block = block.to(torch.float32 if is_narrow else torch.float64)
            for edges in (ys, xs):  # reduce rows, then columns
                block = _join(block, edges.diff(), subject.reduction).t()
            strips.append(block)
        bands.append(torch.cat(strips, 1))
    return torch.cat(bands)


def _join(block: torch.Tensor, sizes: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce consecutive groups of a block's rows to one row each; `sizes`: number of rows in each
    group.
    """
    is_mean = reduction == "mean"
    joined: torch.Tensor = torch.segment_reduce(
        (block if is_mean else block.abs()).contiguous(),
        "mean" if is_mean else "max",
        lengths=sizes.to(block.device),
        axis=0,
        unsafe=True,
    )
    return joined
