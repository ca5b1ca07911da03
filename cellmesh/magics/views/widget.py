"""The base class of widgets, and their display, also in viewers without widgets.

A widget is an `anywidget`: its JavaScript (an ES module) and its CSS are files of this package,
sent with it, so that it works offline. It is published in three forms: the widget; static HTML, for
viewers without widgets; and text, for terminals. If a program executes the notebook, there is no
widget. Once its mesh has ended, the widget is replaced by the HTML.
"""

from __future__ import annotations

import contextlib
import html
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from ...controller.output.calling_cell import cell_publisher, is_attended
from ..render.tables import Static

# Remark below a view in a page without a widget manager.
_NO_WIDGETS = (
    '<div style="opacity:.65">this stands still, as the page shows no widgets: <code>pip install '
    "ipywidgets anywidget</code> where Jupyter runs, and reload the page</div>"
)
FOLDER = Path(__file__).parent  # of the widgets, one folder each
_VIEW = "application/vnd.jupyter.widget-view+json"


def load_css(*names: str) -> str:
    """Return the style sheets of a widget, after the one that all widgets share.

    Args:
        names: paths of the files below `views/`, without the suffix, as in ``"plot/plot"``.
    """
    return "\n".join((FOLDER / f"{file}.css").read_text() for file in ("base", *names))


def load_js(*names: str) -> str:
    """Join a widget's JavaScript files to one ES module with one scope; the last file exports.

    Args:
        names: paths of the files below `views/`, without the suffix.
    """
    return "\n".join((FOLDER / f"{name}.js").read_text() for name in names)


class Widget(anywidget.AnyWidget):
    """Base class of the widgets: the state that all of them have in the front end."""

    # Why the widget is no longer updated; "" while it is.
    ended = traitlets.Unicode("").tag(sync=True)

    def open(self) -> None:
        """Open the comm to the front end, if there is one."""
        if (
            not is_attended()
        ):  # a program that executes the notebook would keep the state of every widget
            return
        super().open()
        # ipykernel 7.4 handles the front end's messages in the subshell of the widget's last
        # message. If that was a thread of ours, they would wait for the running cell, unlike in the
        # subshell that the front end has chosen.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = None


class LiveView:
    """A widget in the output of a cell or, without a front end, its HTML and text.

    Args:
        widget: the widget.
        static: returns the view that is shown without the widget; called on any thread.
        end: called before the view is frozen for good.
    """

    def __init__(
        self, widget: Widget, static: Callable[[], Static], end: Callable[[], None] = lambda: None
    ) -> None:
        self.widget = widget
        self._static = static
        self._end = end
        self._last = Static("", "")
        self._shown: list[tuple[Callable[[str, dict[str, Any]], None], str]] = []
        self._ended = ""
        self.is_attended = is_attended()

    def freeze(self, why: str) -> None:
        """Replace the widget by its HTML and a note why it ended; callable on any thread."""
        if self._ended:
            return
        self._ended = why
        self._end()
        with contextlib.suppress(Exception):  # the last view is better than none
            self._last = self._static()
        static = self._last
        self._static = lambda: static  # nothing else need be kept for it
        content = f'{static.html}<div style="opacity:.65">{html.escape(why)}</div>'
        data = {"text/plain": f"{static.text}\n{why}", "text/html": content}
        for publish, display_id in self._shown:
            publish("update_display_data", _content(data, display_id))
        # Not closed yet: a page that was reloaded since has lost the displays' ids, and still shows
        # the widget.
        with contextlib.suppress(Exception):  # the kernel ends, and the front end is disconnected
            self.widget.ended = why

    def close(self) -> None:
        """Close the widget's comm; callable on any thread."""
        with contextlib.suppress(Exception):
            self.widget.close()

    def refresh(self) -> None:
        """Update the HTML and text in the cell's output, for viewers without widgets.

        Callable on any thread. If a program executes the notebook, the update is sent within a
        cell: such a program reads only the output of the cell that it runs.
        """
        if self._ended or not self._shown:
            return
        data = self._forms()
        current = None if self.is_attended else cell_publisher()
        for publish, display_id in self._shown:
            (current or publish)("update_display_data", _content(data, display_id))

    def _ipython_display_(self) -> None:
        publish = cell_publisher()
        if publish is None:
            print(self._static().text)
            return
        display_id = uuid.uuid4().hex
        self._shown.append((publish, display_id))
        publish.display(_content(self._forms(), display_id))

    def _forms(self) -> dict[str, Any]:
        static = self._last = self._static()
        data: dict[str, Any] = {"text/plain": static.text, "text/html": static.html}
        if self.is_attended and not self._ended:
            # Pages with a widget manager show the widget instead of this.
            data["text/html"] = f"{static.html}{_NO_WIDGETS}"
            data[_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return data


def at_cells_ends(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function at the end of each cell of the notebook; return a function to stop this."""
    shell = get_ipython()
    if shell is None:
        return lambda: None

    def call(*_: Any) -> None:
        function()

    shell.events.register("post_run_cell", call)
    return lambda: shell.events.unregister("post_run_cell", call)


def _content(data: dict[str, Any], display_id: str) -> dict[str, Any]:
    return {"data": data, "metadata": {}, "transient": {"display_id": display_id}}
