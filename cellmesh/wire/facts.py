"""What inspection tells of a value: the answer to `Inspect` and `Peek`."""

from __future__ import annotations

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of a value.

    Statistics are of the rank's own (local) part and cover its finite elements; they are None for values
    without numbers.

    Attributes:
        kind: the value's type.
        text: a short repr, for values that are no tensors.
        shape: global shape.
        local_shape: shape of the rank's part (the shape, unless it is a DTensor).
        dtype: element type.
        device: where it lies.
        placements: DTensor placements, "" for others.
        requires_grad: whether autograd follows it.
        num_bytes: size of the rank's part.
        min, max, mean, std, norm: statistics.
        num_nan: NaN elements.
        num_inf: infinite elements.
        shard: which part of the whole this is; ranks with the same shard should hold the same values.
        digest: digest of the rank's part, bit for bit.
    """

    kind: str
    text: str = ""
    shape: tuple[int, ...] | None = None
    local_shape: tuple[int, ...] | None = None
    dtype: str = ""
    device: str = ""
    placements: str = ""
    requires_grad: bool = False
    num_bytes: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    shard: tuple[int, ...] = ()
    digest: str = ""
