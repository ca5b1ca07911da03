"""Passes messages of the front end to ranks' widgets, and asks ranks for their widgets' states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import NoMeshError
from ...wire.comms import FromFrontEnd, WidgetStates
from ..comms import FrontEndMessage, States
from ..inspect.query import look
from ..output.printer import Printer
from ..output.sinks import CellSink
from ..rank_set import RankSet
from ..run import Run
from ..work_item import WorkItem

if TYPE_CHECKING:
    from .session import Session


def send_to_widget(session: Session, message: FrontEndMessage) -> Run[Any]:
    """Pass a message of the front end to the widget's rank."""
    ranks = (message.rank,)
    printer = Printer(ranks, CellSink(message.publish, session.beside.displays))
    item = WorkItem(message.verb, FromFrontEnd, ranks, message.buffers, "a widget's callback")
    run = session.start_run(item, printer)
    # A callback that waits for ranks which have nothing to do is to be released.
    session.orders.wait_for(run.number)
    return run


def ask_widgets(session: Session, ranks: Sequence[int]) -> Mapping[int, States]:
    """Ask ranks for the states of their widgets, for a page that waits four seconds."""
    try:
        return look(RankSet(session, ranks), WidgetStates(), timeout_s=3.0).answers
    except NoMeshError:
        return {}
