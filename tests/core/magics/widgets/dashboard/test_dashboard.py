"""The dashboard's thread and messages, with a mesh that is made up; what draws it is tested in a
browser.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller.status import Snapshot
from cellmesh.errors import HostError
from cellmesh.magics.widgets.dashboard.dashboard import Dashboard
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
    """A dashboard, what it looks at, and what it has told."""

    def __init__(self) -> None:
        self.mesh = Mesh()
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()
        self.looks = 0
        self.take: Callable[[], Snapshot | None] = self.snapshot
        self.dashboard = Dashboard(
            self.mesh, lambda before: self.take(), self.told.put, period_s=0.01
        )  # type: ignore[arg-type]

    def snapshot(self) -> Snapshot:
        self.looks += 1
        infos = [
            RankInfo(rank, 10 + rank, "node", "idle", "cpu", "gloo", cpu_s=0.0) for rank in range(2)
        ]
        idle = RankState(1, -1, 0, 0, "", "", "cpu", 0)
        return Snapshot(float(self.looks), "ready", {"dp": 2}, infos, {0: idle, 1: idle})

    def see(self, looks: bool = True, view: str = "a") -> None:
        self.dashboard.hear({"kind": "look", "view": view, "looks": looks})

    def wait_for(self, kind: str, **fields: Any) -> dict[str, Any]:
        while True:
            message = self.told.get(timeout=PATIENCE_S)
            if message["kind"] == kind and all(
                message[key] == value for key, value in fields.items()
            ):
                return message

    def wait_for_end(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "cellmesh-dashboard":
                thread.join(PATIENCE_S)
        assert not self.dashboard.is_looking


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.dashboard.end()
    rig.wait_for_end()


def test_dashboard_without_a_view_takes_no_snapshot(rig: Rig) -> None:
    assert not rig.dashboard.is_looking
    rig.see(False)
    rig.dashboard.hear({"kind": "nonsense"})
    rig.dashboard.hear({"kind": "do", "action": "format the disk"})
    rig.dashboard.hear({"kind": "open", "rank": 7})
    rig.dashboard.hear({})
    assert not rig.dashboard.is_looking
    assert rig.told.empty()


def test_view_gets_the_whole_state_and_then_each_snapshot(rig: Rig) -> None:
    rig.see()
    everything = rig.wait_for("all")
    assert everything["name"] == "fake"
    first = rig.wait_for("look")
    assert [(row["rank"], row["doing"]) for row in first["rows"]] == [(0, "idle"), (1, "idle")]
    assert first["dims"] == [["dp", 2]]
    assert first["verdict"] == ""
    second = rig.wait_for("look")
    assert [row["cpu"] for row in second["rows"]] == [0.0, 0.0]
    rig.see(view="b")
    again = rig.wait_for("all")
    assert [row["doing"] for row in again["rows"]] == ["idle", "idle"]
    assert len(again["history"]) >= 2


def test_dashboard_pauses_without_views_and_resumes_with_one(rig: Rig) -> None:
    rig.see()
    rig.wait_for("look")
    rig.see(False)
    rig.wait_for_end()
    num_looks = rig.looks
    rig.see()
    rig.wait_for("look", sample={"at_s": num_looks + 1.0, "cpu": [0.0, 0.0], "rss": [0, 0]})


def test_dashboard_goes_on_while_a_cell_blocks_the_views_messages(rig: Rig) -> None:
    async def run_a_cell() -> None:
        rig.see()  # heard on this loop, which is busy from here
        for _ in range(3):
            rig.wait_for("look")
        assert rig.dashboard.is_looking

    asyncio.run(run_a_cell())


def test_dashboard_pauses_after_a_long_silence_of_its_views(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmesh.controller.status.UNHEARD_S", 0.1)

    async def run_a_cell() -> None:
        rig.see()  # heard on this loop, which is busy from here
        rig.wait_for("look")
        rig.wait_for_end()

    async def look_again() -> None:
        rig.see()
        rig.wait_for("look")
        rig.dashboard.end()

    asyncio.run(run_a_cell())
    asyncio.run(look_again())


def test_failed_snapshot_is_shown_and_the_next_replaces_it(rig: Rig) -> None:
    def fail() -> Snapshot | None:
        raise HostError("an agent hangs")

    rig.take = fail
    rig.see()
    told = rig.wait_for("told", failed=True)
    assert told["text"] == "an agent hangs"
    rig.take = rig.snapshot
    rig.wait_for("told", failed=False, text="")
    rig.wait_for("look")


def test_buttons_report_their_result(rig: Rig) -> None:
    rig.dashboard.hear({"kind": "do", "action": "restart"})
    assert rig.wait_for("told", action="restart")["is_busy"]
    told = rig.wait_for("told", action="restart")
    assert (told["text"], told["failed"], told["is_busy"]) == (
        "2 ranks ready in 0.5 s",
        False,
        False,
    )
    assert rig.mesh.num_restarts == 1
    rig.dashboard.hear({"kind": "do", "action": "heal"})
    assert rig.wait_for("told", failed=True)["text"] == "ValueError: <b>cannot</b>"


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
    rig.dashboard.hear({"kind": "do", "action": "interrupt"})
    told = [rig.wait_for("told", action="interrupt") for _ in range(3)]
    assert "rank 1 did not stop: press again within 3 s" in told[1]["text"]
    assert [each["is_busy"] for each in told] == [True, True, False]
    assert told[2]["text"] == text


def test_dashboard_ends_with_its_mesh(rig: Rig) -> None:
    rig.see()
    rig.wait_for("look")
    rig.take = lambda: None
    rig.wait_for_end()
    rig.see(view="b")
    assert rig.wait_for("all")["rows"] != [], "a page that is loaded later sees what was last"
    assert not rig.dashboard.is_looking


def test_last_activity_stays_shown_for_ranks_without_an_answer(rig: Rig) -> None:
    rig.dashboard.look()
    before = rig.snapshot()
    rig.take = lambda: Snapshot(before.at_s, "ready", before.dims, before.infos, {})
    rig.dashboard.look()
    static = rig.dashboard.static()
    assert static.text.count("idle") == 2
    assert "does not answer" not in static.html
