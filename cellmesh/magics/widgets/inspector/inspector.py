"""The tensor inspector: a widget that shows one value on all ranks, and asks ranks for the views
that users open.

What the widget's model holds is small, as it is saved with the notebook. Pictures travel beside it,
as answers to the front end's questions (see `Inspector.answer`).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import traitlets

from ....controller.inspect.query import Inspection
from ....controller.inspect.source import InspectionSource
from ....wire.inspect import Gradients, Overview, Pixels, Refusal
from ...render.inspections import static_of
from ...render.tables import Static
from ..base.auto_refresh import PERIOD_S, AutoRefresh, Occasion, Worker
from ..base.widget import LiveView, Widget, load_css, load_js
from .slices import as_message, ask_element, ask_picture, small_picture
from .view_model import as_columns, detail, gradients_table, list_items, summarise, tabulate

# Rows of the gradients' table in the widget's state.
_MAX_GRADIENTS = 2000
# What looks by itself and has to run code on ranks may keep the next cell waiting for so long.
_SHORT_S = 0.25
_NOT_THERE = Refusal("LookupError", "it has no such part there")


class InspectorWidget(Widget):
    """The ipywidget that draws the inspector in the front end; see `inspector.js`."""

    _esm = load_js(
        "base/elements",
        "base/colours",
        "inspector/pane",
        "inspector/heatmap",
        "inspector/overview",
        "inspector/shards",
        "inspector/gradients",
        "inspector/inspector",
    )
    _css = load_css("inspector/inspector")

    # The value: its tensors, where it is not, what is to be said of it (`view_model.summarise`).
    summary = traitlets.Dict().tag(sync=True)
    # The tensor that is looked at (`view_model.detail`).
    detail = traitlets.Dict().tag(sync=True)
    # The gradients' table (`view_model.as_columns`); empty until it is asked for.
    gradients = traitlets.Dict().tag(sync=True)
    # The last picture, in few pixels; the front end's own.
    picture = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    # What looks again by itself: {"watch": bool, "follow": bool}.
    live = traitlets.Dict().tag(sync=True)
    # What is shown first.
    tab = traitlets.Unicode("overview").tag(sync=True)


class Inspector:
    """Inspects one value on all ranks for a widget, and answers the widget's questions.

    Args:
        source: answers questions about it.
        coordinates: rank -> where it is in the mesh.
        inspection: an inspection made already.
        grads: begin with the gradients.
        watch: look again after each cell.
        follow: look again each second while a cell runs.
        events: the shell's; None without one.
        period_s: how often `follow` looks.
    """

    def __init__(
        self,
        source: InspectionSource,
        coordinates: dict[int, str] | None = None,
        *,
        inspection: Inspection | None = None,
        grads: bool = False,
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
        self._pixels: Pixels | None = None  # of the last picture
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._views: set[str] = set()
        self._was_greeted = False
        self._wants_gradients = grads
        self._gradients: dict[str, Any] = {}
        self._quick, self._slow = Worker(), Worker()
        self.refresher = AutoRefresh(self.refresh, source.is_busy, self.is_seen, events, period_s)
        self.widget = InspectorWidget(tab="gradients" if grads else "overview")
        self.view = LiveView(self.widget, self.static, self._end)
        if inspection is None:
            self.refresh()
        else:
            self._take(inspection)
        self.widget.on_msg(self._hear)
        self._set_live(watch, follow)

    # ---- what is shown

    def refresh(self, occasion: Occasion = "asked") -> None:
        """Inspect the value again, and show the result. Blocks; on any thread.

        Args:
            occasion: unless somebody asked for it, ranks answer beside their main threads, so that
                the next cell need not wait; during a cell, what costs much is left as it was.
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
        self._source.close()

    def static(self) -> Static:
        """Return the inspected value drawn without a widget."""
        still = static_of(self._inspection, self._path, self._pixels)
        return _with_gradients(still, self._gradients) if self._gradients else still

    def is_seen(self) -> bool:
        """Return whether a page shows the inspector; true if no page reports it."""
        return bool(self._seen) or not self._was_greeted

    # ---- questions

    def answer(self, content: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Answer a question of the widget in the page. Blocks; on any thread.

        Args:
            content: ``ask`` says what; the rest is of the kind asked for.

        Returns:
            The answer, with ``error`` in it if there is none; and buffers beside it.
        """
        match content.get("ask"):
            case "picture":
                shown = ask_picture(self._source, content)
                if isinstance(shown, str):
                    return {"error": shown}, []
                if content.get("minus") is None:
                    self._pixels = shown
                return as_message(shown)
            case "element":
                return ask_element(self._source, content), []
            case "items":
                return {"rows": self._rows, "stamp": self._stamp}, []
            case "hello":
                return {}, []
            case other:
                return {"error": f"no such question: {other}"}, []

    # ---- the front end's messages

    def _hear(self, widget: Any, content: dict[str, Any], buffers: Any) -> None:
        # On whatever thread: what takes long is done on another one.
        view, kind = str(content.get("view", "")), content.get("ask")
        if kind == "hello":
            # A page that was reloaded has not said goodbye: those that are there say so again.
            self._was_greeted = True
            self._views, self._seen = {view}, set()
            self.refresher.set(self.widget.live["watch"], self.widget.live["follow"])
            self.widget.send({"roll_call": True})
        if kind in ("hello", "picture", "element", "items"):
            self._quick.do(lambda: self._reply(content, view))
        elif kind == "choose":
            self._slow.do(lambda: self._choose(str(content["path"])), "choose")
        elif kind == "refresh":
            self.refresher.now()
        elif kind == "gradients":
            self._wants_gradients = True
            self._slow.do(self._show_gradients, "gradients")
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
        except Exception as error:  # the front end waits for an answer, whatever it has asked
            answer, buffers = {"error": f"{type(error).__name__}: {error}"}, []
        self.widget.send({**answer, "id": content.get("id"), "view": view}, buffers)

    def _choose(self, path: str) -> None:
        with self._lock:
            self._path = path
            self._pixels = None
            self._stamp += 1
            self._show_detail(is_beside=False)

    def _set_live(self, watch: bool, follow: bool) -> None:
        self.refresher.set(watch, follow)
        self.widget.live = {"watch": watch, "follow": follow}

    # ---- inside; under the lock

    def _inspect(self, occasion: Occasion) -> Inspection | None:
        """Inspect the value again; return None after sending the widget a reason why it is not."""
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
        self._pixels = None  # what was drawn before is not of these values
        self._rows = list_items(inspection)
        paths = [row["path"] for row in self._rows]
        if self._path not in paths:
            self._path = paths[0] if paths else ""
        with self.widget.hold_sync():
            self.widget.summary = summarise(
                inspection, self._rows, self._stamp, time.strftime("%H:%M:%S")
            )
            self._show_detail(is_beside)
            if self._wants_gradients and occasion != "during":
                self._show_gradients(is_beside)
        if not self._was_greeted and occasion != "during":
            self._pixels = small_picture(self._source, self._path, self.widget.detail)

    def _show_detail(self, is_beside: bool) -> None:
        if not self._rows:
            self.widget.detail = {}
            return
        source, path, inspection = self._source, self._path, self._inspection
        if not inspection.is_one:  # of a nest, not everything has been read
            looked = source.look(Overview(source.expression, 1, path), None, is_beside)
            if is_beside and not looked.answers:
                self._say(sorted({str(refusal) for refusal in looked.refusals.values()}))
                return
            inspection = Inspection(source.expression, looked.answers, looked.refusals)
        facts = inspection.facts_of(path)
        absent = {rank: _NOT_THERE for rank in inspection.found if rank not in facts}
        comparison = inspection.comparisons.get(path) or source.compare(path, facts, is_beside)
        spread = inspection.spreads.get(path) or source.spread(path, facts, is_beside)
        refusals = {**absent, **inspection.refusals}
        shown = detail(
            source.expression, path, facts, refusals, self._coordinates, comparison, spread
        )
        self.widget.detail = {**shown, "stamp": self._stamp}

    def _show_gradients(self, is_beside: bool = False) -> None:
        looked = self._source.look(Gradients(self._source.expression), None, is_beside)
        self._gradients = tabulate(looked, _MAX_GRADIENTS)
        self.widget.gradients = as_columns(self._gradients)

    def _say(self, notices: list[str]) -> None:
        self.widget.summary = {**self.widget.summary, "notices": notices}


def _with_gradients(still: Static, sheet: dict[str, Any]) -> Static:
    table = gradients_table(sheet)
    return Static(f"{still.text}\n\n{table!r}", f"{still.html}{table._repr_html_()}")
