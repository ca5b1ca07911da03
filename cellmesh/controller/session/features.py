"""What the notebook keeps of one mesh beside its runs: metrics, displays, live views, memory for
large values.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ...wire.codec import Parcel
from ...wire.messages import Died
from ...wire.user_code import Logged
from ...wire.values import Freed
from ..core.effects import Change
from ..live_views import LiveViews
from ..metrics import Metrics
from ..output.cell_record import Displays
from ..run import Run
from ..values.pool import SegmentPool

# What ranks say that is no run's output or answer.
KINDS = (Logged, Freed)


class Features:
    """The metrics, displays, live views and pinned values of one mesh; for any thread.

    Args:
        name: the mesh's.
        folds_numbers: as of `Displays`.

    Attributes:
        displays: those that can be updated.
        metrics: what ranks have logged.
        shown: what shows the mesh.
        segments: the memory that large values travel in.
        gone_holds: tokens and ranks of values kept for inspections that are gone (`PinnedValue`).
    """

    def __init__(self, name: str, folds_numbers: bool) -> None:
        self.metrics = Metrics()
        self.displays = Displays(folds_numbers=folds_numbers)
        self.shown = LiveViews()
        self.segments = SegmentPool(name)
        self.gone_holds: deque[tuple[str, tuple[int, ...]]] = deque()

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        """Handle a message of ranks of one of the `KINDS`; called in the link's loop."""
        if type(parcel.verb) is Logged:
            self.metrics.take(run, ranks, parcel)
        else:
            self.segments.freed(ranks, parcel.verb)

    def follow(self, run: Run[Any]) -> None:
        """Prepare metrics for a cell that is about to be sent."""
        run.on_end(self.metrics.settle)

    def note(self, change: Change, ending: str) -> None:
        """Close views and free memory that end with this change of state; in the link's loop.

        Args:
            change: of the mesh's state.
            ending: why the mesh has ended, if it has.
        """
        if isinstance(change.cause, Died):
            self.segments.rank_ended(change.cause.rank)
        if change.state == "restarting":
            self.segments.clear()
        if change.state == "ended":
            self.end(ending)

    def end(self, ending: str) -> None:
        """Close the views of a mesh that has ended, or that this notebook has left."""
        self.segments.clear()
        self.shown.end(ending)
