"""The widgets of ranks in the notebook: a comm of the kernel's for each of a rank's, and messages
both ways.

What a rank says goes to the front end at once. What the front end says goes to the rank as work,
one message at a time, since a rank that is busy takes nothing in; what waits is merged (`inbox`).
The kernel's part ends when that is queued: it stays free, and tells the front end itself that a
value has been taken (the *echo* that ipywidgets' protocol wants).

A page that is loaded again asks the kernel for all widgets. It is answered here, from the last
known state of each model (`mirror`), whatever the rank is doing.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CellmeshError
from ...wire.codec import Parcel
from ...wire.messages import ToFrontEnd
from ..output.packed import unpack
from ..output.sinks import Publish, cell_publisher
from ..run import Run
from .inbox import Inbox, Letter
from .mirror import Mirror
from .stills import draw_still

if TYPE_CHECKING:
    from .kernel import Cell, KernelComm, States

# So many comms of ranks are open at most: front ends have trouble with fewer.
MAX_OPEN = 10_000
# So many places are known where a widget is displayed: they are told when it is no more.
_MAX_VIEWS = 100
# Of how many runs it is known which cell began them.
_MAX_CELLS = 512

# Sends a rank a message of the front end's.
SendLetter = Callable[[int, Letter], Run[Any]]


@dataclass
class _Model:
    rank: int
    cell: Cell
    comm: KernelComm
    mirror: Mirror | None  # of ipywidgets' models; other comms' states are not known


@dataclass(frozen=True)
class _View:
    """A widget in an output area."""

    publish: Publish
    display_id: str
    text: str


class RankComms:
    """The comms of one mesh's ranks; used on any thread.

    Args:
        send: passes a message on to a rank.
    """

    def __init__(self, send: SendLetter) -> None:
        self._audience = 1 + secrets.randbits(48)
        self._send = send
        self._lock = threading.RLock()
        self._cells: collections.OrderedDict[int, Cell] = collections.OrderedDict()
        self._last_cell: Cell | None = None
        self._models: dict[str, _Model] = {}
        self._views: dict[str, list[_View]] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._callbacks: dict[int, int] = {}  # run -> rank
        self._stop_answering: Callable[[], None] | None = None
        self._is_full = False

    @property
    def audience(self) -> int:
        """Tells ranks which controller knows their comms; 0 where nobody could show them."""
        return self._audience if "ipykernel" in sys.modules else 0

    def began(self, run: int) -> None:
        """The calling cell begins a run, which may make widgets."""
        cell = self._last_cell = _calling_cell(self._last_cell)
        if cell is not None:
            with self._lock:
                self._cells[run] = cell
                if len(self._cells) > _MAX_CELLS:
                    self._cells.popitem(last=False)

    # ---- what ranks say, in the link's loop

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[ToFrontEnd]) -> None:
        """A rank's comm says something."""
        verb, buffers = parcel
        content = unpack(verb.content)
        model = self._models.get(verb.comm)
        if model is None:
            # Of an old run's thread it is no longer known which cell it was.
            cell = self._cells.get(run, self._last_cell)
            if verb.kind == "open" and cell is not None:
                self._open(ranks[0], cell, verb.comm, content, list(buffers))
        elif model.rank != ranks[0] or verb.kind == "open":
            return
        elif verb.kind == "close":
            self._forget(verb.comm)
            model.comm.end()
        else:
            data = content["data"]
            if model.mirror is not None and data.get("method") == "update":
                with self._lock:
                    model.mirror.update(data["state"], data.get("buffer_paths", ()), buffers)
            model.comm.publish_msg("comm_msg", data, content.get("metadata"), list(buffers))

    # ---- what is shown

    def is_open(self, model_id: str) -> bool:
        """Whether the front end knows a widget."""
        return model_id in self._models

    def shown(self, model_id: str, publish: Publish, display_id: str, text: str) -> None:
        """A widget is displayed; without it, this text would be."""
        with self._lock:
            if model_id in self._models:
                views = self._views.setdefault(model_id, [])
                views.append(_View(publish, display_id, text))
                del views[:-_MAX_VIEWS]

    def close(self, ranks: Container[int] | None, why: str) -> None:
        """These ranks (None: all) are gone, or not ours any more: their widgets stand still."""
        with self._lock:
            gone = {i: m for i, m in self._models.items() if ranks is None or m.rank in ranks}
            views = {model_id: self._views.get(model_id, []) for model_id in gone}
            mirrors = {model_id: m.mirror for model_id, m in gone.items() if m.mirror is not None}
            for model_id in gone:
                self._forget(model_id)
            for rank, inbox in self._inboxes.items():
                if ranks is None or rank in ranks:
                    inbox.drop()
            if self._stop_answering is not None and not self._models:
                self._stop_answering()
                self._stop_answering = None
        for model_id, shown in views.items():
            for view in shown:
                with contextlib.suppress(Exception):  # the kernel ends: nobody is there to be told
                    view.publish("update_display_data", _still(model_id, view, mirrors, why))
        for model in gone.values():
            model.comm.end()

    # ---- what the front end says, on the kernel's threads

    def hear(self, comm_id: str, kind: str, message: dict[str, Any]) -> None:
        """The front end says something to a comm."""
        model = self._models.get(comm_id)
        if model is None:
            return
        data = message["content"].get("data", {})
        letter = Letter(
            comm_id,
            "close" if kind == "close" else "message",
            data,
            message.get("metadata", {}),
            [memoryview(buffer) for buffer in message.get("buffers", ())],
            model.cell.publish,
        )
        if kind == "close":
            self._forget(comm_id)
            model.comm.end(says_so=False)
        elif model.mirror is not None:
            if data.get("method") == "request_state" and model.mirror.is_whole:
                self._tell_state(model, message)
                return
            if letter.is_update:
                self._echo(model, model.mirror, letter, message)
        with self._lock:
            inbox = self._inboxes.setdefault(model.rank, Inbox())
            has_room = inbox.add(letter)
        if not has_room and not self._is_full:
            self._is_full = True
            _note(
                model.cell,
                f"rank {model.rank} is busy, and its widgets have been told too much meanwhile",
            )
        self._deliver(model.rank)

    def running(self, ranks: Container[int]) -> tuple[int, ...]:
        """The runs of callbacks that have not ended on some ranks, newest first."""
        with self._lock:
            return tuple(run for run, rank in reversed(self._callbacks.items()) if rank in ranks)

    def hurry(self, ranks: Iterable[int]) -> None:
        """Other work is about to be sent to these ranks: what waits for them was said before."""
        for rank in ranks:
            while rank in self._inboxes and self._deliver(rank, hurries=True):
                pass

    def states(self) -> States:
        """All models, as a front end wants them that asks for all."""
        with self._lock:
            states: dict[str, Any] = {}
            paths: list[list[str | int]] = []
            buffers: list[Any] = []
            for model_id, model in self._models.items():
                if model.mirror is not None and model.mirror.is_whole:
                    states[model_id] = model.mirror.entry()
                    _, own_paths, own_buffers = model.mirror.whole()
                    paths += [[model_id, "state", *path] for path in own_paths]
                    buffers += own_buffers
            # Packed now, and not while a rank changes it.
            return json.loads(json.dumps(states)), paths, buffers

    # ---- inside

    def _open(
        self, rank: int, cell: Cell, comm_id: str, content: dict[str, Any], buffers: list[Any]
    ) -> None:
        from .kernel import KernelComm, answer_for

        if len(self._models) >= MAX_OPEN:
            if not self._is_full:
                self._is_full = True
                _note(
                    cell,
                    f"ranks have more than {MAX_OPEN:,} widgets open: those that follow are not "
                    "shown",
                )
            return
        data, target_name = content["data"], content.get("target_name", "")
        mirror = None
        if target_name == "jupyter.widget":
            mirror = Mirror(data.get("state", {}), data.get("buffer_paths", ()), buffers)
            if self._stop_answering is None:
                self._stop_answering = answer_for(self.states)
        opened = KernelComm(
            cell, comm_id, target_name, lambda kind, message: self.hear(comm_id, kind, message)
        )
        with self._lock:
            self._models[comm_id] = _Model(rank, cell, opened, mirror)
        opened.publish_msg(
            "comm_open",
            data,
            content.get("metadata"),
            buffers,
            target_name=target_name,
            target_module=content.get("target_module"),
        )

    def _forget(self, comm_id: str) -> None:
        with self._lock:
            model = self._models.pop(comm_id, None)
            self._views.pop(comm_id, None)
            if model is not None and model.rank in self._inboxes:
                self._inboxes[model.rank].drop(comm_id)

    def _tell_state(self, model: _Model, message: dict[str, Any]) -> None:
        assert model.mirror is not None
        with self._lock:
            state, paths, buffers = model.mirror.whole()
            state = json.loads(json.dumps(state))
        data = {"method": "update", "state": state, "buffer_paths": paths}
        model.comm.publish_msg("comm_msg", data, None, buffers, answers=message)

    def _echo(self, model: _Model, mirror: Mirror, letter: Letter, message: dict[str, Any]) -> None:
        """Take a value over, and tell all pages of it."""
        state, paths = letter.data.get("state", {}), letter.data.get("buffer_paths", ())
        with self._lock:
            mirror.update(state, paths, letter.buffers)
        # Binary values come from the front end in uploads, which ipywidgets does not echo either.
        if not letter.buffers and os.environ.get("JUPYTER_WIDGETS_ECHO", "1").lower() not in _NO:
            data = {"method": "echo_update", "state": state, "buffer_paths": paths}
            model.comm.publish_msg("comm_msg", data, answers=message)

    def _deliver(self, rank: int, hurries: bool = False) -> bool:
        """Give a rank the next message, if it has taken in those before it; whether there was
        one.
        """
        with self._lock:
            inbox = self._inboxes[rank]
            letter = None if inbox.num_sent and not hurries else inbox.take()
            if letter is None:
                return False
            inbox.num_sent += 1
        try:
            run = self._send(rank, letter)
        except BaseException as error:
            with self._lock:
                inbox.num_sent -= 1  # else the next messages would wait for this one's end
                if not isinstance(error, CellmeshError):
                    raise
                inbox.drop()  # the rank is dead, or the mesh has ended: both are told elsewhere
            return False
        with self._lock:
            self._callbacks[run.number] = rank
        run.on_end(lambda: self._taken_in(rank, run.number))
        return True

    def _taken_in(self, rank: int, run: int) -> None:
        with self._lock:
            self._callbacks.pop(run, None)
            self._inboxes[rank].num_sent -= 1
        self._deliver(rank)


_NO = ("no", "n", "false", "off", "0", "0.0")


def _calling_cell(last: Cell | None) -> Cell | None:
    """The cell that asks, which often is the one that asked last; None outside of a Jupyter
    kernel.
    """
    if last is not None and last.kernel.get_parent() is last.parent:
        return last
    publish = cell_publisher()
    if publish is None:
        return None
    from .kernel import Cell

    kernel: Any = sys.modules["IPython"].get_ipython().kernel
    return Cell(kernel, kernel.get_parent(), publish)


def _note(cell: Cell, text: str) -> None:
    cell.publish("stream", {"name": "stderr", "text": text + "\n"})


def _still(model_id: str, view: _View, mirrors: Mapping[str, Mirror], why: str) -> dict[str, Any]:
    """What stands where a widget was."""
    text, content = draw_still(model_id, mirrors, view.text, why)
    data = {"text/plain": text, "text/html": content}
    return {"data": data, "metadata": {}, "transient": {"display_id": view.display_id}}
