"""Queries: requests of the notebook to a rank about its values and names, and the answers.

A query changes nothing, and runs no user code: an expression is a path of names, attributes and
constant indices, and is followed again for each question. One that is more than that (or leads
through a property, say) is run only where an `Overview` says so, once, on the rank's main thread;
the rank keeps its value under a `token`, by which later questions are about that very value.

A rank that is busy answers from its control thread; then values may be torn: the main thread goes
on writing. What cannot be answered is a `Refusal`, so that one rank's trouble is no failure of
the run.

Answers travel pickled, arrays as numpy's: nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

import msgspec

from .verb import FeatureRequest

Reduction = Literal["mean", "absmax"]


class Query(FeatureRequest, frozen=True):
    """Base class of the requests that ask a rank about its values and names."""

    is_query: ClassVar[bool] = True
    needs_room: ClassVar[bool] = False


# ---------------------------------------------------------------- values


class ValueQuery(Query, frozen=True):
    """Base class of the requests about the value of an expression, or the part at a `path` in it:
    "" is the value itself. With a `token`, it is the value that the rank keeps under that.
    """

    expression: str
    path: str = ""
    token: str = ""


class Overview(ValueQuery, frozen=True, kw_only=True):
    """Ask for the tensors in a value: itself, or those of a module, an optimizer or a container.
    Answer: `ValueSummary`.

    With a `path`, only the one there. Of a nest, statistics and digests are computed until
    `max_elements` elements have been read; the `note` of the others says so: ask for those with
    their path.

    `grads`: the gradients of the tensors in it instead, under their owners' paths with ``.grad``;
    None of those that have none.

    `runs`: where the expression has to run code, it is run, and its value kept under `token`; never
    beside the main thread. All ranks that may be in the expression's collectives are to be asked.
    """

    grads: bool = False
    max_items: int = 1000
    max_elements: int = 1 << 28
    runs: bool = False


class Histogram(ValueQuery, frozen=True, kw_only=True):
    """Ask for a tensor's histogram: the number of finite elements in equal bins of [low, high].

    Answer: tuple of a count per bin.

    Where `low` is `high`, elements equal to it are counted in the middle bin.
    """

    low: float
    high: float
    num_bins: int


class Picture(ValueQuery, frozen=True, kw_only=True):
    """Ask for a part of a 2-D slice of one tensor, reduced to pixels. Answer: `Pixels`.

    Of a DTensor, it is the rank's part that is looked at. `dims` are those of the rows and of the
    columns, in either order; -1 is a dim of size one that the tensor does not have (of a 1-D
    tensor, (-1, 0) is one row, and (0, -1) one column). `index` has a number for each of the other
    dims, in their order. `rows` and `cols` are [begin, end) in the two. No more than `height` x
    `width` numbers cross the wire.

    Pixel i covers the rows [i * n // h, (i + 1) * n // h) of n, where h is the smaller one of
    `height` and n; columns likewise. It is the mean or the largest magnitude of its elements; where
    the slice has more than `max_elements`, of some of them, evenly spaced. Complex elements are
    shown by their magnitude. `exactly`, for a difference: the numbers are computed and sent as
    float64, else as float32.
    """

    index: tuple[int, ...] = ()
    dims: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]
    height: int
    width: int
    reduction: Reduction = "mean"
    max_elements: int = 1 << 26
    exactly: bool = False


class Element(ValueQuery, frozen=True, kw_only=True):
    """Ask for one element of a tensor (of a DTensor: of the rank's part), as text. Answer: str.

    It is as short as the tensor's type can be told apart; `exactly`, for a difference: it is what
    the element is, in decimals.
    """

    index: tuple[int, ...]
    exactly: bool = False


class Digests(ValueQuery, frozen=True, kw_only=True):
    """Ask for digests of ranges of a tensor's elements, in row-major order of the rank's part.
    Answer: tuple of str.

    `parts` are [begin, end) of each run, ascending; they do not overlap.
    """

    parts: tuple[tuple[int, int], ...]


class Elements(ValueQuery, frozen=True, kw_only=True):
    """Ask for the elements of a tensor in some ranges (see `Digests`). Answer: an array of float64,
    complex128, or 64-bit integers where the tensor's elements are such.
    """

    parts: tuple[tuple[int, int], ...]


class Forget(Query, frozen=True):
    """Ask a rank to drop values that it keeps for inspections. Answer: None."""

    tokens: tuple[str, ...]


class TensorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's summary of a tensor (shape, placements, statistics), or of a plain value.

    Statistics are of the rank's own (local) part and cover its finite elements; they are None for
    values without numbers.

    Attributes:
        path: where it is in the inspected value, "" for the value itself; or its name.
        kind: the value's type.
        text: a short repr, for values that are no tensors; the number in a tensor without dims.
        shape: global shape; None for values that are no tensors, and for tensors that have none
            yet.
        local_shape: shape of the rank's part (the shape, unless it is a DTensor).
        offset: where the rank's part begins in the whole, a number a dim; () if it is no DTensor.
        strides: of the rank's part, in elements; None where its layout has none.
        dtype: element type.
        device: where it lies.
        placements: DTensor placements, "" for others.
        requires_grad: whether autograd follows it.
        mesh_dim_names, mesh_ranks, coordinate: a DTensor's mesh, its ranks in row-major order, and
            where the rank is in it.
        num_elements: of the rank's part.
        num_bytes: size of the rank's part.
        min, max, mean, std, norm: statistics.
        num_nan: NaN elements.
        num_inf: infinite elements.
        num_zeros: elements that are zero.
        note: what is not known, and why; how statistics are to be read. "" if there is nothing to
            add.
        shard: which part of the whole this is; ranks with the same shard should hold the same
            values.
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
        """Whether it is one value, to be shown as that: no tensor, or one without dims."""
        return bool(self.text) and not self.shape

    def at(self, path: str) -> TensorSummary:
        """Return a copy of the summary with another path."""
        return msgspec.structs.replace(self, path=path)


@dataclass(frozen=True)
class ValueSummary:
    """A rank's answer to `Overview`: summaries of the tensors in a value.

    Attributes:
        kind: the value's type.
        text: what it is in short, where it is no tensor; of a class of the user's, its name.
        items: its tensors, and plain values beside them: never so many that these push out a
            tensor.
        num_left_out: how many more there are.
        is_torn: it was looked at beside the main thread, which may have run.
    """

    kind: str
    text: str
    items: tuple[TensorSummary, ...]
    num_left_out: int = 0
    is_torn: bool = False


@dataclass(frozen=True)
class Pixels:
    """A rank's answer to `Picture`: a part of a tensor's slice as a small array.

    Attributes:
        values: [height, width] or smaller; NaN and infinite where the reduced elements are.
            float32, or float64 where it is asked `exactly`.
        low, high: the smallest and largest finite value in it; 0 without any.
        is_exact: every pixel is one element.
        is_torn: see `ValueSummary`.
        is_sampled: see `max_elements` of `Picture`; NaNs may have been missed.
    """

    values: npt.NDArray[np.float32 | np.float64]
    low: float
    high: float
    is_exact: bool
    is_torn: bool = False
    is_sampled: bool = False


# ---------------------------------------------------------------- names


class Names(Query, frozen=True):
    """Ask for the user's names in the rank's namespace that match a pattern (``*``, ``?``). Answer:
    `Bound`.
    """

    pattern: str = "*"
    max_names: int = 1000


@dataclass(frozen=True)
class Bound:
    """A rank's answer to `Names`: names in alphabetical order (`alphabetically`), and how many
    follow after these.
    """

    names: tuple[TensorSummary, ...]
    num_left_out: int = 0


def alphabetically(name: str) -> tuple[str, str]:
    """Return the key by which names are sorted: case matters only between equal names."""
    return name.lower(), name


# ---------------------------------------------------------------- code that is being typed


class Complete(Query, frozen=True):
    """Ask for completions at `cursor` (in characters) in `code`. Answer: `Completions`.

    `users_only`: of names, those that the user has bound, and no builtins or keywords.
    """

    code: str
    cursor: int
    users_only: bool = False


class Explain(Query, frozen=True):
    """Ask for the help of ``obj?`` (`detail` 0) or ``obj??`` (1) on a path of names, attributes and
    indices.

    Answer: str, with ANSI colours; "" if there is no such thing, or only code could show it.
    """

    name: str
    detail: int = 0


@dataclass(frozen=True)
class Completions:
    """A rank's answer to `Complete`: texts that may replace ``code[begin:end]``, each with its
    kind.

    `is_whole`: nothing else can stand there, as after the dot of something that is known.
    """

    begin: int
    end: int
    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    is_whole: bool = False


# ---------------------------------------------------------------- time


class HistoryQuery(Query, frozen=True):
    """Ask for the last cells that ran on the rank, and the collectives in them. Answer:
    `trace.Past`.

    Of more than `max_operations`, the newest are sent.
    """

    num_cells: int = 5
    max_operations: int = 20_000


@dataclass(frozen=True)
class Refusal:
    """What a rank returns in place of an answer to a query: why there is none; `needs_code`: an
    answer would have to run user code.
    """

    type_name: str
    text: str
    needs_code: bool = False

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}"


AnyRequest = (
    Overview | Histogram | Picture | Element | Digests | Elements
    | Forget | Names | HistoryQuery
)  # fmt: skip
CompletionRequest = Complete | Explain
