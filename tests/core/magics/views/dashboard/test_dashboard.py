"""The dashboard's thread, messages and table, with a mesh that is made up; buttons and layout are
tested in a browser.
"""

from __future__ import annotations

import asyncio
import math
import queue
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller.status import Snapshot
from cellmesh.errors import HostError
from cellmesh.magics.views.dashboard import dashboard as dashboards
from cellmesh.magics.views.dashboard.dashboard import Dashboard, DashboardWidget, draw_mesh
from cellmesh.wire.status import RankInfo, RankState

PATIENCE_S = 20.0


class Mesh:
    """As much of one as a dashboard needs."""

    name = "fake"
    ranks = range(2)
    start_s = 0.5

    def __init__(self) -> None:
        self.num_restarts = 0

    def __len__(self) -> int:
        return 2

    def restart(self) -> None:
        self.num_restarts += 1

    def heal(self) -> None:
        raise ValueError("<b>cannot</b>")


class Rig:
    """A dashboard, what it looks at, and each state that its widget was given."""

    def __init__(self) -> None:
        self.mesh = Mesh()
        self.shown: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.looks = 0
        self.take: Callable[[], Snapshot | None] = self.snapshot
        self.widget = DashboardWidget()
        self.widget.observe(
            lambda change: self.shown.put((change["name"], change["new"])), ["looked_at", "told"]
        )
        self.dashboard = Dashboard(
            self.mesh,  # type: ignore[arg-type]
            lambda: self.take(),
            self.widget,
            period_s=0.01,
        )

    def snapshot(self) -> Snapshot:
        self.looks += 1
        infos = [RankInfo(rank, 10 + rank, "node", "idle", "cpu", "gloo") for rank in range(2)]
        idle = RankState(1, -1, 0, 0, "", "", "cpu", 0)
        return Snapshot(float(self.looks), "ready", {"dp": 2}, infos, {0: idle, 1: idle})

    def see(self) -> None:
        self.dashboard.handle({"kind": "look"})

    def press(self, action: str) -> None:
        self.dashboard.handle({"kind": "do", "action": action})

    def wait_for_look(self) -> None:
        while self.shown.get(timeout=PATIENCE_S)[0] != "looked_at":
            pass

    def wait_for_told(self, **fields: Any) -> dict[str, Any]:
        while True:
            name, told = self.shown.get(timeout=PATIENCE_S)
            if name == "told" and all(told[key] == value for key, value in fields.items()):
                return dict(told)

    def wait_for_end(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "cellmesh-dashboard":
                thread.join(PATIENCE_S)
        assert not self.dashboard._thread


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.dashboard.end()
    rig.wait_for_end()


def test_dashboard_pauses_without_a_page_and_resumes_with_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboards, "PATIENCE_S", 0.05)
    rig.see()
    rig.wait_for_end()
    num_looks = rig.looks
    rig.see()
    rig.wait_for_end()
    assert rig.looks > num_looks


def test_dashboard_goes_on_while_a_cell_keeps_the_page_unheard(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboards, "PATIENCE_S", 0.05)

    async def run_a_cell() -> None:
        rig.see()  # received on this loop, which is busy from here
        while rig.looks < 20:  # 0.2 s
            rig.wait_for_look()
        assert rig.dashboard._thread

    asyncio.run(run_a_cell())
    rig.wait_for_end()


def test_failed_snapshot_is_shown_and_the_next_replaces_it(rig: Rig) -> None:
    def fail() -> Snapshot | None:
        raise HostError("an agent hangs")

    rig.take = fail
    rig.see()
    assert rig.wait_for_told(failed=True)["text"] == "an agent hangs"
    rig.take = rig.snapshot
    rig.wait_for_told(failed=False, text="")
    rig.wait_for_look()


