"""Finds which bytes of a pushed value each rank reads, so that hosts get their ranks' parts."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...wire.codec import Frame
from ...wire.segments import Spans, offsets
from ...wire.values import Box

Boxes = Callable[[Sequence[int]], Mapping[int, Box]]


def find_needed(
    leaves: Sequence[Any], buffers: Sequence[Frame], sizes: Sequence[int], boxes: Boxes
) -> dict[int, Spans]:
    """Find the ranges of a segment that each rank reads of the values in it.

    Args:
        leaves: the tensors and arrays that were pickled, from which each rank cuts a part.
        buffers: of their pickle, out of band.
        sizes: of what is in the segment: the buffers, and perhaps the pickle.
        boxes: returns each rank's part of a whole of some shape.

    Returns:
        rank -> ranges. Where it is not certain that a buffer is one whole leaf, in C order, each
        rank reads all of the buffer.
    """
    places = [_place_of(leaf) for leaf in leaves]
    needed: dict[int, list[tuple[int, int]]] = {}
    everybody = list(boxes((1,)))
    for number, (at, size) in enumerate(zip(offsets(sizes), sizes, strict=True)):
        inside = _inside(places, buffers[number]) if number < len(buffers) else []
        spans = dict.fromkeys(everybody, (0, size))
        if len(inside) == 1 and inside[0][1] == size and inside[0][2]:
            leaf = inside[0][3]
            for rank, box in boxes(tuple(leaf.shape)).items():
                spans[rank] = span_of(box, tuple(leaf.shape), size)
        for rank, (start, stop) in spans.items():
            if start < stop:
                needed.setdefault(rank, []).append((at + start, at + stop))
    return {rank: tuple(needed.get(rank, ())) for rank in everybody}


def span_of(box: Box, shape: Sequence[int], num_bytes: int) -> tuple[int, int]:
    """Return the range of bytes from a box's first element to its last, in an array in C order."""
    num_elements = math.prod(shape)
    if not num_elements or not all(length for _, length in box):
        return 0, 0
    first = last = 0
    for (start, length), size in zip(box, shape, strict=True):
        first, last = first * size + start, last * size + start + length - 1
    item = num_bytes // num_elements
    return first * item, (last + 1) * item


_Place = tuple[int, int, bool, Any]  # address, bytes, whether it is in C order, and the leaf


def _place_of(leaf: Any) -> _Place:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.size:
        reach = [(n - 1) * stride for n, stride in zip(leaf.shape, leaf.strides, strict=True)]
        low = leaf.ctypes.data + sum(min(0, each) for each in reach)
        num_bytes = sum(map(abs, reach)) + leaf.itemsize
        return low, num_bytes, leaf.flags.c_contiguous, leaf
    if torch is not None and isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
        storage = leaf.untyped_storage()
        if leaf.is_contiguous() and leaf.nbytes == storage.nbytes():
            return leaf.data_ptr(), leaf.nbytes, True, leaf
        return storage.data_ptr(), storage.nbytes(), False, leaf
    return 0, 0, False, leaf


def _inside(places: Sequence[_Place], buffer: Frame) -> list[_Place]:
    """Return the tensors and arrays whose memory overlaps a buffer."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        low = numpy.frombuffer(buffer, "u1").ctypes.data
    else:  # of a tensor, whose memory is writable
        low = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    high = low + len(buffer)
    return [place for place in places if place[0] < high and low < place[0] + place[1]]
