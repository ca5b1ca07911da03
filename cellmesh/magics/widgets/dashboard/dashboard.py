"""The mesh dashboard: what every rank does, updated once a second while a page shows it.

A thread takes snapshots of the mesh and sends them; it begins when a view in the front end says
that it is seen, and ends when none is. What the buttons ask for runs in threads of its own, so
that the next message is heard at once. A message is a dict with its ``kind``:

=========  =============================================  ======================================
kind       fields                                         sender
=========  =============================================  ======================================
``look``   ``view`` (an id), ``looks``                    front end, every 2 s and on a change
``do``     ``action``: one of `ACTIONS`                   front end
``open``   ``rank``, or null to close the panel           front end
``all``    those of ``look``, ``history``, ``told``       kernel, to a new view
``look``   ``name, state, dims, rows, sample``            kernel, once a second
``told``   ``action, text, failed, is_busy``              kernel: what a button has done
``panel``  ``rank, stack, log``                           kernel
=========  =============================================  ======================================
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ....controller.core.effects import describe_healing
from ....controller.core.runs import ESCALATE_S, STOP_S
from ....controller.mesh import Mesh
from ....controller.output.calling_cell import cell_publisher
from ....controller.run import Run
from ....controller.stacks import show_stacks
from ....controller.status import (
    RankStatus,
    Snapshot,
    StatusHistory,
    ViewHeartbeat,
    find_trouble,
    rank_statuses,
    take_snapshot,
)
from ....errors import CellmeshError
from ....wire.ranks import describe_ranks
from ....wire.status import RankState
from ...render.tables import Static, Table, status_table
from ..base.widget import LiveView, Widget, load_css, load_js

PERIOD_S = 1.0
_LOG_BYTES = 8192
_LOG_LINES = 60

Take = Callable[[Snapshot | None], Snapshot | None]


class DashboardWidget(Widget):
    """The ipywidget that draws the dashboard in the front end."""

    _esm = load_js("base/elements", "dashboard/cards", "dashboard/grid", "dashboard/dashboard")
    _css = load_css("dashboard/dashboard")


class Dashboard:
    """One dashboard of a mesh: takes snapshots and sends them to its widget.

    Args:
        mesh: which.
        take: takes a snapshot, given the one before; None once the mesh has ended.
        send: sends a message to the front end; called on any thread.
        period_s: from one snapshot to the next, in seconds.
    """

    def __init__(
        self,
        mesh: Mesh,
        take: Take,
        send: Callable[[dict[str, Any]], None],
        period_s: float = PERIOD_S,
    ) -> None:
        self._period_s = period_s
        self._mesh = mesh
        self._take = take
        self._send = send
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._heartbeat = ViewHeartbeat()
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._is_over = False
        self._ranks: list[RankStatus] = []
        self._history = StatusHistory()
        self._told: dict[str, Any] = {}
        self._open: int | None = None
        self._panel: dict[str, Any] = {}
        self._said: dict[int, RankState] = {}  # what each rank said last
        self.snapshot: Snapshot | None = None

    # ---- the front end

    def hear(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the widget in the page, on any thread; malformed ones are ignored."""
        match message:
            case {"kind": "look", "view": str(view), "looks": bool(looks)}:
                self._hear_look(view, looks)
            case {"kind": "do", "action": str(action)} if action in ACTIONS:
                self._begin(lambda: self._act(action))
            case {"kind": "open", "rank": int(rank)} if rank in self._mesh.ranks:
                with self._lock:
                    self._open, self._panel = rank, {}
                self._begin(self._show_panel)
            case {"kind": "open", "rank": None}:
                with self._lock:
                    self._open = None

    def look(self) -> None:
        """Take a snapshot of all ranks and send it to the front end."""
        snapshot = self._take(self.snapshot)
        if snapshot is None:
            self.end()
            return
        with self._lock:
            self._ranks = rank_statuses(self.snapshot, snapshot)
            self.snapshot = snapshot
            self._said.update(snapshot.states)
            sample = self._history.add(snapshot.at_s, self._ranks)
            self._tell({**self._status("look"), "sample": sample})

    def _status(self, kind: str) -> dict[str, Any]:
        snapshot = self.snapshot
        return {
            "kind": kind,
            "name": self._mesh.name,
            "state": snapshot.state if snapshot is not None else "",
            "dims": [list(dim) for dim in snapshot.dims.items()] if snapshot is not None else [],
            "rows": msgspec.to_builtins(self._ranks),
            "verdict": find_trouble(snapshot) if snapshot is not None else "",
        }

    def end(self) -> None:
        """Stop taking snapshots of the mesh."""
        with self._lock:
            self._is_over = True
            self._wake.notify_all()

    @property
    def is_looking(self) -> bool:
        """Whether the thread that takes snapshots runs."""
        with self._lock:
            return self._thread is not None

    # ---- looking

    def _hear_look(self, view: str, looks: bool) -> None:
        is_new = self._heartbeat.hear(view, looks)
        with self._lock:
            if is_new:
                history = self._history.all()
                self._send({**self._status("all"), "history": history, "told": self._told})
            if not looks:
                self._wake.notify_all()
            if self._heartbeat and self._thread is None and not self._is_over:
                self._thread = threading.Thread(
                    target=self._watch, name="cellmesh-dashboard", daemon=True
                )
                self._thread.start()

    def _watch(self) -> None:
        """Take a snapshot each second while a page shows the dashboard."""
        while True:
            began_at = time.monotonic()
            trouble = ""
            try:
                self.look()
                self._show_panel()
            except CellmeshError as error:
                trouble = str(error)
            except Exception as error:  # whatever it is, the next look may be better
                trouble = f"{type(error).__name__}: {error}"
            if trouble or self._told.get("action") == "look":
                self._report("look", trouble, failed=bool(trouble))
            with self._lock:
                self._wake.wait_for(
                    lambda: self._is_over or self._is_due or not self._heartbeat,
                    max(0.0, began_at + self._period_s - time.monotonic()),
                )
                self._is_due = False
                self._heartbeat.pass_time(time.monotonic() - began_at)
                if self._is_over or not self._heartbeat:
                    self._thread = None
                    return

    def _tell(self, message: dict[str, Any]) -> None:
        if not self._is_over:
            self._send(message)

    # ---- one rank

    def _show_panel(self) -> None:
        """Send the selected rank's stack and the end of its log, if they have changed."""
        rank = self._open
        if rank is None:
            return
        session = self._mesh.rank_set.session
        stack = show_stacks(session, [rank]).partition("\n")[2]
        log = session.ask_log(rank, _LOG_BYTES)
        lines = log.text.splitlines()[-_LOG_LINES:] if log is not None else []
        panel = {"kind": "panel", "rank": rank, "stack": stack, "log": "\n".join(lines)}
        with self._lock:
            if rank == self._open and panel != self._panel:
                self._panel = panel
                self._tell(panel)

    # ---- buttons

    def _begin(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="cellmesh-dashboard-button", daemon=True).start()

    def _act(self, action: str) -> None:
        try:
            text = ACTIONS[action](
                self._mesh, lambda text: self._report(action, text, is_busy=True)
            )
            self._report(action, text)
        except Exception as error:
            self._report(action, f"{type(error).__name__}: {error}", failed=True)

    def _report(self, action: str, text: str, failed: bool = False, is_busy: bool = False) -> None:
        told = {
            "kind": "told",
            "action": action,
            "text": text,
            "failed": failed,
            "is_busy": is_busy,
        }
        with self._lock:
            if told != self._told:
                self._told = told
                self._tell(told)
            if action != "look":
                self._is_due = True
                self._wake.notify_all()

    # ---- where no widget can be

    def static(self) -> Static:
        """Return the table of ``%dist_status`` at the last snapshot.

        A rank that did not answer then is shown by what it said before: its mesh may have been
        ending.
        """
        infos = self.snapshot.infos if self.snapshot is not None else ()
        table = status_table(repr(self._mesh), infos, self._said)
        return Static(repr(table), table._repr_html_())


