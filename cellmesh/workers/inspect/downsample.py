"""Reduces a part of a 2-D slice of a tensor to pixels, on the tensor's device.

A huge slice is read some pixels at a time: what is taken beside it stays small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...wire.inspect import Element, Picture, Pixels
from .chunks import layout_of, piece_size, readable
from .overview import tensor_at
from .safe_read import SafeReader, UnreadableError

# Sparse and nested tensors, and those quantised per channel, are made dense for a picture up to
# this size.
_MAX_DENSE = 1 << 24
# Where a slice is too large to be read whole, what part of the allowed elements is read: they lie
# apart. Where they have to be copied one by one, it is less.
_SAMPLED_SHARE = 4
_COPIED_SHARE = 64
_MAX_FLOAT32 = torch.finfo(torch.float32).max


def picture(value: Any, subject: Picture, read: SafeReader) -> Pixels:
    """Return a part of a tensor's slice, reduced to pixels (the answer to `Picture`).

    Raises:
        ValueError: the tensor has no such part, or no values.
    """
    local = tensor_at(value, subject.path, read.is_beside)
    part = _part(_uniform(_dense(local, read), read), subject)
    num_rows, num_cols = part.shape
    height, width = min(subject.height, num_rows), min(subject.width, num_cols)
    is_sampled = False
    if subject.reduction == "stride" or (height, width) == (num_rows, num_cols):
        pixels = _first_of_each(part, height, width, subject, read)
    else:
        pixels, is_sampled = _reduce(part, height, width, subject, read)
    pixels = pixels if subject.exactly else _to_float32(pixels)
    values = pixels.cpu().clone().numpy()  # what numpy has seen can never be resized
    finite = values[np.isfinite(values)]
    return Pixels(
        values,
        float(finite.min()) if finite.size else 0.0,
        float(finite.max()) if finite.size else 0.0,
        (height, width) == (num_rows, num_cols),
        read.is_beside,
        is_sampled,
    )


def element(value: Any, subject: Element, read: SafeReader) -> str:
    """Return one element of a tensor as text (the answer to `Element`).

    Raises:
        ValueError: there is none at this index.
    """
    local = tensor_at(value, subject.path, read.is_beside)
    data = _dense(local, read)
    _check_index(subject.index, data.shape)
    found = read.take(data[subject.index] if data.ndim else data)
    if subject.exactly:
        return repr(found.item())
    if found.is_quantized:
        return f"{found.item()!r} ({found.int_repr().item()})"
    if found.dtype == torch.float32:  # as short as float32 can be told apart
        return str(np.float32(found.item()))
    if found.dtype == torch.complex64:
        return str(np.complex64(found.item()))
    return repr(found.item())


def _dense(local: torch.Tensor, read: SafeReader) -> torch.Tensor:
    """Return a tensor, also a sparse or nested one, as a dense one, which can be sliced."""
    try:
        data, _ = readable(local, read.is_beside)
    except UnreadableError as error:
        raise ValueError(str(error)) from None
    if local.layout == torch.strided and not local.is_nested:
        return data
    if read.is_beside:
        raise ValueError(
            f"a {layout_of(local)} tensor is made dense for that: it can be when no cell runs"
        )
    if local.is_nested:
        local = torch.nested.to_padded_tensor(local.detach(), 0.0)
    if local.numel() > _MAX_DENSE:
        raise ValueError(
            f"{layout_of(local)}: {local.numel():,} elements are too many to be made dense"
        )
    return local.detach().to_dense() if local.layout != torch.strided else local.detach()


def _uniform(data: torch.Tensor, read: SafeReader) -> torch.Tensor:
    """Dequantise a tensor whose channels have different scales."""
    if not data.is_quantized or data.qscheme() in (
        torch.per_tensor_affine,
        torch.per_tensor_symmetric,
    ):
        return data
    if data.numel() > _MAX_DENSE:
        raise ValueError(
            f"quantised per channel: {data.numel():,} elements are too many for a picture"
        )
    return read.take(data).dequantize()


def _check_index(index: Sequence[int], shape: Sequence[int]) -> None:
    if len(index) != len(shape) or not all(
        0 <= i < size for i, size in zip(index, shape, strict=True)
    ):
        raise ValueError(
            f"there is no element {tuple(index)} in a tensor of the shape {tuple(shape)}"
        )


def _part(data: torch.Tensor, subject: Picture) -> torch.Tensor:
    """Return the rows and columns of a tensor that a `Picture` asks for, as a 2-D view."""
    chosen = [dim for dim in subject.dims if dim != -1]
    others = [dim for dim in range(data.ndim) if dim not in chosen]
    if len(set(chosen)) != len(chosen) or any(not 0 <= dim < data.ndim for dim in chosen):
        raise ValueError(f"a tensor with {data.ndim} dims has no slice of dims {subject.dims}")
    if len(subject.index) != len(others):
        raise ValueError(
            f"a slice of dims {subject.dims} of a tensor with {data.ndim} dims needs "
            f"{len(others)} more indices, not {len(subject.index)}"
        )
    if subject.height < 1 or subject.width < 1:
        raise ValueError("a picture has at least one pixel")
    if subject.reduction not in ("mean", "absmax", "stride"):
        raise ValueError(f"there is no reduction {subject.reduction!r}")
    _check_index(subject.index, [data.shape[dim] for dim in others])
    for dim, index in sorted(zip(others, subject.index, strict=True), reverse=True):
        data = data.select(dim, index)
    kept = sorted(chosen)
    data = data.permute([kept.index(dim) for dim in chosen])
    for axis, dim in enumerate(subject.dims):
        if dim == -1:
            data = data.unsqueeze(axis)
    for axis, (begin, end) in enumerate((subject.rows, subject.cols)):
        if not 0 <= begin <= end <= data.shape[axis]:
            raise ValueError(
                f"there are {data.shape[axis]} {('rows', 'columns')[axis]}, not [{begin}, {end})"
            )
        data = data.narrow(axis, begin, end - begin)
    return data


def _edges(num_pixels: int, size: int) -> torch.Tensor:
    """Return the row (or column) at which each pixel begins, and at which the last one ends."""
    return (
        torch.arange(num_pixels + 1, dtype=torch.int64, device="cpu") * size // max(num_pixels, 1)
    )


def _first_of_each(
    part: torch.Tensor, height: int, width: int, subject: Picture, read: SafeReader
) -> torch.Tensor:
    """Return the first element below each pixel, and read no other."""
    num_rows, num_cols = part.shape
    if (height, width) == (num_rows, num_cols):
        pixels = read.take(part)
    else:
        rows = _edges(height, num_rows)[:-1].to(part.device)
        cols = _edges(width, num_cols)[:-1].to(part.device)
        pixels = read.pick(part, (rows[:, None], cols[None, :]))
    if subject.reduction == "absmax":
        return _plain(pixels, subject).abs()
    if subject.exactly and pixels.dtype in (torch.int64, torch.uint64):
        return pixels
    return _plain(pixels, subject)


def _plain(part: torch.Tensor, subject: Picture) -> torch.Tensor:
    """Convert a tensor to a dtype that torch computes with: float64 where float32 would lose
    digits.
    """
    if part.is_quantized:
        part = part.dequantize()
    if part.is_complex():
        part = part.resolve_conj().abs()
    is_wide = part.dtype == torch.float64 or (
        not part.is_floating_point() and part.dtype.itemsize > 2
    )
    return part.to(torch.float64 if is_wide or subject.exactly else torch.float32)


def _to_float32(pixels: torch.Tensor) -> torch.Tensor:
    """Convert pixels to float32, keeping finite numbers finite."""
    if pixels.dtype == torch.float32:
        return pixels.contiguous()
    limited = pixels.clamp(-_MAX_FLOAT32, _MAX_FLOAT32)
    return torch.where(torch.isfinite(pixels), limited, pixels).float().contiguous()


def _reduce(
    part: torch.Tensor, height: int, width: int, subject: Picture, read: SafeReader
) -> tuple[torch.Tensor, bool]:
    """Return the mean or the largest magnitude of the elements of each pixel, and whether only a
    sample was read.
    """
    is_mean = subject.reduction == "mean"
    num_rows, num_cols = part.shape
    if num_rows * num_cols > subject.max_elements:
        share = _COPIED_SHARE if read.is_beside else _SAMPLED_SHARE
        return _sample(part, height, width, subject, subject.max_elements // share, read), True
    row_edges, col_edges = _edges(height, num_rows), _edges(width, num_cols)
    # Pixels that are read together: rows of them, or a part of one row.
    num_pixels = max(1, 8 * piece_size(part) * height * width // max(1, num_rows * num_cols))
    band, strip = max(1, num_pixels // width), min(num_pixels, width)
    bands = []
    for top in range(0, height, band):
        ys = row_edges[top : top + band + 1]
        strips = []
        for left in range(0, width, strip):
            xs = col_edges[left : left + strip + 1]
            block = _plain(read.take(part[ys[0] : ys[-1], xs[0] : xs[-1]]), subject)
            strips.append(_join(_join(block, ys - ys[0], 0, is_mean), xs - xs[0], 1, is_mean))
        bands.append(torch.cat(strips, 1))
    return torch.cat(bands), False


def _join(part: torch.Tensor, edges: torch.Tensor, axis: int, is_mean: bool) -> torch.Tensor:
    """Reduce the rows (axis 0) or columns between each two edges to one row or column."""
    count = len(edges) - 1
    each, rest = divmod(part.shape[axis], count)
    if rest == 0:
        whole = torch.unflatten(part, axis, (count, each))
        if is_mean:
            return whole.mean(axis + 1)
        return torch.maximum(whole.amax(axis + 1), whole.amin(axis + 1).neg())
    # Sizes differ by one at most: the first lines of all pixels, then the second ones, and so on.
    starts, sizes = edges[:-1].to(part.device), edges.diff().to(part.device)
    total = _take(part, starts, axis, is_mean)
    for step in range(1, each):
        _put_in(total, _take(part, starts + step, axis, is_mean), is_mean)
    longer = torch.nonzero(sizes > each).squeeze(1)
    lines = total.index_select(axis, longer)
    _put_in(lines, _take(part, starts[longer] + each, axis, is_mean), is_mean)
    total.index_copy_(axis, longer, lines)
    shape = (1, -1) if axis else (-1, 1)
    return total.div_(sizes.to(total.dtype).view(shape)) if is_mean else total


def _take(part: torch.Tensor, lines: torch.Tensor, axis: int, is_mean: bool) -> torch.Tensor:
    taken = part.index_select(axis, lines)
    return taken if is_mean else taken.abs()


def _put_in(total: torch.Tensor, lines: torch.Tensor, is_mean: bool) -> None:
    if is_mean:
        total.add_(lines)
    else:
        torch.maximum(total, lines, out=total)


def _sample(
    part: torch.Tensor,
    height: int,
    width: int,
    subject: Picture,
    max_elements: int,
    read: SafeReader,
) -> torch.Tensor:
    """Return a grid of some elements, evenly spaced, of the block that each pixel stands for."""
    is_mean = subject.reduction == "mean"
    num_rows, num_cols = part.shape
    most = max(1, math.isqrt(max_elements // (height * width)))
    rows_each = min(most, num_rows // height)
    cols_each = min(most, num_cols // width)
    rows = _spread(_edges(height, num_rows), rows_each).to(part.device)
    cols = _spread(_edges(width, num_cols), cols_each).to(part.device).reshape(-1)
    total: torch.Tensor | None = None
    for step in range(rows_each):
        picked = _plain(read.pick(part, (rows[:, step, None], cols[None, :])), subject)
        lines = torch.unflatten(picked, 1, (width, cols_each))
        reduced = lines.mean(2) if is_mean else lines.abs().amax(2)
        if total is None:
            total = reduced
        else:
            _put_in(total, reduced, is_mean)
    assert total is not None
    return total / rows_each if is_mean else total


def _spread(edges: torch.Tensor, each: int) -> torch.Tensor:
    """Return, for each pixel, the indices of rows (or columns) evenly spaced within it."""
    steps = torch.arange(each, dtype=torch.int64, device="cpu")
    return edges[:-1, None] + edges.diff()[:, None] * (2 * steps + 1) // (2 * each)
