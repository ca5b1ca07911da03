"""The live dashboard (``%dist_status --live``): the state of every rank, updated each second while
a page shows it.

The page sends ``{"kind": "look"}`` every two seconds while the dashboard is visible in it, and
``{"kind": "do", "action": ...}`` when a button is pressed. A thread takes snapshots of the mesh as
long as the page looks, and sets the widget's state. Each button's action has a thread of its own,
so that the next message is received at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets

from ....controller.core.effects import describe_healing
from ....controller.core.runs import ESCALATE_S, STOP_S
from ....controller.mesh import Mesh
from ....controller.output.calling_cell import cell_publisher
from ....controller.run import Run
from ....controller.status import Activity, Snapshot, activity_of, find_trouble, take_snapshot
from ....errors import CellmeshError
from ....wire.ranks import describe_ranks, in_words
from ....wire.segments import format_bytes
from ....wire.status import RankInfo, RankState
from ...render.tables import MAX_GRID, Static, Table, doing, last_lines, status_table
from ..widget import LiveView, Widget, load_css, load_js

PERIOD_S = 1.0
# A page that has sent nothing for so long counts as closed.
PATIENCE_S = 5.0
# Signs of activities, which are thus not shown by colour alone.
_SIGNS: Mapping[Activity, str] = {
    "idle": "○", "runs": "●", "waits": "◐", "asks": "?", "heals": "+", "new": "◇", "starts": "…",
    "silent": "!", "dead": "✕",
}  # fmt: skip

Take = Callable[[], Snapshot | None]


class DashboardWidget(Widget):
    """The ipywidget of the dashboard."""

    _esm = load_js("elements", "dashboard/dashboard")
    _css = load_css("dashboard/dashboard")

    table = traitlets.Unicode("").tag(sync=True)  # HTML: the ranks, and how some ended
    looked_at = traitlets.Float(0.0).tag(sync=True)
    told = traitlets.Dict().tag(sync=True)  # number, action, text, failed, is_busy


class Dashboard:
    """One dashboard of a mesh: takes snapshots and shows them in its widget.

    Args:
        mesh: the mesh.
        take: takes a snapshot; returns None once the mesh has ended.
        widget: widget that shows the snapshots; its state is set on any thread.
        period_s: time from one snapshot to the next, in seconds.
    """

    def __init__(
        self, mesh: Mesh, take: Take, widget: DashboardWidget, period_s: float = PERIOD_S
    ) -> None:
        self._mesh, self._take, self._widget, self._period_s = mesh, take, widget, period_s
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._loop: asyncio.AbstractEventLoop | None = None  # in which messages are received
        self._silent_s = 0.0  # time without a message of the page while messages could be received
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._is_over = False
        self._num_told = 0
        self._states: dict[int, RankState] = {}  # the last state of each rank
        self.snapshot: Snapshot | None = None

    def handle(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the page, on any thread; ignore malformed messages."""
        match message:
            case {"kind": "look"}:
                self._begin_watching()
            case {"kind": "do", "action": str(action)} if action in ACTIONS:
                threading.Thread(
                    target=self._act, args=(action,), name="cellmesh-dashboard-button", daemon=True
                ).start()

    def look(self) -> None:
        """Take a snapshot of all ranks and show it."""
        snapshot = self._take()
        if snapshot is None:
            self.end()
            return
        with self._lock:
            self.snapshot = snapshot
            self._states.update(snapshot.states)
            if not self._is_over:
                with self._widget.hold_sync():
                    self._widget.looked_at = time.time()
                    self._widget.table = draw_mesh(self._mesh.name, snapshot)

    def end(self) -> None:
        """Stop taking snapshots of the mesh."""
        with self._lock:
            self._is_over = True
            self._wake.notify_all()

    def static(self) -> Static:
        """Return the table of ``%dist_status`` at the last snapshot.

        A rank without an answer then is shown by its last answer: its mesh may have been ending.
        """
        infos = self.snapshot.infos if self.snapshot is not None else ()
        table = status_table(repr(self._mesh), infos, self._states)
        return Static(repr(table), table._repr_html_())

    # ---- snapshots

    def _begin_watching(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self._lock:
            self._loop, self._silent_s = loop, 0.0
            if self._thread is None and not self._is_over:
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
            except CellmeshError as error:
                trouble = str(error)
            except Exception as error:  # the next look may succeed
                trouble = f"{type(error).__name__}: {error}"
            if trouble or self._widget.told.get("action") == "look":
                self._report("look", trouble, failed=bool(trouble))
            with self._lock:
                self._wake.wait_for(
                    lambda: self._is_over or self._is_due,
                    max(0.0, began_at + self._period_s - time.monotonic()),
                )
                self._is_due = False
                self._pass_time(time.monotonic() - began_at)
                if self._is_over or self._silent_s >= PATIENCE_S:
                    self._thread = None
                    return

    def _pass_time(self, seconds: float) -> None:
        """Add to the time for which the page has sent nothing, in the event loop that reads its
        messages, as a running cell may delay these.
        """
        if self._loop is None or self._loop.is_closed():  # closed with its subshell
            self._count(seconds)
        else:
            with contextlib.suppress(RuntimeError):  # it has just been closed
                self._loop.call_soon_threadsafe(self._count, seconds)

    def _count(self, seconds: float) -> None:
        with self._lock:
            self._silent_s += seconds

    # ---- buttons

    def _act(self, action: str) -> None:
        try:
            text = ACTIONS[action](
                self._mesh, lambda text: self._report(action, text, is_busy=True)
            )
            self._report(action, text)
        except Exception as error:
            self._report(action, f"{type(error).__name__}: {error}", failed=True)

    def _report(self, action: str, text: str, failed: bool = False, is_busy: bool = False) -> None:
        told = {"action": action, "text": text, "failed": failed, "is_busy": is_busy}
        with self._lock:
            self._num_told += 1  # so that the page also receives a report equal to the last
            if not self._is_over:
                self._widget.told = {"number": self._num_told, **told}
            if action != "look":
                self._is_due = True
                self._wake.notify_all()


def show_dashboard(mesh: Mesh) -> LiveView | Table:
    """Show ``%dist_status --live``: the dashboard, or a table if no front end can draw it.

    Args:
        mesh: the mesh.

    Raises:
        HostError: the mesh's agent does not answer.
    """
    session = mesh.rank_set.session
    if cell_publisher() is None or session.state == "ended":
        return status_table(repr(mesh), mesh.report(), mesh.states())
    widget = DashboardWidget()
    dashboard = Dashboard(mesh, lambda: take_snapshot(session), widget)
    widget.on_msg(lambda _, content, buffers: dashboard.handle(content))
    dashboard.look()
    view = LiveView(widget, dashboard.static, dashboard.end)
    session.shown.add("dashboards", view)
    return view


# ---- the table


def draw_mesh(name: str, snapshot: Snapshot) -> str:
    """Draw a mesh as HTML: a sentence, permanently blocked ranks, all ranks, ends of ranks."""
    shape = " ".join(f"{dim}={size}" for dim, size in snapshot.dims.items())
    words = [name, in_words(len(snapshot.infos)), shape, snapshot.state]
    parts = [f"<div>{html.escape(' · '.join(filter(None, words)))}</div>"]
    if trouble := find_trouble(snapshot):
        parts.append(f'<div class="cmd-bad" role="alert">{html.escape(trouble)}</div>')
    if len(snapshot.infos) > MAX_GRID:
        parts.append(status_table("", snapshot.infos, snapshot.states)._repr_html_())
    else:
        cells = [_draw_rank(info, snapshot.states.get(info.rank)) for info in snapshot.infos]
        parts.append(_draw_grid(snapshot.dims, cells))
        if lines := last_lines(snapshot.infos):
            parts.append(f"<pre>{html.escape(chr(10).join(lines))}</pre>")
    return "".join(parts)


def _draw_grid(dims: Mapping[str, int], cells: Sequence[str]) -> str:
    """Return the ranks at their coordinates, as HTML: the last dim across, the others down; for a
    mesh of one dim, one after the other.
    """
    *outer, inner = dims
    if not outer:
        return f'<div class="cmd-ranks">{"".join(cells)}</div>'
    size = dims[inner]
    heads = "".join(f"<th>{html.escape(inner)}={index}</th>" for index in range(size))
    rows = [f"<tr><th></th>{heads}</tr>"]
    for row, place in enumerate(itertools.product(*(range(dims[dim]) for dim in outer))):
        words = " ".join(f"{dim}={index}" for dim, index in zip(outer, place, strict=True))
        ranks = "".join(f"<td>{cell}</td>" for cell in cells[row * size : (row + 1) * size])
        rows.append(f"<tr><th>{html.escape(words)}</th>{ranks}</tr>")
    width = f"width:min(100%, {40 + 200 * size}px);min-width:{40 + 80 * size}px"
    return f'<table class="cmd-grid" style="{width}">{"".join(rows)}</table>'


def _draw_rank(info: RankInfo, state: RankState | None) -> str:
    activity, words = activity_of(info, state), html.escape(doing(info, state))
    waited = ""
    if activity == "waits" and state is not None and state.waited_s >= 1:
        waited = f" {state.waited_s:.0f} s"
    memory = [format_bytes(info.rss_bytes)] if info.pid else []
    if state is not None and state.device.startswith("cuda"):
        memory.append(f"GPU {format_bytes(state.device_bytes)}")
    shown = "" if activity == "idle" else words
    return (
        f'<div class="cmd-rank" data-rank="{info.rank}" data-doing="{activity}" '
        f'title="rank {info.rank}: {words}">'
        f"<div><b>{info.rank}</b> {_SIGNS[activity]} {activity}{waited}</div><div>{shown}</div>"
        f'<div class="cm-weak">{", ".join(memory)}</div></div>'
    )


# ---- actions of the buttons: each reports its next step, and returns the result

Report = Callable[[str], None]


def _interrupt(mesh: Mesh, report: Report) -> str:
    runs = mesh.rank_set.session.runs.on(mesh.ranks)
    ranks = sorted({rank for run in runs for rank in run.waiting_ranks()})
    if not ranks:
        return "nothing runs that could be interrupted"
    report(f"interrupting {describe_ranks(ranks)}")
    mesh.interrupt()
    if left := _wait_for(runs, STOP_S):
        rest_s = ESCALATE_S - STOP_S
        report(
            f"{describe_ranks(left)} did not stop: press again within {rest_s:.0f} s "
            "to kill and replace what still runs"
        )
        if left := _wait_for(runs, rest_s):
            return f"{describe_ranks(left)} did not stop: press twice to kill and replace"
    return f"interrupted {describe_ranks(ranks)}"


def _wait_for(runs: Sequence[Run[Any]], timeout_s: float) -> list[int]:
    """Wait until runs end; return the ranks that have not ended them in time."""
    until = time.monotonic() + timeout_s
    for run in runs:
        run.wait(max(0.0, until - time.monotonic()))
    return sorted({rank for run in runs for rank in run.waiting_ranks()})


def _heal(mesh: Mesh, report: Report) -> str:
    report("healing")
    return describe_healing(mesh.heal())


def _restart(mesh: Mesh, report: Report) -> str:
    report("restarting")
    mesh.restart()
    return f"{in_words(len(mesh))} ready in {mesh.start_s:.1f} s"


ACTIONS: Mapping[str, Callable[[Mesh, Report], str]] = {
    "interrupt": _interrupt,
    "heal": _heal,
    "restart": _restart,
}
