"""The widgets that ranks make: passes messages on between ranks and the front end, in order.

What a rank says goes to the front end at once. What the front end says goes to the rank as work. A
page that is loaded again asks the kernel for all widgets: the ranks are asked for theirs.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CellmeshError
from ..wire.codec import Frame, Parcel
from ..wire.comms import CommKind, FromFrontEnd, ToFrontEnd
from .output.calling_cell import cell_publisher
from .output.cell_record import Publish
from .output.mime_bundle import unpack
from .run import Run

# So many comms of ranks are open at most: front ends have trouble with fewer.
MAX_OPEN = 10_000
# So many messages wait for a busy rank; those that follow are dropped.
MAX_WAITING = 1000
# So long the kernel waits for a rank to take a value, as it would for a callback of its own: until
# then a front end holds back all but the newest position of a slider.
TURN_S = 0.5
# Of how many runs it is known which cell began them.
_MAX_CELLS = 512
_CONTROL = "jupyter.widget.control"
_TYPES = {"open": "comm_open", "message": "comm_msg", "close": "comm_close"}
_NO = ("no", "n", "false", "off", "0", "0.0")


# Sends a message of the front end to a comm of this rank, with its buffers; the last argument shows
# what its callback prints, in the cell that made the comm.
Send = Callable[[int, FromFrontEnd, Sequence[Frame], Publish], Run[Any]]
# Model id -> state and paths of binary values as JSON, and those values.
States = Mapping[str, tuple[str, Sequence[Frame]]]


@dataclass(frozen=True)
class _Cell:
    """A notebook cell that started a run: its kernel, its request message, its output area."""

    kernel: Any
    parent: Mapping[str, Any]
    publish: Publish


@dataclass(eq=False)
class _NotebookComm:
    """Stands for the comm of a rank's widget in the kernel's comm manager."""

    comm_id: str
    target_name: str
    rank: int
    cell: _Cell
    hear: Callable[[_NotebookComm, CommKind, dict[str, Any]], None]

    def handle_msg(self, message: dict[str, Any]) -> None:
        """Pass a message of the front end on to the rank."""
        self.hear(self, "message", message)

    def handle_close(self, message: dict[str, Any]) -> None:
        """Pass on to the rank that the front end closed the comm."""
        self.hear(self, "close", message)

    def say(
        self,
        kind: CommKind,
        content: Mapping[str, Any],
        buffers: Sequence[Frame] = (),
        parent: Mapping[str, Any] | None = None,
    ) -> None:
        """Send the front end a message, from any thread, as part of the cell or another message."""
        body = {key: value for key, value in content.items() if key != "metadata"}
        self.cell.kernel.session.send(
            self.cell.kernel.iopub_socket,
            _TYPES[kind],
            {"data": {}, **body, "comm_id": self.comm_id},
            metadata=content.get("metadata") or {},
            parent=parent or self.cell.parent,
            ident=f"comm-{self.comm_id}".encode(),
            buffers=[memoryview(buffer) for buffer in buffers],
        )


class RankComms:
    """The comms of the widgets of one mesh's ranks; usable on any thread.

    `send` passes a message on to a rank; `ask` asks ranks for the states of their widgets and
    leaves out those that do not answer.
    """

    def __init__(
        self,
        send: Send,
        ask: Callable[[Sequence[int]], Mapping[int, States]],
    ) -> None:
        self._number = 1 + secrets.randbits(48)
        self._send, self._ask = send, ask
        self._lock = threading.RLock()
        self._cells: collections.OrderedDict[int, _Cell] = collections.OrderedDict()
        self._last_cell: _Cell | None = None
        self._open: dict[str, _NotebookComm] = {}
        self._callbacks: dict[int, int] = {}  # run -> rank
        self._is_full = False
        self._answers_pages = False

    @property
    def audience(self) -> int:
        """The number that names this controller in messages of ranks' widgets; 0 if no front end
        can show widgets.
        """
        return self._number if "ipykernel" in sys.modules else 0

    def began(self, run: int) -> None:
        """Note the cell that starts a run, because widgets of the run are displayed in that
        cell.
        """
        cell = self._last_cell = _calling_cell(self._last_cell)
        if cell is not None:
            with self._lock:
                self._cells[run] = cell
                if len(self._cells) > _MAX_CELLS:
                    self._cells.popitem(last=False)

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[ToFrontEnd]) -> None:
        """Pass a message of a rank's comm on to the front end; called in the link's loop."""
        verb, buffers = parcel
        content = unpack(verb.content)
        found = self._open.get(verb.comm)
        if found is None and verb.kind == "open":
            # Of an old run's thread it is no longer known which cell it was.
            found = self._add(ranks[0], self._cells.get(run, self._last_cell), verb, content)
        elif found is not None and (found.rank != ranks[0] or verb.kind == "open"):
            return
        if found is not None:
            if verb.kind == "close":
                self._forget(found)
            found.say(verb.kind, content, buffers)

    def is_open(self, model_id: str) -> bool:
        """Return whether the front end has a widget with this model id open."""
        return model_id in self._open

    def running(self, ranks: Container[int]) -> tuple[int, ...]:
        """Return the runs in which ranks execute widget callbacks that have not ended, newest
        first.
        """
        with self._lock:
            return tuple(run for run, rank in reversed(self._callbacks.items()) if rank in ranks)

    def close(self, ranks: Container[int] | None, why: str) -> None:
        """Disconnect the widgets of ranks (None: of all ranks) and leave their last picture, with a
        note in their cells: the ranks have ended or belong to another controller.
        """
        with self._lock:
            gone = [comm for comm in self._open.values() if ranks is None or comm.rank in ranks]
            for comm in gone:
                self._forget(comm)
        for cell in {id(comm.cell): comm.cell for comm in gone}.values():
            with contextlib.suppress(Exception):  # the kernel ends: nobody is there to read it
                _note(cell, why)

    def _add(
        self, rank: int, cell: _Cell | None, verb: ToFrontEnd, content: Mapping[str, Any]
    ) -> _NotebookComm | None:
        if cell is None:
            return None
        if len(self._open) >= MAX_OPEN:
            self._note_once(
                cell,
                f"ranks have more than {MAX_OPEN:,} widgets open: those that follow are not shown",
            )
            return None
        import comm

        added = _NotebookComm(verb.comm, content.get("target_name", ""), rank, cell, self._hear)
        with self._lock:
            self._open[verb.comm] = added
        manager = comm.get_comm_manager()
        manager.register_comm(added)  # type: ignore[arg-type]
        if added.target_name == "jupyter.widget" and not self._answers_pages:
            self._answers_pages = True
            import ipywidgets  # type: ignore[import-untyped]  # noqa: F401  # has the first answer

            own = manager.targets[_CONTROL]
            manager.register_target(_CONTROL, lambda asked, said: self._answer(own, asked, said))
        return added

    def _forget(self, known: _NotebookComm) -> None:
        self._open.pop(known.comm_id, None)
        sys.modules["comm"].get_comm_manager().comms.pop(known.comm_id, None)

    def _note_once(self, cell: _Cell, text: str) -> None:
        if not self._is_full:
            self._is_full = True
            _note(cell, text)

    def _hear(self, known: _NotebookComm, kind: CommKind, message: dict[str, Any]) -> None:
        """Pass a message of the front end on to a rank's comm; on one of the kernel's threads."""
        data = message["content"].get("data", {})
        buffers = [memoryview(buffer) for buffer in message.get("buffers", ())]
        method = data.get("method")
        if kind == "close":
            self._forget(known)
        elif method == "request_state":
            packed, found = self._ask([known.rank]).get(known.rank, {}).get(known.comm_id, ("", ()))
            if packed:
                content = {"data": {"method": "update", **json.loads(packed)}}
                known.say("message", content, found, parent=message)
            return
        if sum(rank == known.rank for rank in self._callbacks.values()) >= MAX_WAITING:
            text = f"rank {known.rank} is busy, and its widgets are sent too many messages"
            self._note_once(known.cell, text)
            return
        if method == "update" and not buffers and _echoes():
            # The kernel confirms a value itself, as the rank may be busy; of a message that is
            # dropped, no value is confirmed.
            known.say("message", {"data": {**data, "method": "echo_update"}}, parent=message)
        said = {"data": data, "metadata": message.get("metadata", {})}
        verb = FromFrontEnd(
            0, known.comm_id, kind, json.dumps(said, default=str).encode(), len(buffers)
        )
        try:
            run = self._send(known.rank, verb, buffers, known.cell.publish)
        except CellmeshError:  # the rank is dead, or the mesh has ended: that is said elsewhere
            return
        self._callbacks[run.number] = known.rank
        run.on_end(lambda: self._callbacks.__delitem__(run.number))
        if method == "update":
            run.wait(TURN_S)

    def _answer(self, own: Callable[[Any, Any], None], asked: Any, opening: Any) -> None:
        """Answer a reloaded page that asks for all widgets: the kernel's own, and those of
        ranks.
        """
        send = asked.send

        def send_all(data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
            if data and data.get("method") == "update_states":
                paths, more = list(data.get("buffer_paths", ())), list(buffers or ())
                ranks = sorted({each.rank for each in self._open.values()})
                for rank, states in (self._ask(ranks) if ranks else {}).items():
                    for model_id, (packed, theirs) in states.items():
                        if self.is_open(model_id) and self._open[model_id].rank == rank:
                            described = json.loads(packed)
                            data["states"][model_id] = _as_entry(described["state"])
                            for path in described["buffer_paths"]:
                                paths.append([model_id, "state", *path])
                            more += theirs
                data, buffers = {**data, "buffer_paths": paths}, more
            send(data, metadata, buffers)

        asked.send = send_all
        own(asked, opening)


def _as_entry(state: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model_name", "model_module", "model_module_version")
    return {**{name: state.get(f"_{name}", "") for name in names}, "state": state}


def _echoes() -> bool:
    return os.environ.get("JUPYTER_WIDGETS_ECHO", "1").lower() not in _NO


def _calling_cell(last: _Cell | None) -> _Cell | None:
    """Return the notebook cell that is running, cached from the previous call where possible; None
    outside of a kernel.
    """
    if last is not None and last.kernel.get_parent() is last.parent:
        return last
    publish = cell_publisher()
    if publish is None:
        return None
    kernel: Any = sys.modules["IPython"].get_ipython().kernel
    return _Cell(kernel, kernel.get_parent(), publish)


def _note(cell: _Cell, text: str) -> None:
    cell.publish("stream", {"name": "stderr", "text": text + "\n"})
