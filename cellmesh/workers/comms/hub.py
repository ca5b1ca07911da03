"""Comms (widgets) that user code opens on a rank, carried to the notebook's front end and back.

Nothing here happens before user code imports `comm`, as ipywidgets, anywidget and plotly do: then
comms are made by `rank_comm.RankComm` in place of the package's own, which lead nowhere.

The widgets of a run are those of its lowest rank, which *leads* it. Other ranks' comms are quiet:
they send nothing. They speak up once their rank leads a run that displays one of them (``%%dist
--ranks 2``); so do the comms that an earlier notebook has seen, once a later one displays them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ...wire.codec import Frame, Parcel
from ...wire.messages import CommKind, DisplayKind, FromFrontEnd, StreamName, ToFrontEnd
from ..rank.after_import import AfterImport
from ..rank.streams import DISPLAY_BOUND, Pump, RankStream
from ..run_tracker import RunTracker
from .coalescing import Updates, pack

if TYPE_CHECKING:
    from ..rank.displays import Show
    from ..rank.shell import RankShell
    from .rank_comm import RankComm

VIEW = b"application/vnd.jupyter.widget-view+json"
# Of how many runs that a widget was called back for it is known that this rank leads them.
_MAX_LED = 1000
# What Jupyter's headers add to a message.
_HEADERS_BYTES = 1000
# The audience of a comm whose opening was too large to be sent.
_REFUSED = -1


class Comms:
    """The comms of this rank.

    Args:
        shell: shows what callbacks raise.
        pump: sends messages, after what has been printed before them.
        tracker: told whose output a callback's is: the cell's that made the widget.
        shield: entered around what an interrupt must not cut in half.
        rank: who this is.
    """

    def __init__(
        self,
        shell: RankShell,
        pump: Pump,
        tracker: RunTracker,
        shield: AbstractContextManager[Any, Any],
        rank: int,
    ) -> None:
        self._shell = shell
        self._pump = pump
        self._tracker = tracker
        self._rank = rank
        self._led: dict[int, int] = {}  # run -> the audience that it was for
        self._updates = Updates(self._send_update, shield)
        self._comms: dict[str, RankComm] = {}
        self._outdated: set[str] = set()  # comms of whose updates one was not sent
        self._noted_run = -1
        self._is_installed = False

    def install(self) -> None:
        """From now on, `comm` makes comms of this rank, once it is imported."""
        if "comm" in sys.modules:  # preloaded
            self._take_over()
        names = ("comm", "ipykernel.ipkernel")
        AfterImport(dict.fromkeys(names, lambda module: self._take_over())).install()

    def showing(self, show: Show) -> Show:
        """Wrap what shows displays: widgets are made known first, `Output` widgets take what is
        theirs.
        """

        def show_or_capture(kind: DisplayKind, bundle: bytes, display_id: str) -> None:
            if self._is_installed:
                from .capturing import captured

                if VIEW in bundle and self._audience_of(self._tracker.current()) == self._audience:
                    content = json.loads(bundle)
                    view = content["data"].get(VIEW.decode(), {})
                    if not self._speak_up(view.get("model_id", "")):
                        del content["data"][VIEW.decode()]
                        bundle = json.dumps(content).encode()
                if captured(self._tracker.current(), kind, bundle, display_id):
                    return
            show(kind, bundle, display_id)

        return show_or_capture

    def receive(self, verb: FromFrontEnd, buffers: tuple[Frame, ...]) -> None:
        """A message of the front end's; on the main thread. What a callback raises is shown, and
        not raised.

        Raises:
            KeyboardInterrupt: the callback was interrupted.
        """
        found = self._comms.get(verb.comm)
        if found is None:  # it has been closed meanwhile
            return
        content = json.loads(verb.content)
        message = {
            "header": {"msg_type": f"comm_{_SHORT[verb.kind]}"},
            "parent_header": {},
            "metadata": content.get("metadata", {}),
            "content": {"comm_id": verb.comm, "data": content.get("data", {})},
            "buffers": [memoryview(buffer) for buffer in buffers],
        }
        # What it prints, and what it makes, belongs to the cell that made the widget.
        self._tracker.enter(found.run)
        if found.audience:
            self._led[found.run] = found.audience
            if len(self._led) > _MAX_LED:
                del self._led[next(iter(self._led))]
        try:
            if verb.kind == "close":
                found.close_from_front_end(message)
            else:
                found.handle_msg(message)
        except Exception:
            self._shell.showtraceback()
        finally:
            self._catch_up()
            self._tracker.enter(verb.run)

    # ---- for the comms

    def current_run(self) -> int:
        """The run that the caller belongs to."""
        return self._tracker.current()

    def add(self, comm: RankComm) -> None:
        """A comm is opened."""
        comm.run = self._tracker.current()
        comm.audience = self._audience_of(comm.run)
        self._comms[comm.comm_id] = comm

    def speak(
        self,
        comm: RankComm,
        kind: CommKind,
        content: Mapping[str, Any],
        buffers: Sequence[Frame],
    ) -> None:
        """Send a comm's message, unless it is quiet."""
        if kind == "close":
            self._comms.pop(comm.comm_id, None)
        if not comm.audience or comm.audience != self._audience:
            return
        data = content.get("data") or {}
        is_update = kind == "message" and data.get("method") == "update" and comm.is_widget
        if is_update and not buffers and not content.get("metadata"):
            self._updates.add(comm, data["state"])
            return
        self._updates.flush()
        self._post(comm, kind, pack(content), buffers, {comm.comm_id})

    # ---- inside

    def _take_over(self) -> None:
        from .rank_comm import take_over  # imports `comm`

        take_over(self)
        if not self._is_installed:
            self._is_installed = True
            self._shell.events.register("post_execute", self._catch_up)
            RankStream.divert = self._divert

    def _divert(self, stream: StreamName, text: str) -> bool:
        from .capturing import captured_text

        return captured_text(self._tracker.current(), stream, text)

    def _audience_of(self, run: int) -> int:
        """For whom this rank leads a run, 0 if it does not."""
        if run in self._led:
            return self._led[run]
        records = reversed(self._tracker.copy_records())
        return next(
            (each.audience for each in records if each.run == run and each.lead == self._rank), 0
        )

    @property
    def _audience(self) -> int:
        """For whom the last cell or call was."""
        try:
            return self._tracker.records[-1].audience
        except IndexError:
            return 0

    def _send_update(self, comm: RankComm, state: Mapping[str, str]) -> None:
        """Send an update; the values are JSON already."""
        values = ",".join(f"{json.dumps(name)}:{value}" for name, value in state.items())
        packed = f'{{"data":{{"method":"update","state":{{{values}}},"buffer_paths":[]}}}}'
        self._post(comm, "message", packed, (), {comm.comm_id})

    def _post(
        self, comm: RankComm, kind: CommKind, packed: str, buffers: Sequence[Any], opened: set[str]
    ) -> bool:
        """Send a comm's message, after opening the models that it refers to.

        Returns:
            Whether it was sent: not if it, or one of these models, is larger than what may pass.
        """
        content, frames = packed.encode(), _as_frames(buffers)
        num_bytes = len(content) + sum(map(len, frames)) + _HEADERS_BYTES
        verb = ToFrontEnd(comm.run, comm.comm_id, kind, content, len(frames))
        if kind == "close":
            self._pump.send(Parcel(verb))
            return True
        if self._open_referred(packed, opened) and self._pump.send_to_widget(
            Parcel(verb, frames), num_bytes
        ):
            return True
        if kind == "open":
            comm.audience = _REFUSED
        else:
            self._outdated.add(comm.comm_id)
        run = self._tracker.current()
        if self._noted_run != run:
            self._noted_run = run
            later = "; its state on the rank is shown after a later cell, as soon as it may pass"
            follows = later if comm.is_widget and kind == "message" else ""
            what = f"a message of {num_bytes:,} bytes of {comm.describe_kind()}"
            text = f"cellmesh: {what} was not sent: {DISPLAY_BOUND}{follows}\n"
            self._pump.write(run, "stderr", text)
        return False

    def _catch_up(self) -> None:
        """After a cell or a callback, send the state of widgets of whose updates one was not
        sent.
        """
        self._updates.flush()
        outdated, self._outdated = self._outdated, set()
        for comm in (self._comms[comm_id] for comm_id in outdated if comm_id in self._comms):
            if comm.is_widget and comm.audience == self._audience:
                content, buffers = comm.describe()
                data = {"method": "update", **content["data"]}
                self._post(comm, "message", pack({"data": data}), buffers, {comm.comm_id})

    def _speak_up(self, model_id: str) -> bool:
        """A widget is about to be displayed by the rank that leads: what is quiet is opened.

        Returns:
            Whether the front end knows the widget.
        """
        displayed = self._comms.get(model_id)
        if displayed is None or displayed.audience == self._audience:
            return True
        opened: set[str] = set()
        for comm_id in list(self._comms):
            self._open_again(comm_id, opened)
        return displayed.audience == self._audience

    def _open_again(self, comm_id: str, opened: set[str]) -> bool:
        """Open a comm, after the models that its state refers to: the front end wants them
        first.
        """
        comm = self._comms.get(comm_id)
        if comm is None or comm_id in opened:
            return comm is None or comm.audience != _REFUSED
        opened.add(comm_id)
        if comm.audience == self._audience:
            return True
        content, buffers = comm.describe()
        comm.run, comm.audience = self._tracker.current(), self._audience
        return self._post(comm, "open", pack(content), buffers, opened)

    def _open_referred(self, packed: str, opened: set[str]) -> bool:
        """Open the models that a message names and the front end does not know; False if one is
        refused.
        """
        names = [part.partition('"')[0] for part in packed.split('"IPY_MODEL_')[1:]]
        return all(self._open_again(name, opened) for name in names)


_SHORT = {"open": "open", "message": "msg", "close": "close"}


def _as_frames(buffers: Sequence[Any]) -> tuple[Frame, ...]:
    """Buffers as they can be sent; copies, as user code may go on with its own."""
    return tuple(bytes(memoryview(buffer)) for buffer in buffers)
