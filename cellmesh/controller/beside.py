"""What a mesh has in the notebook beside its runs: numbers that ranks log, their widgets,
displays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..wire.codec import Parcel
from ..wire.comms import ToFrontEnd
from ..wire.messages import Died
from ..wire.metrics import Logged
from ..wire.values import Freed
from .comms import FrontEndMessage, RankComms, States
from .core.effects import Change
from .live_views import LiveViews
from .metrics import Metrics
from .output.displays import Displays
from .run import Run
from .values.pool import SegmentPool

# What ranks say that is no run's output or answer.
KINDS = (Logged, ToFrontEnd, Freed)


class Beside:
    """What a mesh has beside its runs; used on any thread.

    Args:
        send_to_widget: passes what the front end says to a widget on to its rank.
        ask_widgets: asks ranks for the states of their widgets.
        why_ended: once there is no mesh any more, tells why.
        name: the mesh's.

    Attributes:
        displays: those that can be updated.
        metrics: what ranks have logged.
        comms: the widgets of ranks.
        shown: what shows the mesh.
        segments: the memory that large values travel in.
        gone_holds: tokens and ranks of values kept for inspections that are gone (`PinnedValue`).
    """

    def __init__(
        self,
        send_to_widget: Callable[[FrontEndMessage], Run[Any]],
        ask_widgets: Callable[[Sequence[int]], Mapping[int, States]],
        why_ended: Callable[[], str],
        name: str,
    ) -> None:
        self._why_ended = why_ended
        self.displays = Displays()
        self.metrics = Metrics()
        self.comms = RankComms(send_to_widget, ask_widgets)
        self.displays.widgets = self.comms
        self.shown = LiveViews()
        self.segments = SegmentPool(name)
        self.gone_holds: deque[tuple[str, tuple[int, ...]]] = deque()

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        """These ranks said one of `KINDS`; called in the link's loop."""
        if type(parcel.verb) is Logged:
            self.metrics.take(run, ranks, parcel)
        elif type(parcel.verb) is Freed:
            self.segments.freed(ranks, parcel.verb)
        else:
            self.comms.take(run, ranks, parcel)

    def follow(self, run: Run[Any], fills: bool) -> None:
        """A run is about to begin (`fills`: see `Relay`)."""
        if fills:
            self.comms.began(run.number)
        if run.is_cell:
            run.on_end(self.metrics.settle)

    def note(self, change: Change) -> None:
        """The mesh's state has changed; called in the link's loop."""
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
        """The mesh has ended, or this notebook has left it."""
        self.segments.clear()
        self.comms.close(
            None,
            "the mesh has ended, or this notebook has left it: its ranks' widgets stay as they "
            "look, and change no more",
        )
        self.shown.end(self._why_ended())
