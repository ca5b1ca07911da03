"""The tensor inspector: a widget that shows one value on all ranks, and has them asked for what is looked at.

What the widget's model holds is small, as it is saved with the notebook. Pictures travel beside it, as
answers to the front end's questions (see `Inspector.answer`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import traitlets

from ...controller.inspecting import Inspection
from ...controller.looking import Looked
from ...controller.ranks import Ranks
from ...controller.sinks import cell_publisher
from ...wire.looks import Element, Gradients, Overview, Picture, Pixels, Refusal
from ..options import Given
from ..tables import facts_table
from .answers import Answers, MeshAnswers, coordinates_of
from .base import Static, View, Widget, load_css, load_js
from .refreshing import PERIOD_S, Refresher, Worker
from .sheets import detail, facts_by_path, list_items, number, subtract, summarise, tabulate

MAX_PIXELS = 512
# Rows of the gradients' table in the widget's state.
_MAX_GRADIENTS = 2000
_NOT_THERE = Refusal("LookupError", "it has no such part there")


class InspectorWidget(Widget):
    """Draws it; see `inspector.js`."""

    _esm = load_js("elements", "colours", "heatmap", "overview", "shards", "gradients", "inspector")
    _css = load_css("inspector")

    # The value: its tensors, where it is not, what is to be said of it (`sheets.summarise`).
    summary = traitlets.Dict().tag(sync=True)
    # The tensor that is looked at (`sheets.detail`).
    detail = traitlets.Dict().tag(sync=True)
    # The gradients' table (`sheets.tabulate`); empty until it is asked for.
    gradients = traitlets.Dict().tag(sync=True)
    # The last picture, in few pixels; the front end's own.
    picture = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    # What looks again by itself: {"watch": bool, "follow": bool}.
    live = traitlets.Dict().tag(sync=True)
    # What is shown first.
    tab = traitlets.Unicode("overview").tag(sync=True)


class Inspector:
    """One value on all ranks, in a widget.

    Args:
        answers: who tells of it.
        coordinates: rank -> where it is in the mesh.
        inspection: what they have told already.
        grads: begin with the gradients.
        watch: look again after each cell.
        follow: look again each second while a cell runs.
        events: the shell's; None without one.
        period_s: how often `follow` looks.
    """

    def __init__(
        self,
        answers: Answers,
        coordinates: dict[int, str] | None = None,
        *,
        inspection: Inspection | None = None,
        grads: bool = False,
        watch: bool = False,
        follow: bool = False,
        events: Any = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._answers = answers
        self._coordinates = coordinates or {}
        self._path = ""
        self._stamp = 0
        self._rows: list[dict[str, Any]] = []
        self._inspection = Inspection(answers.expression, {})
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._views: set[str] = set()
        self._was_greeted = False
        self._wants_gradients = grads
        self._quick, self._slow = Worker(), Worker()
        self.refresher = Refresher(self.refresh, answers.is_busy, self.is_seen, events, period_s)
        self.widget = InspectorWidget(tab="gradients" if grads else "overview")
        if inspection is None:
            self.refresh()
        else:
            self._take(inspection)
        self.view = View(self.widget, self.static)
        self.widget.on_msg(self._hear)
        self._set_live(watch, follow)

    # ---- what is shown

    def refresh(self, is_beside: bool = False) -> None:
        """Look again. Blocks; on any thread.

        Args:
            is_beside: while a cell runs: what costs much is left as it was.
        """
        with self._lock:
            if self.widget.ended:
                return
            self._stamp += 1
            if is_beside and len(self._rows) > 1:
                self._show_detail(is_beside=True)
                return
            inspection = self._answers.inspect(is_beside)
            if is_beside and not inspection.found:
                self._say(sorted({str(refusal) for refusal in inspection.refusals.values()}))
                return
            self._take(inspection, is_beside)

    def static(self) -> Static:
        """What is shown without the widget."""
        facts = facts_by_path(self._inspection.found).get(self._path, {})
        table = facts_table(self._answers.expression, facts)
        return Static(repr(table), table._repr_html_())

    def freeze(self, why: str) -> None:
        """The mesh has ended: show no more than what was seen. From any thread."""
        self.close()
        self.view.freeze(why)

    def close(self) -> None:
        """Look no more by itself. From any thread."""
        self.refresher.close()

    def is_seen(self) -> bool:
        """Whether anybody looks; so it is where nobody tells."""
        return bool(self._seen) or not self._was_greeted

    # ---- questions

    def answer(self, content: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Answer a question of the front end. Blocks; on any thread.

        Args:
            content: ``ask`` says what; the rest is of the kind asked for.

        Returns:
            The answer, with ``error`` in it if there is none; and buffers beside it.
        """
        match content["ask"]:
            case "picture":
                return self._picture(content)
            case "element":
                return self._element(content), []
            case "items":
                return {"rows": self._rows, "stamp": self._stamp}, []
            case "hello":
                return {}, []
            case other:
                return {"error": f"no such question: {other}"}, []

    def _picture(self, content: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        dims = (int(content["dims"][0]), int(content["dims"][1]))
        subject = Picture(
            self._answers.expression,
            str(content["path"]),
            tuple(int(at) for dim, at in enumerate(content["index"]) if dim not in dims),
            dims,
            (int(content["rows"][0]), int(content["rows"][1])),
            (int(content["cols"][0]), int(content["cols"][1])),
            min(int(content["height"]), MAX_PIXELS),
            min(int(content["width"]), MAX_PIXELS),
            content["reduction"],
        )
        found = self._of_ranks(subject, content)
        if isinstance(found, str):
            return {"error": found}, []
        shown = _difference(*found) if len(found) == 2 else found[0]
        height, width = shown.values.shape
        answer = {
            "height": height,
            "width": width,
            "low": number(shown.low),
            "high": number(shown.high),
            "is_exact": shown.is_exact,
            "is_torn": shown.is_torn,
            "is_sampled": shown.is_sampled,
        }
        return answer, [shown.values.astype("<f4").tobytes()]

    def _element(self, content: dict[str, Any]) -> dict[str, Any]:
        index = tuple(int(at) for at in content["index"])
        found = self._of_ranks(Element(self._answers.expression, str(content["path"]), index), content)
        if isinstance(found, str):
            return {"error": found}
        return {"text": found[0] if len(found) == 1 else subtract(found)}

    def _of_ranks(self, subject: Picture | Element, content: dict[str, Any]) -> list[Any] | str:
        """The answers of the rank and of the one to be subtracted; or why there are none."""
        ranks = [int(content["rank"])]
        if content.get("minus") is not None:
            ranks.append(int(content["minus"]))
        looked = self._look(subject, False, ranks)
        for rank in ranks:
            if rank not in looked.answers:
                return f"rank {rank}: {looked.refusals.get(rank, 'did not answer')}"
        return [looked.answers[rank] for rank in ranks]

    # ---- the front end's messages

    def _hear(self, widget: Any, content: dict[str, Any], buffers: Any) -> None:
        # On whatever thread: what takes long is done on another one.
        view, kind = str(content.get("view", "")), content.get("ask")
        if kind == "hello":
            self._was_greeted = True
            self._views.add(view)
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
            (self._seen.add if content["is_visible"] else self._seen.discard)(view)
            if content["is_visible"]:
                self.refresher.note_seen()
        elif kind == "gone":
            self._views.discard(view)
            self._seen.discard(view)

    def _reply(self, content: dict[str, Any], view: str) -> None:
        answer, buffers = self.answer(content)
        self.widget.send({**answer, "id": content["id"], "view": view}, buffers)

    def _choose(self, path: str) -> None:
        with self._lock:
            self._path = path
            self._stamp += 1
            self._show_detail(is_beside=False)

    def _set_live(self, watch: bool, follow: bool) -> None:
        self.refresher.set(watch, follow)
        self.widget.live = {"watch": watch, "follow": follow}

    # ---- inside; under the lock

    def _take(self, inspection: Inspection, is_beside: bool = False) -> None:
        self._inspection = inspection
        self._rows = list_items(inspection)
        paths = [row["path"] for row in self._rows]
        if self._path not in paths:
            self._path = paths[0] if paths else ""
        with self.widget.hold_sync():
            self.widget.summary = summarise(inspection, self._rows, self._stamp, time.strftime("%H:%M:%S"))
            self._show_detail(is_beside)
            if self._wants_gradients and not is_beside:
                self._show_gradients()

    def _show_detail(self, is_beside: bool) -> None:
        if not self._rows:
            self.widget.detail = {}
            return
        answers, path, inspection = self._answers, self._path, self._inspection
        if not inspection.is_one:  # of a nest, not everything has been read
            looked = self._look(Overview(answers.expression, 1, path), is_beside)
            if is_beside and not looked.answers:
                self._say(sorted({str(refusal) for refusal in looked.refusals.values()}))
                return
            inspection = Inspection(answers.expression, looked.answers, looked.refusals)
        facts = facts_by_path(inspection.found).get(path, {})
        absent = {rank: _NOT_THERE for rank in inspection.found if rank not in facts}
        comparison = inspection.comparisons.get(path) or answers.compare(inspection, path, is_beside)
        spread = inspection.spreads.get(path) or answers.spread(inspection, path, is_beside)
        refusals = {**absent, **inspection.refusals}
        shown = detail(answers.expression, path, facts, refusals, self._coordinates, comparison, spread)
        self.widget.detail = {**shown, "stamp": self._stamp}

    def _show_gradients(self) -> None:
        looked = self._look(Gradients(self._answers.expression), False)
        self.widget.gradients = tabulate(looked, _MAX_GRADIENTS)

    def _say(self, notices: list[str]) -> None:
        self.widget.summary = {**self.widget.summary, "notices": notices}

    def _look(self, subject: Any, is_beside: bool, ranks: list[int] | None = None) -> Looked:
        return self._answers.look(subject, ranks, is_beside)


def _difference(one: Pixels, other: Pixels) -> Pixels:
    import numpy as np

    if one.values.shape != other.values.shape:
        raise ValueError(f"{one.values.shape} and {other.values.shape} cannot be subtracted")
    with np.errstate(invalid="ignore", over="ignore"):
        values = one.values - other.values
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    is_torn, is_sampled = one.is_torn or other.is_torn, one.is_sampled or other.is_sampled
    return Pixels(values, low, high, one.is_exact and other.is_exact, is_torn, is_sampled)


def inspect_value(ranks: Ranks, expression: str, options: Given) -> Any:
    """What ``%dist_inspect`` shows: the widget, or a table in a terminal."""
    inspection = ranks.inspect(expression)
    if cell_publisher() is None:
        return facts_table(expression, inspection)
    chosen = {name: options[name] for name in ("grads", "watch", "follow")}
    return show_inspection(ranks, inspection, **chosen)


def show_inspection(
    ranks: Ranks, inspection: Inspection, *, grads: bool = False, watch: bool = False, follow: bool = False
) -> View:
    """A widget of what has been inspected; it asks these ranks for more, until their mesh ends."""
    session = ranks._session
    inspector = Inspector(
        MeshAnswers(ranks, inspection.expression),
        coordinates_of(session.dims, ranks.ranks),
        inspection=inspection,
        grads=grads,
        watch=watch,
        follow=follow,
        events=_shell_events(),
    )
    session.on_end(lambda: inspector.freeze("the mesh has ended: this is what was seen last"))
    return inspector.view


def _shell_events() -> Any:
    from IPython.core.getipython import get_ipython

    get: Callable[[], Any] = get_ipython
    shell = get()
    return shell.events if shell is not None else None
