"""The tensor inspector: a widget that shows one value on all ranks, and asks ranks for the views
that users open.

The widget's model is small, as it is saved with the notebook. Pictures are sent separately, as
answers to requests of the front end (see `Inspector.answer`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import traitlets
from IPython.core.getipython import get_ipython

from ....controller.inspect import Inspection, InspectionSource, compare
from ....controller.output.calling_cell import cell_publisher
from ....controller.rank_set import RankSet
from ....wire.inspect import Overview, Picture, Pixels, Refusal
from ...render.inspections import list_items, static_of
from ...render.tables import Static
from ..auto_refresh import PERIOD_S, AutoRefresh, Occasion, Worker
from ..widget import LiveView, Widget, load_css, load_js
from .view_model import detail, summarise

# Maximum side of a picture: with 4 bytes per pixel, it takes less than a megabyte.
MAX_PIXELS = 496
# Automatic inspections that run code on ranks may delay the next cell by so much.
_SHORT_S = 0.25
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
    # Automatic refreshes: {"watch": bool, "follow": bool}.
    live = traitlets.Dict().tag(sync=True)


class Inspector:
    """Inspects one value on all ranks for a widget, and answers the widget's requests.

    Args:
        source: sends queries about the value to ranks.
        coordinates: rank -> its coordinate in the mesh.
        inspection: first inspection, if it was made already.
        watch: whether to inspect again after each cell.
        follow: whether to inspect again each second while a cell runs.
        events: events of the shell; None without a shell.
        period_s: period of `follow`, in seconds.
    """

    def __init__(
        self,
        source: InspectionSource,
        coordinates: dict[int, str] | None = None,
        *,
        inspection: Inspection | None = None,
        watch: bool = False,
        follow: bool = False,
        events: Any = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._source = source
        self._coordinates = coordinates or {}
        self._path = ""
        self._stamp = 0
        self._rows: list[dict[str, Any]] = []
        self._inspection = Inspection(source.expression, {})
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._views: set[str] = set()
        self._was_greeted = False
        self._quick, self._slow = Worker(), Worker()
        self.refresher = AutoRefresh(self.refresh, source.is_busy, self.is_seen, events, period_s)
        self.widget = InspectorWidget()
        self.view = LiveView(self.widget, self.static, self._end)
        if inspection is None:
            self.refresh()
        else:
            self._take(inspection)
        self.widget.on_msg(self._hear)
        self._set_live(watch, follow)

    # ---- the view

    def refresh(self, occasion: Occasion = "asked") -> None:
        """Inspect the value again, and show the result; blocks, callable on any thread.

        Args:
            occasion: reason of the refresh. Unless it is ``asked``, ranks answer beside their main
                threads, so that the next cell need not wait; during a cell, expensive parts are not
                updated.
        """
        with self._lock:
            if self.widget.ended:
                return
            self._stamp += 1
            if occasion == "during" and len(self._rows) > 1:
                self._show_detail(is_beside=True)
                return
            inspection = self._inspect(occasion)
            if inspection is None:
                return
            self._take(inspection, occasion)
        if not self._was_greeted and occasion != "during":
            self.view.refresh()

    def _end(self) -> None:
        self.refresher.close()

    def static(self) -> Static:
        """Return the inspected value drawn without a widget."""
        return static_of(self._inspection, self._path)

    def is_seen(self) -> bool:
        """Return whether a page shows the inspector; True if pages do not report this."""
        return bool(self._seen) or not self._was_greeted

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
        if kind == "hello":
            # A page that was reloaded has not reported its end: all open pages report themselves
            # again.
            self._was_greeted = True
            self._views, self._seen = {view}, set()
            self.refresher.set(self.widget.live["watch"], self.widget.live["follow"])
            self.widget.send({"roll_call": True})
        if kind in ("hello", "picture", "items"):
            self._quick.do(lambda: self._reply(content, view))
        elif kind == "choose":
            self._slow.do(lambda: self._choose(str(content["path"])), "choose")
        elif kind == "refresh":
            self.refresher.now()
        elif kind == "live":
            self._set_live(bool(content["watch"]), bool(content["follow"]))
        elif kind == "seen":
            self._views.add(view)
            (self._seen.add if content["is_visible"] else self._seen.discard)(view)
            if content["is_visible"]:
                self.refresher.note_seen()
        elif kind == "gone":
            self._views.discard(view)
            self._seen.discard(view)
            if not self._views:
                self.refresher.pause()

    def _reply(self, content: dict[str, Any], view: str) -> None:
        try:
            answer, buffers = self.answer(content)
        except Exception as error:  # the front end waits for an answer in any case
            answer, buffers = {"error": f"{type(error).__name__}: {error}"}, []
        self.widget.send({**answer, "id": content.get("id"), "view": view}, buffers)

    def _choose(self, path: str) -> None:
        with self._lock:
            self._path = path
            self._stamp += 1
            self._show_detail(is_beside=False)

    def _set_live(self, watch: bool, follow: bool) -> None:
        self.refresher.set(watch, follow)
        self.widget.live = {"watch": watch, "follow": follow}

    # ---- helpers, called under the lock

    def _inspect(self, occasion: Occasion) -> Inspection | None:
        """Inspect the value again; return None if that is not possible, and show the reason."""
        inspection = self._source.inspect(occasion != "asked")
        needs_code = any(refusal.needs_code for refusal in inspection.refusals.values())
        if occasion == "after" and needs_code and not self._source.is_busy():
            if self._inspection.took_s > _SHORT_S:
                why = (
                    f"that took {self._inspection.took_s:.1f} s, and "
                    "the next cell would wait for it"
                )
                self._say([f"not looked at again: {why}; press refresh"])
                return None
            inspection = self._source.inspect(False)
        if occasion != "asked" and not inspection.found:
            self._say(sorted({str(refusal) for refusal in inspection.refusals.values()}))
            return None
        return inspection

    def _take(self, inspection: Inspection, occasion: Occasion = "asked") -> None:
        is_beside = occasion != "asked"
        self._inspection = inspection
        self._rows = list_items(inspection)
        paths = [row["path"] for row in self._rows]
        if self._path not in paths:
            self._path = paths[0] if paths else ""
        with self.widget.hold_sync():
            self.widget.summary = summarise(
                inspection, self._rows, self._stamp, time.strftime("%H:%M:%S")
            )
            self._show_detail(is_beside)

    def _show_detail(self, is_beside: bool) -> None:
        if not self._rows:
            self.widget.detail = {}
            return
        source, path, inspection = self._source, self._path, self._inspection
        if not inspection.is_one:  # of several tensors, not all have been read
            looked = source.look(Overview(source.expression, path), None, is_beside)
            if is_beside and not looked.answers:
                self._say(sorted({str(refusal) for refusal in looked.refusals.values()}))
                return
            inspection = Inspection(source.expression, looked.answers, looked.refusals)
        facts = inspection.facts_of(path)
        absent = {rank: _NOT_THERE for rank in inspection.found if rank not in facts}
        comparison = inspection.comparisons.get(path) or compare(facts)
        spread = inspection.spreads.get(path) or source.spread(path, facts, is_beside)
        refusals = {**absent, **inspection.refusals}
        shown = detail(
            source.expression, path, facts, refusals, self._coordinates, comparison, spread
        )
        self.widget.detail = {**shown, "stamp": self._stamp}

    def _say(self, notices: list[str]) -> None:
        self.widget.summary = {**self.widget.summary, "notices": notices}


# ---- pictures


def ask_picture(answers: InspectionSource, content: Mapping[str, Any]) -> Pixels | str:
    """Return the picture of a tensor that the front end requests, or the reason why not.

    Args:
        answers: sends the query to ranks.
        content: ``path``, ``rank``, ``dims``, ``index`` (a number for each dim, ignored for those
            of ``dims``), ``rows``, ``cols``, ``height``, ``width``, ``reduction``.
    """
    dims = (int(content["dims"][0]), int(content["dims"][1]))
    subject = Picture(
        answers.expression,
        str(content["path"]),
        index=tuple(int(at) for dim, at in enumerate(content["index"]) if dim not in dims),
        dims=dims,
        rows=(int(content["rows"][0]), int(content["rows"][1])),
        cols=(int(content["cols"][0]), int(content["cols"][1])),
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
    follow: bool = False,
) -> None:
    """Show an inspected value in a widget, which queries these ranks until their mesh ends; in a
    terminal, print it.
    """
    shell, is_terminal = get_ipython(), cell_publisher() is None
    inspector = Inspector(
        InspectionSource(ranks, inspection.expression, inspection.token, grads=inspection.grads),
        coordinates_of(ranks.session.dims, ranks.ranks),
        inspection=inspection,
        watch=watch and not is_terminal,
        follow=follow and not is_terminal,
        events=shell.events if shell is not None else None,
    )
    if is_terminal:
        note = ["--watch and --follow need a notebook"] if watch or follow else []
        print("\n".join([inspector.static().text, *note]))
        return
    ranks.session.shown.add("inspectors", inspector.view)
    inspector.view._ipython_display_()


def coordinates_of(dims: Mapping[str, int], ranks: Sequence[int]) -> dict[int, str]:
    """Return each rank's mesh coordinate, in the form of ``--at``; empty for a mesh of one dim."""
    if len(dims) < 2:
        return {}
    places = itertools.product(
        *([f"{name}={index}" for index in range(size)] for name, size in dims.items())
    )
    return {rank: ",".join(place) for rank, place in enumerate(places) if rank in ranks}
