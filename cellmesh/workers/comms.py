"""Comms (widgets) that user code opens on a rank: their messages go to the notebook's front end,
and the front end's messages run as work.

Nothing here happens before user code imports `comm`, as ipywidgets, anywidget and plotly do: then
comms are made by `RankComm` in place of the package's own, which lead nowhere.

The widgets of a run are those of its lowest rank, which *leads* it. Other ranks' comms are quiet:
they send nothing, until their rank leads a run that displays one of them (``%%dist --ranks 2``). So
are the comms that an earlier notebook has seen, until a later one displays them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..stdlib import threading
from ..wire.codec import Frame, Parcel
from ..wire.comms import CommKind, FromFrontEnd, ToFrontEnd, WidgetStates
from ..wire.output import DisplayKind, StreamName
from .output_widget import Capture, Throttle, find_capture
from .rank.import_hooks import AfterImport
from .rank.streams import DISPLAY_BOUND, Pump, RankStream
from .run_tracker import RunTracker

if TYPE_CHECKING:
    from .rank.features import RankContext
    from .rank.shell import RankShell
    from .rank.streams import Show

_VIEW = "application/vnd.jupyter.widget-view+json"
_KINDS: dict[str, CommKind] = {"comm_open": "open", "comm_msg": "message", "comm_close": "close"}
# What Jupyter's headers add to a message.
_HEADERS_BYTES = 1000


class _Kernel:
    """The stand-in for the kernel that an ``Output`` widget looks for on its comm; its fixed
    message id marks in `Comms` that the widget begins to capture output.

    It then sets its `msg_id` to this one's, by which `Comms` knows that it begins to take output.
    """

    def get_parent(self) -> dict[str, Any]:
        return {"header": {"msg_id": "cellmesh"}}


@dataclass(eq=False)
class _Opened:
    """A comm that user code has opened.

    Attributes:
        comm: the `RankComm`.
        run: the run that made it, or opened it again.
        audience: the controller that knows it, 0 for none.
        content, buffers: what it was opened with.
        capture: what its widget, an `Output`, takes in at present.
    """

    comm: Any
    run: int
    audience: int
    content: dict[str, Any]
    buffers: Sequence[Frame]
    capture: Capture | None = None

    @property
    def widget(self) -> Any:
        """The ipywidget of the comm; None if the comm is of no widget."""
        owner = getattr(self.comm._msg_callback, "__self__", None)
        is_widget = self.comm.target_name == "jupyter.widget" and hasattr(owner, "get_state")
        return owner if is_widget else None

    def describe(self) -> tuple[dict[str, Any], Sequence[Frame]]:
        """Return the content and buffers that open the comm with its widget's present state."""
        if self.widget is None:
            return self.content, self.buffers
        data, buffers = _describe(self.widget)
        return {**self.content, "data": data}, buffers


