"""What the notebook keeps of one mesh beside its runs: metrics, displays, widgets, memory for large
values.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import NoMeshError
from ...wire.codec import Frame, Parcel
from ...wire.comms import FromFrontEnd, ToFrontEnd, WidgetStates
from ...wire.messages import Died
from ...wire.metrics import Logged
from ...wire.values import Freed
from ..comms import RankComms, States
from ..core.effects import Change
from ..inspect.query import look
from ..live_views import LiveViews
from ..metrics import Metrics
from ..output.cell import CellSink
from ..output.cell_record import Displays, Publish
from ..output.printer import Printer
from ..rank_set import RankSet
from ..run import Run
from ..values.pool import SegmentPool
from ..work_item import WorkItem

if TYPE_CHECKING:
    from .session import Session


def send_to_widget(
    session: Session, rank: int, verb: FromFrontEnd, buffers: Sequence[Frame], publish: Publish
) -> Run[Any]:
    """Send a front end's message to the rank that owns the widget, as a run of that rank."""
    ranks = (rank,)
    printer = Printer(ranks, CellSink(publish, session.features.displays))
    item = WorkItem(verb, FromFrontEnd, ranks, buffers, "a widget's callback")
    run = session.submission.start_run(item, printer)
    # A callback that waits for ranks which have nothing to do is to be released.
    session.orders.wait_for(run.number)
    return run


def ask_widgets(session: Session, ranks: Sequence[int]) -> Mapping[int, States]:
    """Ask ranks for the states of their ipywidgets, for a page that waits four seconds."""
    try:
        return look(RankSet(session, ranks), WidgetStates(), timeout_s=3.0).answers
    except NoMeshError:
        return {}


# What ranks say that is no run's output or answer.
KINDS = (Logged, ToFrontEnd, Freed)


class Features:
    """The metrics, displays, live views, widgets and pinned values of one mesh; for any thread.

    Args:
        session: of the mesh.
        name: the mesh's.
        folds_numbers: as of `Displays`.

    Attributes:
        displays: those that can be updated.
        metrics: what ranks have logged.
        comms: the widgets of ranks.
        shown: what shows the mesh.
        segments: the memory that large values travel in.
        gone_holds: tokens and ranks of values kept for inspections that are gone (`PinnedValue`).
    """

    def __init__(self, session: Session, name: str, folds_numbers: bool) -> None:
        self._session = session
        self.metrics = Metrics()
        self.comms = RankComms(
            functools.partial(send_to_widget, session), functools.partial(ask_widgets, session)
        )
        self.displays = Displays(is_open=self.comms.is_open, folds_numbers=folds_numbers)
        self.shown = LiveViews()
        self.segments = SegmentPool(name)
        self.gone_holds: deque[tuple[str, tuple[int, ...]]] = deque()

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        """Handle a message of ranks of one of the `KINDS`; called in the link's loop."""
        if type(parcel.verb) is Logged:
            self.metrics.take(run, ranks, parcel)
        elif type(parcel.verb) is Freed:
            self.segments.freed(ranks, parcel.verb)
        else:
            self.comms.take(run, ranks, parcel)

    def follow(self, run: Run[Any], fills: bool) -> None:
        """Prepare widgets and metrics for a run that is about to be sent (`fills`: see `Relay`)."""
        if fills:
            self.comms.began(run.number)
        if run.is_cell:
            run.on_end(self.metrics.settle)

    def note(self, change: Change) -> None:
        """Close widgets and free memory that end with this change of state; in the link's loop."""
        if isinstance(change.cause, Died):
            rank, reason = change.cause.rank, change.cause.reason
            self.segments.rank_ended(rank)
            self.comms.close(
                {rank}, f"rank {rank} {reason}: its widgets stay as they look, and change no more"
            )
        if change.state == "restarting":
            self.segments.clear()
            self.comms.close(
                None,
                "the mesh was restarted: its ranks' widgets stay as they look, and change no more",
            )
        if change.state == "ended":
            self.end()

    def end(self) -> None:
        """Close widgets and views of a mesh that has ended, or that this notebook has left."""
        self.segments.clear()
        self.comms.close(
            None,
            "the mesh has ended, or this notebook has left it: its ranks' widgets stay as they "
            "look, and change no more",
        )
        self.shown.end(self._session.ending)
