"""Shows an inspected value in the inspector widget, or in a terminal as text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.getipython import get_ipython

from ....controller.inspect.query import Inspection
from ....controller.inspect.source import InspectionSource
from ....controller.output.calling_cell import cell_publisher
from ....controller.rank_set import RankSet
from ....controller.ranks import Ranks
from ...options import Given
from .inspector import Inspector

_FOLLOW = "--follow needs a notebook: in a terminal, --watch prints it again after each cell"


def inspect_value(ranks: Ranks, expression: str, options: Given) -> Any:
    """Show ``%dist_inspect``: the widget, or text in a terminal."""
    chosen = {name: options[name] for name in ("grads", "watch", "follow")}
    return show_inspection(ranks.rank_set, ranks.inspect(expression), **chosen)


def show_inspection(
    ranks: RankSet,
    inspection: Inspection,
    *,
    grads: bool = False,
    watch: bool = False,
    follow: bool = False,
) -> Any:
    """Show an inspected value in a widget, which asks these ranks for more until their mesh ends.

    Returns:
        What shows itself in the cell; in a terminal, as text.
    """
    session, is_terminal = ranks.session, cell_publisher() is None
    shell = get_ipython()
    events = shell.events if shell is not None else None
    inspector = Inspector(
        InspectionSource(ranks, inspection.expression, inspection),
        coordinates_of(session.dims, ranks.ranks),
        inspection=inspection,
        grads=grads,
        watch=watch and not is_terminal,
        follow=follow and not is_terminal,
        events=events,
    )
    if is_terminal:
        return Printed(inspector, events, lambda: bool(session.ending), watch, follow)
    session.shown.add("inspectors", inspector.view)
    return inspector.view


def coordinates_of(dims: Mapping[str, int], ranks: Sequence[int]) -> dict[int, str]:
    """Return each rank's mesh coordinate, as ``--at`` takes it; empty in a mesh of one dim."""
    if len(dims) < 2:
        return {}
    places = itertools.product(
        *([f"{name}={index}" for index in range(size)] for name, size in dims.items())
    )
    return {rank: ",".join(place) for rank, place in enumerate(places) if rank in ranks}


class Printed:
    """Prints an inspected value as text in a terminal: once, or after each cell until another is
    inspected.

    Args:
        inspector: knows the text.
        events: the shell's; None without one.
        is_over: whether the mesh has ended.
        watch: print it again after each cell, until something else is inspected.
        follow: somebody wants to see it while a cell runs; it is said that this cannot be.
    """

    def __init__(
        self,
        inspector: Inspector,
        events: Any,
        is_over: Callable[[], bool],
        watch: bool,
        follow: bool,
    ) -> None:
        self._inspector = inspector
        self._events = events
        self._is_over = is_over
        self._follow = follow
        self._was_shown = False
        if events is None:
            return
        for callback in list(events.callbacks["post_run_cell"]):
            if isinstance(former := getattr(callback, "__self__", None), Printed):
                former.stop()
        if watch:
            events.register("post_run_cell", self.after_cell)

    def stop(self) -> None:
        """Stop printing after cells."""
        self._events.unregister("post_run_cell", self.after_cell)

    def after_cell(self, *_: Any) -> None:
        """Print the value again after a cell; the first cell that ends is the one with
        `%dist_inspect` itself, which has printed it.
        """
        if self._is_over():
            self.stop()
        elif self._was_shown:
            self._inspector.refresh()
            print(self._inspector.static().text)
        self._was_shown = True

    def _ipython_display_(self) -> None:
        print(self._inspector.static().text)
        if self._follow:
            print(_FOLLOW)
