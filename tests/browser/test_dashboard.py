"""The mesh dashboard as people see it: in JupyterLab, with four ranks; and with 64 that are made
up.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import PICTURES, Cell, Notebook, Server, open_notebook

pytestmark = pytest.mark.timeout(240)

SOON_MS = 15_000


class Dashboard:
    """The widget in a cell's output.

    Args:
        cell: the cell.
    """

    def __init__(self, cell: Cell) -> None:
        self.root = cell.root.locator(".cmd-root")
        self.told = self.root.locator(".cmd-told")

    def rank(self, rank: int) -> Locator:
        return self.root.locator(f'.cmd-rank[data-rank="{rank}"]')

    def button(self, name: str) -> Locator:
        return self.root.locator(f'.cmd-buttons [data-action="{name}"]')

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.root.screenshot(path=PICTURES / f"dashboard-{name}.png")

    def expect_doing(self, rank: int, doing: str) -> None:
        expect(self.rank(rank)).to_have_attribute("data-doing", doing, timeout=SOON_MS)


@pytest.fixture
def notebook(notebook: Notebook) -> Notebook:
    """An empty notebook with a mesh of 2 x 2 ranks."""
    notebook.run("%dist_start --mesh dp=2,tp=2", timeout_s=60)
    return notebook


@pytest.fixture
def dashboard(notebook: Notebook) -> Dashboard:
    shown = Dashboard(notebook.run("%dist_status --live"))
    shown.expect_doing(3, "idle")
    return shown


def test_ranks_stand_where_the_mesh_has_them(notebook: Notebook, dashboard: Dashboard) -> None:
    printed = notebook.run("%%dist\nprint(rank, *mesh.get_coordinate())").texts()
    places = [line.split()[1:] for line in "\n".join(printed).split("\n")]
    assert len(places) == 4
    rows = dashboard.root.locator(".cmd-grid tr")
    for rank, dp, tp in places:
        row = rows.nth(1 + int(dp))
        expect(row.locator("th")).to_have_text(f"dp={dp}")
        expect(rows.first.locator("th").nth(1 + int(tp))).to_have_text(f"tp={tp}")
        expect(row.locator("td").nth(int(tp)).locator(".cmd-rank")).to_have_attribute(
            "data-rank", rank
        )
    expect(dashboard.rank(0)).to_contain_text(re.compile(r"\d+ MB"))
    for theme in ("Light", "Dark"):
        notebook.set_theme(f"JupyterLab {theme}")
        notebook.picture(f"dashboard-{theme.lower()}", first=1, last=1)


def test_waiting_cell_is_reported_and_interrupted(notebook: Notebook, dashboard: Dashboard) -> None:
    cell = notebook.start("%%dist\nimport time\nif rank == 0:\n    time.sleep(600)\ndist.barrier()")
    for rank in (1, 2, 3):
        dashboard.expect_doing(rank, "waits")
        expect(dashboard.rank(rank)).to_contain_text(re.compile(r"In\[\d+\]: in barrier"))
        expect(dashboard.rank(rank)).to_contain_text(re.compile(r"waits \d+ s"))
    dashboard.expect_doing(0, "runs")
    expect(dashboard.rank(0)).to_contain_text("time.sleep")
    notebook.picture("dashboard-waits", first=1, last=2)
    dashboard.button("interrupt").click()
    cell.wait_for_end()
    assert any("RanksInterrupted" in text for text in cell.texts())
    expect(dashboard.told).to_have_text("interrupt: interrupted ranks 0-3")
    dashboard.expect_doing(0, "idle")
    for _ in range(2):
        dashboard.button("interrupt").click()
        expect(dashboard.told).to_have_text("interrupt: nothing runs that could be interrupted")


def test_a_rank_that_was_killed_is_healed(notebook: Notebook, dashboard: Dashboard) -> None:
    notebook.run(
        "import os, signal\nos.kill(next(r.pid for r in mesh.report() if r.rank == 2), "
        "signal.SIGKILL)"
    )
    dashboard.expect_doing(2, "dead")
    expect(dashboard.rank(2)).to_contain_text("dead: was killed by SIGKILL")
    notebook.picture("dashboard-dead", first=1, last=1)
    busy = notebook.start("%%dist --ranks 0\nimport time\ntime.sleep(600)")
    dashboard.expect_doing(0, "runs")
    dashboard.button("heal").click()
    expect(dashboard.told).to_contain_text("MeshUsageError")
    expect(dashboard.told).to_have_class(re.compile("cmd-bad"))
    dashboard.button("interrupt").click()
    busy.wait_for_end()
    dashboard.button("heal").click()
    dashboard.expect_doing(2, "new")
    expect(dashboard.told).to_contain_text("heal: rank 2 is new and empty")
    assert notebook.run("%%dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()").texts() == [
        "[0-3] 4.0"
    ]
    dashboard.expect_doing(2, "idle")


def test_restart_is_pressed_twice_and_works_during_a_cell(
    notebook: Notebook, dashboard: Dashboard
) -> None:
    notebook.run("%%dist\nkept = 1")
    busy = notebook.start("%%dist\nimport time\ntime.sleep(600)")
    dashboard.expect_doing(0, "runs")
    dashboard.button("restart").click()
    expect(dashboard.told).to_contain_text("press again to do it")
    dashboard.expect_doing(1, "runs")
    dashboard.picture("asks")
    dashboard.button("restart").click()
    expect(dashboard.told).to_have_text(
        re.compile(r"restart: 4 ranks ready in \d+\.\d s"), timeout=SOON_MS
    )
    busy.wait_for_end()
    assert notebook.run("%%dist\n'kept' in globals()").texts() == ["[0-3] False"]
    dashboard.expect_doing(0, "idle")
    notebook.run("%dist_stop")
    output = notebook.cell(1).outputs
    expect(output).to_contain_text("has ended (stopped)", timeout=SOON_MS)
    expect(output.locator("table tbody tr")).to_have_count(4)
    expect(dashboard.root).to_have_count(0)
    notebook.picture("dashboard-ended", first=1, last=1)


def test_dashboard_continues_when_the_page_is_reloaded(
    notebook: Notebook, dashboard: Dashboard
) -> None:
    notebook.save()
    notebook.page.reload()
    dashboard.expect_doing(0, "idle")
    cell = notebook.start("%%dist\nimport time\ntime.sleep(600)")
    dashboard.expect_doing(0, "runs")
    dashboard.button("interrupt").click()
    cell.wait_for_end()
    dashboard.expect_doing(0, "idle")


FAKE = """
from cellmesh.controller.status import Snapshot
from cellmesh.magics.widgets.dashboard.dashboard import DashboardWidget, draw_mesh
from cellmesh.wire.messages import RankInfo, RankState
infos = [
    RankInfo(rank, 100 + rank, "node", "running", "cuda:0", "nccl",
             3_000_000_000 + rank * 10_000_000)
    for rank in range(64)
]
infos[5] = RankInfo(5, 0, "node", "dead", ending="was killed by SIGSEGV", last_output="bye")
states = {{
    rank: RankState(1, 4, 7, 12, "model.forward",
                    "all_gather_into_tensor" if rank % 3 else "", "cuda:0",
                    40_000_000_000, "", 7.0)
    for rank in range(64) if rank != 5
}}
DashboardWidget(table=draw_mesh("fake", Snapshot(1.0, "ready", {dims}, infos, states)))
"""
LAYOUTS = {
    "1d": {"dp": 64},
    "2d": {"dp": 8, "tp": 8},
    "wide": {"dp": 2, "tp": 32},
    "4d": {"pp": 2, "dp": 4, "cp": 2, "tp": 4},
}


def test_64_ranks_stay_within_the_page(page: Page, server: Server) -> None:
    with open_notebook(page, server, "many.ipynb") as notebook:
        for name, dims in LAYOUTS.items():
            shown = Dashboard(notebook.run(FAKE.format(dims=dims), 60))
            shown.expect_doing(5, "dead")
            for width in (1000, 700):
                notebook.page.set_viewport_size({"width": width, "height": 1600})
                expect(shown.root.locator(".cmd-rank")).to_have_count(64)
                assert shown.root.evaluate("root => root.scrollWidth - root.clientWidth") <= 0
                shown.picture(f"64-{name}-{width}")
            notebook.page.set_viewport_size({"width": 1000, "height": 900})
