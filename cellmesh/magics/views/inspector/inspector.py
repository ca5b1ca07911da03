"""The tensor inspector: a widget that shows one value on all ranks, and asks ranks for the views
that users open.

The widget's model is small, as it is saved with the notebook. Pictures are sent separately, as
answers to requests of the front end (see `Inspector.answer`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import traitlets

from ....controller.inspect import Inspection, InspectionSource, compare
from ....controller.live_views import do_apart
from ....controller.output.calling_cell import cell_publisher
from ....controller.rank_set import RankSet
from ....errors import CellmeshError
from ....wire.inspect import Overview, Picture, Pixels, Refusal
from ....wire.ranks import describe_groups
from ...render.inspections import list_items, static_of
from ...render.tables import Static
from ..widget import LiveView, Widget, at_cells_ends, load_css, load_js
from .view_model import detail, summarise

# Maximum side of a picture: with 4 bytes per pixel, it takes less than a megabyte.
MAX_PIXELS = 496
_NOT_THERE = Refusal("LookupError", "it has no such part there")


class InspectorWidget(Widget):
    """The ipywidget that draws the inspector in the front end; see `inspector.js`."""

    _esm = load_js(
        "elements",
        "colours",
        "inspector/pane",
        "inspector/heatmap",
        "inspector/overview",
        "inspector/shards",
        "inspector/inspector",
    )
    _css = load_css("inspector/inspector")

    # The value: its tensors, the ranks that lack it, and remarks (`view_model.summarise`).
    summary = traitlets.Dict().tag(sync=True)
    # The tensor that is shown in detail (`view_model.detail`).
    detail = traitlets.Dict().tag(sync=True)
    # Whether a page that shows the widget asks for a refresh after each cell.
    watch = traitlets.Bool(False).tag(sync=True)
    # Whether a cell has ended since: the first page on which the widget is visible asks.
    outdated = traitlets.Bool(False).tag(sync=True)


class Inspector:
    """Inspects one value on all ranks for a widget, and answers the widget's requests.

    Args:
        source: sends queries about the value to ranks.
        inspection: first inspection, if it was made already.
        watch: whether to inspect again after each cell.
    """

    def __init__(
        self,
        source: InspectionSource,
        *,
        inspection: Inspection | None = None,
        watch: bool = False,
    ) -> None:
        self._source = source
        self._path = ""
        self._stamp = 0
        self._rows: list[dict[str, Any]] = []
        self._inspection = Inspection(source.expression, {})
        self._is_new = True  # until the cell that shows it has ended
        self._lock = threading.Lock()
        self._is_due = False  # whether a refresh waits for the lock
        self.widget = InspectorWidget(watch=watch)
        self.view = LiveView(self.widget, self.static, at_cells_ends(self.note_cell_end))
        if inspection is None:
            self.refresh()
        else:
            self._take(inspection)
        self.widget.on_msg(self._hear)

    # ---- the view

    def refresh(self) -> None:
        """Inspect the value again, and show the result; blocks, callable on any thread."""
        with self._lock, contextlib.suppress(CellmeshError):  # of a mesh that ends, the view stays
            self._is_due = False
            if self.widget.ended:
                return
            self._stamp += 1
            inspection = self._source.inspect()
            refusals = inspection.refusals
            if self._rows and any(refusal.needs_code for refusal in refusals.values()):
                # A rank is busy: the values stay shown.
                notices = describe_groups({rank: str(why) for rank, why in refusals.items()})
                self.widget.summary = {**self.widget.summary, "notices": notices}
            else:
                self._take(inspection)

    def note_cell_end(self) -> None:
        """Report the end of a cell to the pages, which refresh the widget once it is visible."""
        self.widget.outdated = self.widget.watch and not self._is_new
        self._is_new = False

    def static(self) -> Static:
        """Return the inspected value drawn without a widget."""
        return static_of(self._inspection, self._path)

    # ---- requests

    def answer(self, content: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Answer a request of the widget in the page; blocks, callable on any thread.

        Args:
            content: the request; ``ask`` is its kind, the other items depend on it.

        Returns:
            The answer, with an ``error`` if the request failed; and the buffers that belong to it.
        """
        match content.get("ask"):
            case "picture":
                shown = ask_picture(self._source, content)
                return ({"error": shown}, []) if isinstance(shown, str) else as_message(shown)
            case "items":
                return {"rows": self._rows, "stamp": self._stamp}, []
            case "hello":
                return {}, []
            case other:
                return {"error": f"no such question: {other}"}, []

    # ---- the front end's messages

    def _hear(self, widget: Any, content: dict[str, Any], buffers: Any) -> None:
        # Called on any thread: slow requests are handled on another one.
        view, kind = str(content.get("view", "")), content.get("ask")
        if kind in ("hello", "picture", "items"):
            do_apart([lambda: self._reply(content, view)])
        elif kind == "choose":
            self._path = str(content["path"])  # of several choices, each thread shows the last
            do_apart([self._show_chosen])
        elif kind == "refresh" or (kind == "seen" and self.widget.outdated):
            self.widget.outdated = False  # other pages need not ask
            if not self._is_due:
                self._is_due = True
                do_apart([self.refresh])
        elif kind == "watch":
            self.widget.watch = bool(content["watch"])

    def _reply(self, content: dict[str, Any], view: str) -> None:
        try:
            answer, buffers = self.answer(content)
        except Exception as error:  # the front end waits for an answer in any case
            answer, buffers = {"error": f"{type(error).__name__}: {error}"}, []
        self.widget.send({**answer, "id": content.get("id"), "view": view}, buffers)

    def _show_chosen(self) -> None:
        with self._lock:
            self._stamp += 1
            self._show_detail()

    # ---- helpers, called under the lock

    def _take(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._rows = list_items(inspection)
        paths = [row["path"] for row in self._rows]
        if self._path not in paths:
            self._path = paths[0] if paths else ""
        with self.widget.hold_sync():
            self.widget.summary = summarise(
                inspection, self._rows, self._stamp, time.strftime("%H:%M:%S")
            )
            self._show_detail()

    def _show_detail(self) -> None:
        if not self._rows:
            self.widget.detail = {}
            return
        source, path, inspection = self._source, self._path, self._inspection
        if not inspection.is_one:  # of several tensors, not all have been read
            looked = source.look(Overview(source.expression, path))
            inspection = Inspection(source.expression, looked.answers, looked.refusals)
        facts = inspection.facts_of(path)
        absent = {rank: _NOT_THERE for rank in inspection.found if rank not in facts}
        comparison = inspection.comparisons.get(path) or compare(facts)
        spread = inspection.spreads.get(path) or source.spread(path, facts)
        refusals = {**absent, **inspection.refusals}
        shown = detail(source.expression, path, facts, refusals, comparison, spread)
        self.widget.detail = {**shown, "stamp": self._stamp}


# ---- pictures


def ask_picture(answers: InspectionSource, content: Mapping[str, Any]) -> Pixels | str:
    """Return the picture of a tensor that the front end requests, or a text with the reason if
    there is none.

    Args:
        answers: sends the query to ranks.
        content: ``path``, ``rank``, ``dims``, ``index`` (a number for each dim, ignored for those
            of ``dims``), ``rows``, ``cols``, ``height``, ``width``, ``reduction``.
    """
    dims, rows, cols = (
        (int(content[name][0]), int(content[name][1])) for name in ("dims", "rows", "cols")
    )
    subject = Picture(
        answers.expression,
        str(content["path"]),
        index=tuple(int(at) for dim, at in enumerate(content["index"]) if dim not in dims),
        dims=dims,
        rows=rows,
        cols=cols,
        height=min(int(content["height"]), MAX_PIXELS),
        width=min(int(content["width"]), MAX_PIXELS),
        reduction=content["reduction"],
    )
    rank = int(content["rank"])
    looked = answers.look(subject, [rank])
    found: Pixels | None = looked.answers.get(rank)
    return found or f"rank {rank}: {looked.refusals[rank]}"


def as_message(pixels: Pixels) -> tuple[dict[str, Any], list[bytes]]:
    """Return a picture as a message to the front end, with the numbers in a buffer."""
    height, width = pixels.values.shape
    content = {
        "height": height,
        "width": width,
        "low": pixels.low,
        "high": pixels.high,
        "is_exact": pixels.is_exact,
        "is_torn": pixels.is_torn,
        "is_sampled": pixels.is_sampled,
    }
    return content, [pixels.values.astype("<f4").tobytes()]


# ---- display


def show_inspection(
    ranks: RankSet,
    inspection: Inspection,
    watch: bool = False,
) -> None:
    """Show an inspected value in a widget, which queries these ranks until their mesh ends; in a
    terminal, print it.
    """
    ranks.session.shown.print_heading()
    if cell_publisher() is None:
        print(static_of(inspection, next(iter(inspection.paths), "")).text)
        if watch:
            print("--watch needs a notebook")
        return
    inspector = Inspector(
        InspectionSource(ranks, inspection.expression, inspection.token, grads=inspection.grads),
        inspection=inspection,
        watch=watch,
    )
    ranks.session.shown.add("inspectors", inspector.view)
    inspector.view._ipython_display_()