def show_dashboard(mesh: Mesh) -> LiveView | Table:
    """Show ``%dist_status --live``: the dashboard, or a table where no front end can draw it.

    Args:
        mesh: which.

    Raises:
        HostError: its agent does not answer.
    """
    session = mesh.rank_set.session
    if cell_publisher() is None or session.state == "ended":
        return status_table(repr(mesh), mesh.report(), mesh.states(), session.describe_ways())
    widget = DashboardWidget()
    dashboard = Dashboard(mesh, lambda before: take_snapshot(session, before), widget.send)
    widget.on_msg(lambda _, content, buffers: dashboard.hear(content))
    dashboard.look()
    view = LiveView(widget, dashboard.static, dashboard.end)
    session.features.shown.add("dashboards", view)
    return view


# ---- what the buttons do: each says what it is about to do, and returns what came of it

Say = Callable[[str], None]


def _interrupt(mesh: Mesh, say: Say) -> str:
    runs = mesh.rank_set.session.runs.on(mesh.ranks)
    ranks = sorted({rank for run in runs for rank in run.waiting_ranks()})
    if not ranks:
        return "nothing runs that could be interrupted"
    say(f"interrupting {describe_ranks(ranks)}")
    mesh.interrupt()
    if left := _wait_for(runs, STOP_S):
        rest_s = ESCALATE_S - STOP_S
        say(
            f"{describe_ranks(left)} did not stop: press again within {rest_s:.0f} s "
            "to kill and replace what still runs"
        )
        if left := _wait_for(runs, rest_s):
            return f"{describe_ranks(left)} did not stop: press twice to kill and replace"
    return f"interrupted {describe_ranks(ranks)}"


def _wait_for(runs: Sequence[Run[Any]], timeout_s: float) -> list[int]:
    """Wait for runs to end; return the ranks that have not ended them."""
    until = time.monotonic() + timeout_s
    for run in runs:
        run.wait(max(0.0, until - time.monotonic()))
    return sorted({rank for run in runs for rank in run.waiting_ranks()})


def _heal(mesh: Mesh, say: Say) -> str:
    say("healing")
    return describe_healing(mesh.heal())


def _restart(mesh: Mesh, say: Say) -> str:
    say("restarting")
    mesh.restart()
    return f"{len(mesh)} ranks ready in {mesh.start_s:.1f} s"


def _stop(mesh: Mesh, say: Say) -> str:
    say("stopping")
    mesh.stop()
    return "stopped"


ACTIONS: Mapping[str, Callable[[Mesh, Say], str]] = {
    "interrupt": _interrupt,
    "heal": _heal,
    "restart": _restart,
    "stop": _stop,
}
