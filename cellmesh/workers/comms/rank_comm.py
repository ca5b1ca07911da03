"""A comm on a rank. This module imports `comm`, and is imported only once user code has done so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import comm
from comm.base_comm import BaseComm, CommManager

from ...wire.codec import Frame
from ...wire.messages import CommKind
from .capturing import Capture, begin_capture, end_capture

if TYPE_CHECKING:
    from .hub import Comms

_KINDS: dict[str, CommKind] = {"comm_open": "open", "comm_msg": "message", "comm_close": "close"}


class _Kernel:
    """What an `Output` widget asks its comm's kernel for: the message whose output it is to take.

    It then sets its `msg_id` to this one's, and `RankComm` knows that it begins to take output.
    """

    def get_parent(self) -> dict[str, Any]:
        return {"header": {"msg_id": "cellmesh"}}


class RankComm(BaseComm):
    """A comm whose messages go to the notebook's front end.

    Attributes:
        run: the run that made it.
        audience: who knows it, 0 for nobody (see `Comms`).
    """

    comms: Comms
    run = -1
    audience = 0
    kernel = _Kernel()
    _opened: tuple[dict[str, Any], Sequence[Frame]] = ({}, ())
    _capture: Capture | None = None

    @property
    def is_widget(self) -> bool:
        """Whether it speaks ipywidgets' protocol."""
        return bool(self.target_name == "jupyter.widget")

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: Sequence[Frame] | None = None,
        **keys: Any,
    ) -> None:
        """Send a message to the front end."""
        kind = _KINDS[msg_type]
        data = data or {}
        if self.is_widget and kind == "message":
            if data.get("method") == "echo_update":
                return  # the notebook's kernel has said it
            if data.get("method") == "update" and self._is_output() and "msg_id" in data["state"]:
                state = dict(data["state"])
                self._take_output(state.pop("msg_id"))
                if not state:
                    return
                data = {**data, "state": state}
        content = {"data": data, "metadata": metadata or {}, **keys}
        if kind == "open":
            self._opened = content, tuple(buffers or ())
            self.comms.add(self)
        self.comms.speak(self, kind, content, buffers or ())

    def describe(self) -> tuple[dict[str, Any], Sequence[Frame]]:
        """What opens it now: content and buffers."""
        content, buffers = self._opened
        widget = self.owner()
        if not self.is_widget or not hasattr(widget, "get_state"):
            return content, buffers
        from ipywidgets.widgets.widget import _remove_buffers  # type: ignore[import-untyped]

        state, buffer_paths, buffers = _remove_buffers(widget.get_state())
        if self._is_output():
            state["msg_id"] = ""
        return {**content, "data": {"state": state, "buffer_paths": buffer_paths}}, buffers

    def describe_kind(self) -> str:
        """What it is, for messages to the user: a widget's class, or the comm's target."""
        name = self._opened[0].get("data", {}).get("state", {}).get("_model_name", "")
        return str(name).removesuffix("Model") or f"the comm {self.target_name!r}"

    def close_from_front_end(self, message: dict[str, Any]) -> None:
        """The front end has closed it."""
        comm.get_comm_manager().comms.pop(self.comm_id, None)
        self._closed = True
        self.handle_close(message)

    def owner(self) -> Any:
        """The widget."""
        return getattr(self._msg_callback, "__self__", None)

    def _is_output(self) -> bool:
        state = self._opened[0].get("data", {}).get("state", {})
        return bool(state.get("_model_module") == "@jupyter-widgets/output")

    def _take_output(self, msg_id: str) -> None:
        if self._capture is not None:
            end_capture(self._capture)
            self._capture = None
        if msg_id:
            self._capture = begin_capture(self.owner(), self.comms.current_run())


def take_over(comms: Comms) -> None:
    """Have `comm` make this rank's comms, also where its functions have been imported by name."""
    RankComm.comms = comms
    manager = comm._get_comm_manager()
    comm.DummyComm = RankComm  # type: ignore[misc, assignment]
    comm.create_comm = comm._create_comm

    def get_comm_manager() -> CommManager:
        return manager

    comm.get_comm_manager = get_comm_manager
