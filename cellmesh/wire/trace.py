"""A rank's record of its last cells and of the collectives in them: the answer to
`inspect.History`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True)
class CellSpan:
    """A cell, or a call from Python, on one rank.

    Attributes:
        run: its run: the same number on all ranks.
        name: of a call, its function; "" for a cell.
        execution_count: ``In[n]``; 0 for a call.
        begin_s, end_s: by the host's monotonic clock; without an end it goes on.
    """

    run: int
    name: str
    execution_count: int
    begin_s: float
    end_s: float | None


@dataclass(frozen=True)
class What:
    """The common fields of all operations of one kind on one process group.

    Attributes:
        name: as ``torch.distributed`` calls it.
        group: torch's name of the group.
        members: its global ranks; () for all.
        generation: of the groups; in each, counts begin with 1.
        is_launch: it runs on a GPU, and what is known is when it was launched.
    """

    name: str
    group: str
    members: tuple[int, ...]
    generation: int
    is_launch: bool = False


@dataclass(frozen=True)
class Operations:
    """Collectives and messages of one rank, oldest first, as columns: index i of each array belongs
    to operation i.

    Attributes:
        whats: what `what` counts.
        what: which of `whats` it is.
        sequence: of a collective: how many the group had begun with it. Of a message: how many went
            that way between the two ranks. 0 where that is not known.
        peer: of a message, the other rank; else -1.
        run: the cell that began it; -1 for none.
        begin_s, end_s: by the host's monotonic clock; the end is NaN while it runs.
        wait_s: since when the rank's main thread waited for it, as far as that is known; NaN if it
            has not.
    """

    whats: tuple[What, ...]
    what: array[int]
    sequence: array[int]
    peer: array[int]
    run: array[int]
    begin_s: array[float]
    end_s: array[float]
    wait_s: array[float]


@dataclass(frozen=True)
class Past:
    """The answer to `inspect.HistoryQuery`.

    Attributes:
        cells: oldest first.
        operations: those in these cells.
        num_left_out: how many older operations of these cells were left out or lost.
        since_s: when the rank began, by the host's monotonic clock.
        now_s: that clock at the answer.
    """

    cells: tuple[CellSpan, ...]
    operations: Operations
    num_left_out: int
    since_s: float
    now_s: float
