"""Queries: requests of the notebook to a rank about its values and names, and the answers.

A query changes nothing, and runs no user code: an expression is a path of names, attributes and
constant indices, and is followed again for each query. Any other expression (or a path through a
property) is run only if an `Overview` asks for it, once, on the rank's main thread; the rank keeps
its value under a `token`, to which later queries refer, until it runs another one.

A busy rank answers from its control thread; values may then be torn, as the main thread keeps
writing. A rank that cannot answer returns a `Refusal`, so that its problem does not fail the run.

Answers travel pickled, arrays as numpy's: nothing here needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

import msgspec

from .verbs import FeatureRequest

Reduction = Literal["mean", "absmax"]


class Query(FeatureRequest, frozen=True):
    """Base class of the requests that ask a rank about its values and names."""

    handler: ClassVar[str] = "inspect.handler"
    is_query: ClassVar[bool] = True
    needs_room: ClassVar[bool] = False


# ---------------------------------------------------------------- values


class ValueQuery(Query, frozen=True):
    """Base class of the requests about the value of an expression, or its part at a `path` ("": the
    whole value). With a `token`, the value is the one that the rank keeps under the token.
    """

    expression: str
    path: str = ""
    token: str = ""


class Overview(ValueQuery, frozen=True, kw_only=True):
    """Ask a rank for the tensors in a value: the value itself, or those of a module, an optimizer
    or a container. Answer: `ValueSummary`.

    With a `path`, only the tensor there. For several tensors, statistics and digests are computed
    until `max_elements` elements have been read; the `note` of the others mentions this: ask for
    each of them by its path.

    `grads`: the gradients of the tensors in it instead, under their owners' paths with ``.grad``;
    None for a tensor without a gradient.

    `runs`: if the expression needs code to run, the main thread runs it and keeps its value under
    `token`. The query must go to all ranks that may take part in the expression's collectives.
    """

    grads: bool = False
    max_items: int = 1000
    max_elements: int = 1 << 28
    runs: bool = False


class Histogram(ValueQuery, frozen=True, kw_only=True):
    """Ask a rank for a tensor's histogram: the number of finite elements in equal bins of [low,
    high].

    Answer: tuple of a count per bin.

    If `low` equals `high`, elements equal to it are counted in the middle bin.
    """

    low: float
    high: float
    num_bins: int


class Picture(ValueQuery, frozen=True, kw_only=True):
    """Ask a rank for a part of a 2-D slice of one tensor, reduced to pixels. Answer: `Pixels`.

    For a DTensor, it is a slice of the rank's local part. `dims` are the dims of the rows and of
    the columns, in either order; -1 is a dim of size one that the tensor does not have (for a 1-D
    tensor, (-1, 0) is one row, and (0, -1) one column). `index` has a number for each of the other
    dims, in their order. `rows` and `cols` are [begin, end) in the two dims. At most `height` x
    `width` numbers are sent.

    Pixel i covers the rows [i * n // h, (i + 1) * n // h) of n, where h is the smaller one of
    `height` and n; columns likewise. Its value is the mean or the largest magnitude of its elements
    or, if the slice has more than `max_elements`, of evenly spaced ones. Complex elements are shown
    by their magnitude.
    """

    index: tuple[int, ...] = ()
    dims: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]
    height: int
    width: int
    reduction: Reduction = "mean"
    max_elements: int = 1 << 26


class TensorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's summary of a tensor (shape, placements, statistics), or of a plain value.

    Statistics are of the rank's own (local) part and cover its finite elements; they are None for
    values without numbers.

    Attributes:
        path: path from the inspected value, "" for the value itself; or the name of a variable.
        kind: name of the value's type.
        text: short repr of a value that is not a tensor; the number in a tensor without dims.
        shape: global shape; None for values that are not tensors, and for tensors without a shape
            yet.
        local_shape: shape of the rank's part (the shape, unless it is a DTensor).
        offset: offset of the rank's part in the whole tensor, a number per dim; () if it is no
            DTensor.
        strides: strides of the rank's part, in elements; None if its layout has none.
        dtype: element type.
        device: device of the tensor.
        placements: DTensor placements, "" for others.
        requires_grad: whether autograd tracks it.
        mesh_dim_names, mesh_ranks, coordinate: names of the dims of a DTensor's mesh, the mesh's
            ranks in row-major order, and the rank's coordinate in it.
        num_elements: number of elements of the rank's part.
        num_bytes: size of the rank's part, in bytes.
        min, max, mean, std, norm: statistics.
        num_nan: number of NaN elements.
        num_inf: number of infinite elements.
        num_zeros: number of elements that are zero.
        note: missing information and the reason, or a hint on how to read the statistics; "" for
            none.
        shard: identity of the rank's part in the whole; ranks with the same shard should hold the
            same values.
        digest: digest of the rank's part, bit for bit.
    """

    kind: str
    path: str = ""
    text: str = ""
    shape: tuple[int, ...] | None = None
    local_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    dtype: str = ""
    device: str = ""
    placements: str = ""
    requires_grad: bool = False
    mesh_dim_names: tuple[str, ...] = ()
    mesh_ranks: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    num_elements: int = 0
    num_bytes: int = 0
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

    @property
    def is_scalar(self) -> bool:
        """Whether users see one value: that of a value which is not a tensor, or of a tensor
        without dims.
        """
        return bool(self.text) and not self.shape

    def at(self, path: str) -> TensorSummary:
        """Return a copy of the summary with another path."""
        return msgspec.structs.replace(self, path=path)


class ValueSummary(msgspec.Struct, frozen=True):
    """A rank's answer to `Overview`: summaries of the tensors in a value.

    Attributes:
        kind: name of the value's type.
        text: short description of a value that is not a tensor, such as the name of its class.
        items: summaries of its tensors and of plain values beside them, which never displace a
            tensor.
        num_left_out: number of items left out.
        is_torn: whether it was read beside the main thread, which may have changed it.
    """

    kind: str
    text: str
    items: tuple[TensorSummary, ...]
    num_left_out: int = 0
    is_torn: bool = False


class Pixels(msgspec.Struct, frozen=True):
    """A rank's answer to `Picture`: a part of a tensor's slice as a small array.

    Attributes:
        values: [height, width] or smaller; NaN and infinite where the reduced elements are.
        low, high: smallest and largest finite value; 0 without any.
        is_exact: whether every pixel is one element.
        is_torn: see `ValueSummary`.
        is_sampled: whether some elements were skipped (`max_elements` of `Picture`): NaNs may have
            been missed.
    """

    values: npt.NDArray[np.float32]
    low: float
    high: float
    is_exact: bool
    is_torn: bool = False
    is_sampled: bool = False


# ---------------------------------------------------------------- names


class Names(Query, frozen=True):
    """Ask a rank for the user's variables on it whose names match a pattern (``*``, ``?``).

    Answer: tuple of a `TensorSummary` per name, whose path is the name.
    """

    pattern: str = "*"


# ---------------------------------------------------------------- code that is being typed


class Complete(Query, frozen=True):
    """Ask a rank for completions at `cursor` (in characters) in `code`. Answer: `Completions`.

    `users_only`: complete only names that the user has bound, no builtins or keywords.
    """

    handler: ClassVar[str] = "complete"

    code: str
    cursor: int
    users_only: bool = False


class Explain(Query, frozen=True):
    """Ask a rank for the help of ``obj?`` (`detail` 0) or ``obj??`` (1) on a path of names,
    attributes and indices.

    Answer: str, with ANSI colours; "" if the path does not exist or only code could resolve it.
    """

    handler: ClassVar[str] = "complete"

    name: str
    detail: int = 0


class Completions(msgspec.Struct, frozen=True):
    """A rank's answer to `Complete`: texts that may replace ``code[begin:end]``, each with its
    kind.

    `is_whole`: whether no other text can stand there, as after the dot of a known object.
    """

    begin: int
    end: int
    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    is_whole: bool = False


# ---------------------------------------------------------------- time


class HistoryQuery(Query, frozen=True):
    """Ask a rank for the last cells that it ran, and the collectives in them. Answer: `trace.Past`.

    At most `max_operations` are sent, the newest ones.
    """

    num_cells: int = 5
    max_operations: int = 20_000


class Refusal(msgspec.Struct, frozen=True):
    """Answer of a rank that cannot answer a query, with the reason; `needs_code`: an answer would
    require running user code.
    """

    type_name: str
    text: str
    needs_code: bool = False

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}"


AnyRequest = Overview | Histogram | Picture | Names | HistoryQuery
CompletionRequest = Complete | Explain
