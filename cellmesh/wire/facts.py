"""What inspection tells of one value on one rank."""

from __future__ import annotations

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of a value.

    Statistics are of the rank's own (local) part and cover its finite elements; they are None for
    values without numbers.

    Attributes:
        kind: the value's type.
        text: a short repr, for values that are no tensors.
        shape: global shape; None for values that are no tensors, and for tensors that have none
            yet.
        local_shape: shape of the rank's part (the shape, unless it is a DTensor).
        offset: where the rank's part begins in the whole, a number a dim; () if it is no DTensor.
        strides: of the rank's part, in elements; None where its layout has none.
        layout: how its elements lie: ``strided``, ``sparse_coo``, ...
        dtype: element type.
        device: where it lies.
        placements: DTensor placements, "" for others.
        requires_grad: whether autograd follows it.
        mesh_dim_names, mesh_shape, mesh_ranks, coordinate: a DTensor's mesh, its ranks in row-major
            order, and where the rank is in it.
        num_elements: of the rank's part.
        num_bytes: size of the rank's part.
        storage_bytes: size of the memory that it is a view of; 0 if unknown.
        is_view: it shows another tensor's memory.
        min, max, mean, std, norm: statistics.
        num_nan: NaN elements.
        num_inf: infinite elements.
        num_zeros: elements that are zero.
        note: what cannot be told, and why; how statistics are to be read. "" if there is nothing to
            add.
        shard: which part of the whole this is; ranks with the same shard should hold the same
            values.
        digest: digest of the rank's part, bit for bit.
    """

    kind: str
    text: str = ""
    shape: tuple[int, ...] | None = None
    local_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    layout: str = ""
    dtype: str = ""
    device: str = ""
    placements: str = ""
    requires_grad: bool = False
    mesh_dim_names: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    mesh_ranks: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    num_elements: int = 0
    num_bytes: int = 0
    storage_bytes: int = 0
    is_view: bool = False
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    num_zeros: int = 0
    note: str = ""
    shard: tuple[int, ...] = ()
    digest: str = ""