class Comms:
    """The comms (of widgets) that user code has opened on this rank; usable on any thread.

    Args:
        shell: shows what callbacks raise.
        pump: sends messages, after what has been printed before them.
        tracker: knows whose output a callback's is: the cell's that made the widget.
        shield: entered around what an interrupt must not cut in half.
        rank: this rank.
    """

    def __init__(
        self,
        shell: RankShell,
        pump: Pump,
        tracker: RunTracker,
        shield: AbstractContextManager[Any, Any],
        rank: int,
    ) -> None:
        self._shell, self._pump, self._tracker, self._rank = shell, pump, tracker, rank
        self._shield, self._lock = shield, threading.RLock()
        self._comms: dict[str, _Opened] = {}
        self._newest: dict[str, dict[str, Any]] = {}  # numbers and texts that wait to be sent
        self._throttle = Throttle(self._send_newest, self._lock, 0.05)
        self._outdated: set[str] = set()  # comms of whose updates one was not sent
        self._noted_run = -1
        self._is_installed = False

    def install(self) -> None:
        """Have the package `comm`, once it is imported, make this rank's comms."""
        if "comm" in sys.modules:  # preloaded
            self._take_over()
        names = ("comm", "ipykernel.ipkernel")
        AfterImport(dict.fromkeys(names, lambda module: self._take_over())).install()

    def showing(self, show: Show) -> Show:
        """Wrap the function that shows displays: a displayed widget is opened first, and an
        `Output` in use takes the display.
        """

        def show_or_capture(kind: DisplayKind, bundle: bytes, display_id: str) -> None:
            run = self._tracker.current()
            if _VIEW.encode() in bundle and self._audience_of(run) == self._audience != 0:
                content = json.loads(bundle)
                if not self._open_view(content["data"].get(_VIEW, {}).get("model_id", "")):
                    del content["data"][_VIEW]
                    bundle = json.dumps(content).encode()
            capture = find_capture(run)
            if capture is not None:
                capture.add_display(kind, bundle, display_id)
            else:
                show(kind, bundle, display_id)

        return show_or_capture

    def receive(self, verb: FromFrontEnd, buffers: tuple[Frame, ...]) -> None:
        """Handle a message of the front end, on the main thread; an exception of its callback is
        shown.

        Raises:
            KeyboardInterrupt: the callback was interrupted.
        """
        opened = self._comms.get(verb.comm)
        if opened is None:  # it has been closed since
            return
        content = json.loads(verb.content)
        message = {
            "header": {"msg_type": "comm_close" if verb.kind == "close" else "comm_msg"},
            "parent_header": {},
            "metadata": content["metadata"],
            "content": {"comm_id": verb.comm, "data": content["data"]},
            "buffers": [memoryview(buffer) for buffer in buffers],
        }
        self._tracker.enter(opened.run)  # what it prints and makes is that cell's
        try:
            if verb.kind == "close":
                sys.modules["comm"].get_comm_manager().comms.pop(verb.comm, None)
                opened.comm._closed = True
                opened.comm.handle_close(message)
            else:
                opened.comm.handle_msg(message)
        except Exception:
            self._shell.showtraceback()
        finally:
            self._catch_up()
            self._tracker.enter(verb.run)

    def _take_over(self) -> None:
        """Have package `comm` make this rank's comms, also through functions imported by name."""
        import comm
        from comm.base_comm import BaseComm

        publish, manager = self._publish, comm._get_comm_manager()

        class RankComm(BaseComm):
            kernel = _Kernel()

            def publish_msg(self, msg_type: str, *args: Any, **keys: Any) -> None:
                publish(self, _KINDS[msg_type], *args, **keys)

        comm.DummyComm = RankComm  # type: ignore[misc, assignment]
        comm.create_comm = comm._create_comm
        comm.get_comm_manager = lambda: manager
        if not self._is_installed:
            self._is_installed = True
            self._shell.events.register("post_execute", self._catch_up)
            RankStream.divert = self._divert

    def _divert(self, stream: StreamName, text: str) -> bool:
        capture = find_capture(self._tracker.current())
        if capture is not None:
            capture.add_text(stream, text)
        return capture is not None

    def _publish(
        self,
        comm: Any,
        kind: CommKind,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: Sequence[Frame] | None = None,
        **keys: Any,
    ) -> None:
        """Handle a message that user code sends through its comm."""
        content = {"data": data or {}, "metadata": metadata or {}, **keys}
        if kind == "open":
            run = self._tracker.current()
            opened = _Opened(comm, run, self._audience_of(run), content, tuple(buffers or ()))
            self._comms[comm.comm_id] = opened
        opened = self._comms[comm.comm_id]
        method = content["data"].get("method") if opened.widget is not None else None
        if method == "echo_update":
            return  # the notebook's kernel has said it
        state = content["data"].get("state", {})
        if method == "update" and "msg_id" in state and hasattr(opened.widget, "outputs"):
            state = dict(state)
            self._take_output(opened, bool(state.pop("msg_id")))
            content["data"] = {**content["data"], "state": state}
            if not state:
                return
        if kind == "close":
            del self._comms[comm.comm_id]
        if not opened.audience or opened.audience != self._audience:
            return
        if method == "update" and not buffers and all(map(_is_plain, state.values())):
            with self._shield, self._lock:
                self._newest.setdefault(comm.comm_id, {}).update(state)
                self._throttle.request()
        else:
            self._throttle.call()
            self._post(opened, kind, content, buffers or ())

    def _take_output(self, opened: _Opened, begins: bool) -> None:
        if opened.capture is not None:
            opened.capture.end()
        run = self._tracker.current()
        opened.capture = Capture(opened.widget, run) if begins else None

    def _send_newest(self) -> None:
        newest, self._newest = self._newest, {}
        for comm_id, state in newest.items():
            if comm_id in self._comms:
                data = {"method": "update", "state": state, "buffer_paths": []}
                self._post(self._comms[comm_id], "message", {"data": data}, ())

    def _audience_of(self, run: int) -> int:
        """Return the id of the controller that shows a run's widgets; 0 unless this rank is the
        lowest of the run.
        """
        records = reversed(self._tracker.copy_records())
        return next((r.audience for r in records if r.run == run and r.lead == self._rank), 0)

    @property
    def _audience(self) -> int:
        """The number of the controller that sent the last cell or call."""
        records = self._tracker.copy_records()[-1:]
        return records[0].audience if records else 0

    def _post(
        self, opened: _Opened, kind: CommKind, content: Mapping[str, Any], buffers: Sequence[Any]
    ) -> bool:
        """Send a comm's message after opening the models that it refers to; return False if one
        of these messages is too large.
        """
        packed = pack(content)
        frames = tuple(bytes(memoryview(buffer)) for buffer in buffers)
        num_bytes = len(packed) + sum(map(len, frames)) + _HEADERS_BYTES
        comm_id = opened.comm.comm_id
        verb = ToFrontEnd(opened.run, comm_id, kind, packed.encode(), len(frames))
        if kind == "close":
            self._pump.send(Parcel(verb))
            return True
        names = [part.partition('"')[0] for part in packed.split('"IPY_MODEL_')[1:]]
        are_open = all(self._open_again(name) for name in names)
        if are_open and self._pump.send_to_widget(Parcel(verb, frames), num_bytes):
            return True
        if kind == "open":
            opened.audience = 0
        else:
            self._outdated.add(comm_id)
        if self._noted_run != self._tracker.current():
            self._noted_run = self._tracker.current()
            name = opened.content["data"].get("state", {}).get("_model_name", "")
            what = name.removesuffix("Model") or f"the comm {opened.comm.target_name!r}"
            later = "; its state on the rank is shown after a later cell, as soon as it may pass"
            text = f"cellmesh: a message of {num_bytes:,} bytes of {what} was not sent: "
            text += DISPLAY_BOUND + (later if name and kind == "message" else "") + "\n"
            self._pump.write(self._noted_run, "stderr", text)
        return False

    def _open_view(self, model_id: str) -> bool:
        """Open in the front end a widget that is about to be displayed; if it was not known there,
        open all others too.
        """
        is_quiet = model_id in self._comms and self._comms[model_id].audience != self._audience
        is_open = self._open_again(model_id)
        for comm_id in list(self._comms) if is_quiet else ():
            self._open_again(comm_id)
        return is_open

    def _open_again(self, comm_id: str) -> bool:
        """Open a comm in the front end, after those that its state refers to; return whether it
        is open.
        """
        opened = self._comms.get(comm_id)
        if opened is None or opened.audience == self._audience:
            return opened is None or opened.audience != 0
        opened.run, opened.audience = self._tracker.current(), self._audience
        content, buffers = opened.describe()
        return self._post(opened, "open", content, buffers)

    def _catch_up(self) -> None:
        """Send, after a cell or callback, the states of widgets whose updates were too large."""
        self._throttle.call()
        outdated, self._outdated = self._outdated, set()
        for opened in (self._comms[comm_id] for comm_id in outdated if comm_id in self._comms):
            if opened.widget is not None and opened.audience == self._audience:
                content, buffers = opened.describe()
                data = {"method": "update", **content["data"]}
                self._post(opened, "message", {"data": data}, buffers)


