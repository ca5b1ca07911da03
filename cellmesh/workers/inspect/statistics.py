"""Statistics and histograms of a tensor's numbers, computed piece by piece."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .chunks import numbers_of, pieces, unordered
from .safe_read import DIRECT, SafeReader

# A range that is not computed with as it is.
_WIDE = 2.0**512


@dataclass
class Totals:
    """Running totals of the pieces of a tensor: of finite numbers, and counts of the others."""

    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0  # of the distances from the mean
    num_nan: int = 0
    num_inf: int = 0
    num_zeros: int = 0

    def add(self, count: int, low: float, high: float, mean: float, squares: float) -> None:
        """Add the finite numbers of one more piece (Chan's update)."""
        if not count:
            return
        total = self.count + count
        distance = mean - self.mean
        self.squares += squares + distance * distance * self.count * count / total
        self.mean += distance * count / total
        self.count = total
        self.low, self.high = min(self.low, low), max(self.high, high)


def statistics(data: torch.Tensor, read: SafeReader = DIRECT) -> dict[str, Any]:
    """Compute the statistics of a tensor for its `TensorSummary`.

    Args:
        data: see `readable`.
        read: how it is read.

    Raises:
        Exception: torch cannot make numbers of its elements.
    """
    data, repeated = unordered(data)
    totals = Totals()
    for piece in map(read.take, pieces(data)):
        _add(totals, piece)
    found: dict[str, Any] = {
        "num_nan": totals.num_nan * repeated,
        "num_inf": totals.num_inf * repeated,
        "num_zeros": totals.num_zeros * repeated,
    }
    if totals.count:
        variance = totals.squares / totals.count
        squares = totals.squares + totals.mean * totals.mean * totals.count
        found |= {
            "min": totals.low,
            "max": totals.high,
            "mean": totals.mean,
            "std": math.sqrt(variance),
            "norm": math.sqrt(squares * repeated),
        }
    return found


def _add(totals: Totals, piece: torch.Tensor) -> None:
    numbers = numbers_of(piece)
    # What has the same extremes in fewer bytes is quicker to read.
    low, high = _extremes(piece if piece.dtype == torch.float32 else numbers)
    if not (math.isfinite(low) and math.isfinite(high)):
        numbers = _without_odd(totals, piece, numbers)
        if not numbers.numel():
            return
        low, high = _extremes(numbers)
    if low <= 0 <= high:
        totals.num_zeros += _num_zeros(piece if piece.is_complex() else numbers)
    if low == high:
        totals.add(numbers.numel(), low, high, low, 0.0)
        return
    mean = (numbers.sum() / numbers.numel()).item()
    is_copy = numbers.data_ptr() != piece.data_ptr()  # else it is the user's own memory
    distances = numbers.sub_(mean) if is_copy else numbers - mean
    totals.add(numbers.numel(), low, high, mean, torch.dot(distances, distances).item())


def _extremes(numbers: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest number of a piece; NaN if there is one."""
    low, high = torch.stack(torch.aminmax(numbers)).tolist()
    return low, high


def _without_odd(totals: Totals, piece: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the finite numbers of a piece, and count NaN and infinities; a complex number counts
    once.
    """
    elements = torch.complex(*numbers.view(-1, 2).unbind(1)) if piece.is_complex() else numbers
    totals.num_nan += int(torch.isnan(elements).sum())
    totals.num_inf += int(torch.isinf(elements).sum())
    return numbers[torch.isfinite(numbers)]


def _num_zeros(numbers: torch.Tensor) -> int:
    return numbers.numel() - int(torch.count_nonzero(numbers))


def histogram_of(
    data: torch.Tensor, low: float, high: float, num_bins: int, read: SafeReader = DIRECT
) -> list[int]:
    """Count a tensor's numbers in equal bins of [low, high]; numbers outside are in no bin.

    Args:
        data: see `readable`.
        low, high: the scale; where they are equal, what is equal to them is counted in the middle
            bin.
        num_bins: how many.
        read: how it is read.

    Raises:
        ValueError: there would be no bin.
    """
    if num_bins < 1:
        raise ValueError("a histogram has at least one bin")
    data, repeated = unordered(data)
    # The range of float64, and what torch multiplies it by, is more than float64 holds.
    unit = 1.0 if high - low < _WIDE else 1 / _WIDE
    low, high = low * unit, high * unit
    counts = torch.zeros(num_bins, dtype=torch.int64, device=data.device)
    for piece in map(read.take, pieces(data)):
        numbers = numbers_of(piece)
        if unit != 1.0:
            numbers = numbers * unit
        if low >= high:
            counts[num_bins // 2] += (numbers == low).sum()
            continue
        if data.device.type == "cpu":
            counts += torch.histc(numbers, num_bins, low, high).long()  # leaves out NaN, too
            continue
        # As histc does, which is not deterministic on GPUs, and refused where that is asked for.
        inside = numbers[(numbers >= low) & (numbers <= high)]  # leaves out NaN, too
        bins = ((inside - low) * (num_bins / (high - low))).long().clamp_(0, num_bins - 1)
        counts += torch.bincount(bins, minlength=num_bins)
    return [count * repeated for count in counts.tolist()]
