"""Comms in the notebook's kernel that stand for those of ranks. Imported only where there is a
kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comm
from comm.base_comm import BaseComm

from ...wire.codec import Frame
from ..output.sinks import Publish

_CONTROL = "jupyter.widget.control"

# All states, the paths of binary values in them, and those.
States = tuple[dict[str, Any], list[list[str | int]], list[Frame]]


@dataclass(frozen=True)
class Cell:
    """A cell of the notebook's that has run something on ranks.

    Attributes:
        kernel: its kernel.
        parent: the message that it answers.
        publish: sends other messages with that cell as their parent.
    """

    kernel: Any
    parent: Mapping[str, Any]
    publish: Publish


class KernelComm(BaseComm):
    """A rank's comm, as the kernel knows it.

    Args:
        cell: its messages are that cell's.
        comm_id: of the rank's.
        target_name: what the front end is to make of it.
        hear: takes what the front end says: the kind, and the message.
    """

    def __init__(
        self,
        cell: Cell,
        comm_id: str,
        target_name: str,
        hear: Callable[[str, dict[str, Any]], None],
    ) -> None:
        super().__init__(target_name=target_name, comm_id=comm_id, primary=False)
        self._cell = cell
        self._hear = hear
        comm.get_comm_manager().register_comm(self)

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        buffers: Sequence[Frame] | None = None,
        *,
        answers: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        """Send to the front end, from any thread.

        Args:
            msg_type: what it is.
            data, metadata, buffers, keys: the message.
            answers: what it answers, if that is not its cell.
        """
        kernel = self._cell.kernel
        kernel.session.send(
            kernel.iopub_socket,
            msg_type,
            {"data": data or {}, "comm_id": self.comm_id, **keys},
            metadata=dict(metadata or {}),
            parent=answers or self._cell.parent,
            ident=self.topic,
            buffers=[memoryview(buffer) for buffer in buffers or ()],
        )

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """The front end said something; on whichever thread the kernel hears it."""
        self._hear("message", msg)

    def handle_close(self, msg: dict[str, Any]) -> None:
        """The front end closed it."""
        self._hear("close", msg)

    def end(self, says_so: bool = True) -> None:
        """It is no more."""
        if self._closed:
            return
        self._closed = True
        comm.get_comm_manager().comms.pop(self.comm_id, None)
        if says_so:
            with contextlib.suppress(Exception):  # the kernel ends: nobody is there to be told
                self.publish_msg("comm_close")


class Control:
    """Answers a page that asks the kernel for all its widgets: with the kernel's own, and those of
    ranks.

    Args:
        plain: answers for the kernel's own.
    """

    def __init__(self, plain: Callable[[Any, Any], None]) -> None:
        self._plain = plain
        self.sources: list[Callable[[], States]] = []

    def __call__(self, opened: Any, message: Any) -> None:
        """The front end has opened a comm to ask by."""
        send = opened.send

        def send_all(data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
            if data and data.get("method") == "update_states":
                data, buffers = self._add_ours(data, list(buffers or ()))
            send(data, metadata, buffers)

        opened.send = send_all
        self._plain(opened, message)

    def _add_ours(
        self, data: dict[str, Any], buffers: list[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        for source in self.sources:
            states, paths, more = source()
            data = {
                **data,
                "states": {**data["states"], **states},
                "buffer_paths": [*data.get("buffer_paths", ()), *paths],
            }
            buffers += more
        return data, buffers


def answer_for(source: Callable[[], States]) -> Callable[[], None]:
    """Have pages told of these widgets, too.

    Args:
        source: gives their states.

    Returns:
        What ends that.
    """
    import ipywidgets  # type: ignore[import-untyped]  # noqa: F401  # registers what answers for the kernel's own

    manager = comm.get_comm_manager()
    control = manager.targets.get(_CONTROL)
    if not isinstance(control, Control):
        control = Control(control or (lambda opened, message: None))
        manager.targets[_CONTROL] = control
    control.sources.append(source)
    return lambda: control.sources.remove(source)