class WidgetHandler:
    """Answers requests for the states of one rank's widgets, on any thread."""

    def handle(self, request: WidgetStates, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        return describe_widgets()

    def handle_beside(self, request: WidgetStates) -> Any:
        """Answer a request on the control thread; see `rank.features.Handler`."""
        return describe_widgets()


def make_handler(context: RankContext) -> WidgetHandler:
    """Make the handler of requests for widgets' states; see `rank.features.Handler`."""
    return WidgetHandler()


def pack(value: Any) -> str:
    """Encode a widget message's content as JSON, as the notebook's kernel does.

    Raises:
        TypeError, ValueError: the value has no such form; NaN has none.
    """
    return json.dumps(value, default=_as_json, allow_nan=False)


def describe_widgets() -> dict[str, tuple[str, Sequence[Any]]]:
    """Return the state of each of this rank's widgets, for a reloaded page; on any thread.

    Returns:
        Model id -> its state and the paths of binary values in it, as JSON, and those values.
    """
    module = sys.modules.get("ipywidgets.widgets.widget")
    described: dict[str, tuple[str, Sequence[Any]]] = {}
    for model_id, widget in list(module._instances.items()) if module is not None else []:
        with contextlib.suppress(Exception):  # user code may be changing it
            data, buffers = _describe(widget)
            described[model_id] = pack(data), [bytes(memoryview(buffer)) for buffer in buffers]
    return described


def _describe(widget: Any) -> tuple[dict[str, Any], Sequence[Any]]:
    from ipywidgets.widgets.widget import _remove_buffers  # type: ignore[import-untyped]

    state, paths, buffers = _remove_buffers(widget.get_state())
    if "msg_id" in state:
        state["msg_id"] = ""
    return {"state": state, "buffer_paths": paths}, buffers


def _is_plain(value: Any) -> bool:
    """Return whether a value in a widget's state is a text or a finite number, so that a newer
    value may replace it before it is sent.

    Lists and objects are not: some widgets give orders by way of their state, as plotly does, a
    list and None right behind it.
    """
    return isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    for form in ("tolist", "isoformat"):  # arrays and tensors; dates
        if hasattr(value, form):
            return getattr(value, form)()
    return float(value) if isinstance(value, numbers.Real) else list(value)