def test_buttons_report_their_result(rig: Rig) -> None:
    rig.press("restart")
    assert rig.wait_for_told(action="restart")["is_busy"]
    told = rig.wait_for_told(action="restart")
    assert told["text"] == "2 ranks ready in 0.5 s"
    assert not told["failed"]
    assert not told["is_busy"]
    assert rig.mesh.num_restarts == 1
    for _ in range(2):  # an equal report is one, too
        rig.press("heal")
        assert rig.wait_for_told(failed=True)["text"] == "ValueError: <b>cannot</b>"


class Stubborn:
    """A run that ends at the second wait for it, or at none."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.num_waits = ends, 0

    def wait(self, timeout_s: float) -> None:
        self.num_waits += 1

    def waiting_ranks(self) -> list[int]:
        return [] if self.ends and self.num_waits == 2 else [1]


@pytest.mark.parametrize(
    ("ends", "text"),
    [(True, "interrupted rank 1"), (False, "rank 1 did not stop: press twice to kill and replace")],
)
def test_the_advice_to_press_again_goes_with_its_time(rig: Rig, ends: bool, text: str) -> None:
    runs = SimpleNamespace(on=lambda ranks: [Stubborn(ends)])
    mesh: Any = rig.mesh
    mesh.rank_set = SimpleNamespace(session=SimpleNamespace(runs=runs))
    mesh.interrupt = lambda: None
    rig.press("interrupt")
    told = [rig.wait_for_told(action="interrupt") for _ in range(3)]
    assert "rank 1 did not stop: press again within 3 s" in told[1]["text"]
    assert [each["is_busy"] for each in told] == [True, True, False]
    assert told[2]["text"] == text


def test_dashboard_ends_with_its_mesh(rig: Rig) -> None:
    rig.see()
    for _ in range(3):
        rig.wait_for_look()
    before = rig.snapshot()
    rig.take = lambda: Snapshot(before.at_s, "ready", before.dims, before.infos, {})
    rig.wait_for_look()
    assert rig.dashboard.static().text.count("idle") == 2, "of ranks without an answer, too"
    rig.take = lambda: None
    rig.wait_for_end()
    rig.see()
    assert not rig.dashboard._thread
    assert 'data-rank="1"' in rig.widget.table


def draw(dims: dict[str, int], **changes: Any) -> str:
    """What is drawn of ranks, of which rank 1 has these changes."""
    num = math.prod(dims.values())
    infos = [RankInfo(rank, 10 + rank, "node", "running", "cuda:0", "nccl") for rank in range(num)]
    states = {
        rank: RankState(1, 3, 7, 5, "", "barrier", "cuda:0", 3_000_000, waited_s=12.3)
        for rank in range(num)
    }
    if changes:
        infos[1] = RankInfo(1, 0, "node", "dead", **changes)
        del states[1]
    return draw_mesh("<m>", Snapshot(1.0, "ready", dims, infos, states))


def test_ranks_stand_at_their_coordinates() -> None:
    table = draw({"pp": 2, "dp": 2, "tp": 3})
    rows = [
        re.findall(r"<th>(.*?)</th>|data-rank=\"(\d+)\"", row) for row in table.split("<tr>")[1:]
    ]
    assert ["".join(cell) for cell in rows[0]] == ["", "tp=0", "tp=1", "tp=2"]
    assert ["".join(cell) for cell in rows[3]] == ["pp=1 dp=0", "6", "7", "8"]
    assert "&lt;m&gt; · 12 ranks · pp=2 dp=2 tp=3 · ready" in table
    assert "<tr>" not in draw({"dp": 4})
    assert "data-rank" not in draw({"dp": 1024})


def test_a_rank_has_its_state_its_wait_and_its_memory() -> None:
    table = draw({"dp": 2})
    for part in ('data-doing="waits"', "waits 12 s", "In[7]: in barrier", "GPU 3.0 MB"):
        assert part in table, table
    dead = draw({"dp": 2}, ending="was killed by <b>SIGKILL</b>", last_output="<i>bye")
    assert 'data-doing="dead"' in dead
    assert "dead: was killed by &lt;b&gt;SIGKILL" in dead
    assert "<pre>the last lines of rank 1:\n    &lt;i&gt;bye</pre>" in dead
