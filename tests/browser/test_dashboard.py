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
        self.panel = self.root.locator(".cmd-panel")

    def card(self, rank: int) -> Locator:
        return self.root.locator(f'.cmd-card[data-rank="{rank}"]')

    def button(self, name: str) -> Locator:
        return self.root.locator(f'.cmd-buttons [data-action="{name}"]')

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.root.screenshot(path=PICTURES / f"dashboard-{name}.png")

    def expect_doing(self, rank: int, doing: str) -> None:
        expect(self.card(rank)).to_have_attribute("data-doing", doing, timeout=SOON_MS)


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
    told = notebook.run("%%dist\nprint(rank, *mesh.get_coordinate())").texts()
    places = [line.split()[1:] for line in "\n".join(told).split("\n")]
    assert len(places) == 4
    for rank, dp, tp in places:
        card = dashboard.card(int(rank))
        expect(card).to_have_attribute("aria-label", re.compile(f"rank {rank}, dp={dp} tp={tp}: "))
        box = card.bounding_box()
        column = dashboard.root.locator(".cmd-column").nth(int(tp))
        row = dashboard.root.locator(".cmd-row").nth(int(dp))
        expect(column).to_have_text(f"tp={tp}")
        expect(row).to_have_text(f"dp={dp}")
        assert box is not None
        over, beside = column.bounding_box(), row.bounding_box()
        assert over is not None
        assert beside is not None
        assert over["x"] <= box["x"] + box["width"] / 2 <= over["x"] + over["width"]
        assert box["y"] <= beside["y"] + beside["height"] / 2 <= box["y"] + box["height"]
    memory = dashboard.card(0).locator('[data-series="rss"] .cmd-value')
    expect(memory).to_have_text(re.compile(r"^\d+ MB$"))
    expect(dashboard.card(0).locator('[data-series="cpu"] .cmd-value')).to_have_text(
        re.compile(r"^\d+ %$")
    )
    for theme in ("Light", "Dark"):
        notebook.set_theme(f"JupyterLab {theme}")
        notebook.picture(f"dashboard-{theme.lower()}", first=1, last=1)


def test_waiting_cell_is_reported_and_interrupted(notebook: Notebook, dashboard: Dashboard) -> None:
    cell = notebook.start("%%dist\nimport time\nif rank == 0:\n    time.sleep(600)\ndist.barrier()")
    for rank in (1, 2, 3):
        dashboard.expect_doing(rank, "waits")
        expect(dashboard.card(rank).locator(".cmd-doing")).to_have_text(
            re.compile(r"^barrier( \d+ s)?$")
        )
        expect(dashboard.card(rank).locator(".cmd-cell")).to_have_text(
            re.compile(r"^In\[\d+\] line 5$")
        )
    dashboard.expect_doing(0, "runs")
    expect(dashboard.card(0).locator(".cmd-doing")).to_have_text("time.sleep")
    notebook.picture("dashboard-waits", first=1, last=2)
    dashboard.button("interrupt").click()
    cell.wait_for_end()
    assert any("RanksInterrupted" in text for text in cell.texts())
    expect(dashboard.told).to_have_text("interrupt: interrupted ranks 0-3")
    dashboard.expect_doing(0, "idle")
    dashboard.button("interrupt").click()
    expect(dashboard.told).to_have_text("interrupt: nothing runs that could be interrupted")


def test_a_rank_that_was_killed_is_healed(notebook: Notebook, dashboard: Dashboard) -> None:
    notebook.run(
        "import os, signal\nos.kill(next(r.pid for r in mesh.report() if r.rank == 2), "
        "signal.SIGKILL)"
    )
    dashboard.expect_doing(2, "dead")
    expect(dashboard.root.locator(".cmd-note")).to_contain_text("rank 2 was killed by SIGKILL")
    expect(dashboard.card(2).locator(".cmd-doing")).to_have_text("was killed by SIGKILL")
    notebook.picture("dashboard-dead", first=1, last=1)
    busy = notebook.start("%%dist --ranks 0\nimport time\ntime.sleep(600)")
    dashboard.expect_doing(0, "runs")
    dashboard.button("heal").click()
    expect(dashboard.told).to_contain_text("MeshUsageError")
    expect(dashboard.told).to_have_class(re.compile("cmd-failed"))
    dashboard.button("interrupt").click()
    busy.wait_for_end()
    dashboard.button("heal").click()
    dashboard.expect_doing(2, "new")
    expect(dashboard.told).to_contain_text("heal: rank 2 is new and empty")
    assert notebook.run("%%dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()").texts() == [
        "[0-3] 4.0"
    ]
    dashboard.expect_doing(2, "idle")
    expect(dashboard.root.locator(".cmd-note")).to_have_count(0)


def test_a_rank_opens_with_its_stack_and_log(notebook: Notebook, dashboard: Dashboard) -> None:
    cell = notebook.start(
        "%%dist\nimport time\n"
        'print(f"<b>here is {rank}</b>")\n'
        "def dawdle_along():\n    time.sleep(600)\n"
        "dawdle_along()"
    )
    dashboard.expect_doing(1, "runs")
    dashboard.card(1).focus()
    notebook.page.keyboard.press("Enter")
    expect(dashboard.panel.locator(".cmd-stack")).to_contain_text("in dawdle_along")
    expect(dashboard.panel.locator(".cmd-log")).to_contain_text("<b>here is 1</b>")
    expect(dashboard.panel.locator("strong")).to_have_text("rank 1")
    expect(dashboard.card(1)).to_have_attribute("aria-expanded", "true")
    notebook.set_theme("JupyterLab Dark")
    notebook.page.set_viewport_size({"width": 700, "height": 900})
    dashboard.button("stop").click()
    assert dashboard.root.evaluate("root => root.scrollWidth - root.clientWidth") <= 0
    dashboard.picture("panel-700-dark")
    notebook.page.keyboard.press("Escape")
    notebook.page.set_viewport_size({"width": 1000, "height": 900})
    notebook.set_theme("JupyterLab Light")
    notebook.picture("dashboard-panel", first=1, last=2)
    dashboard.card(3).click()
    expect(dashboard.panel.locator(".cmd-log")).to_contain_text("<b>here is 3</b>")
    dashboard.panel.locator(".cmd-close").press("Escape")
    expect(dashboard.panel).to_be_hidden()
    expect(dashboard.card(3)).to_be_focused()
    dashboard.button("interrupt").click()
    cell.wait_for_end()


def test_restart_and_stop_ask_first(notebook: Notebook, dashboard: Dashboard) -> None:
    question = dashboard.root.locator(".cmd-question")
    notebook.run("%%dist\nkept = 1")
    dashboard.button("restart").click()
    expect(question).to_contain_text("Replace every rank by a new one?")
    expect(question.get_by_role("button", name="cancel")).to_be_focused()
    notebook.page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    assert notebook.run("%%dist\nkept").texts() == ["[0-3] 1"]
    dashboard.button("restart").click()
    dashboard.picture("asks")
    question.get_by_role("button", name="restart").click()
    expect(dashboard.told).to_have_text(
        re.compile(r"restart: 4 ranks ready in \d+\.\d s"), timeout=SOON_MS
    )
    assert notebook.run("%%dist\n'kept' in globals()").texts() == ["[0-3] False"]
    dashboard.expect_doing(0, "idle")
    dashboard.button("stop").click()
    question.get_by_role("button", name="stop").click()
    output = notebook.cell(1).outputs
    expect(output).to_contain_text("has ended (stopped)", timeout=SOON_MS)
    expect(output.locator("table tbody tr")).to_have_count(4)
    expect(dashboard.root).to_have_count(0)
    notebook.picture("dashboard-ended", first=1, last=1)


def test_dashboard_comes_back_when_the_page_is_reloaded(
    notebook: Notebook, dashboard: Dashboard
) -> None:
    notebook.save()
    notebook.page.reload()
    dashboard.expect_doing(0, "idle")
    line = dashboard.card(3).locator('[data-series="rss"] path')
    expect(line).to_have_attribute("d", re.compile(r"^M.*L"), timeout=SOON_MS)
    cell = notebook.start("%%dist\nimport time\ntime.sleep(600)")
    dashboard.expect_doing(0, "runs")
    dashboard.button("interrupt").click()
    cell.wait_for_end()
    dashboard.expect_doing(0, "idle")


FAKE = """
import time
from cellmesh.controller.status import Snapshot
from cellmesh.magics.widgets.base.widget import LiveView
from cellmesh.magics.widgets.dashboard.dashboard import Dashboard, DashboardWidget
from cellmesh.wire.messages import RankInfo, RankState
DIMS = {dims}
def take(before):
    now = time.monotonic()
    infos = [
        RankInfo(rank, 100 + rank, "node", "running", "cuda:0", "nccl",
                 3_000_000_000 + rank * 10_000_000, cpu_s=now * (rank % 8) / 8)
        for rank in range(64)
    ]
    infos[5] = RankInfo(5, 0, "node", "dead", ending="was killed by SIGSEGV")
    states = {{
        rank: RankState(1, 4, 7, 12, "model.forward",
                        "all_gather_into_tensor" if rank % 3 else "", "cuda:0",
                        40_000_000_000, "", now % 1000, device_percent=rank)
        for rank in range(64) if rank != 5
    }}
    return Snapshot(now, "ready", DIMS, infos, states)
class Fake:
    name, ranks = "fake", range(64)
    def __len__(self):
        return 64
widget = DashboardWidget()
dashboard = Dashboard(Fake(), take, widget.send)
widget.on_msg(lambda _, content, buffers: dashboard.hear(content))
LiveView(widget, lambda: Static("64 ranks", "64 ranks"))
"""
LAYOUTS = {
    "1d": {"dp": 64},
    "2d": {"dp": 8, "tp": 8},
    "wide": {"dp": 2, "tp": 32},
    "3d": {"pp": 4, "dp": 4, "tp": 4},
    "4d": {"pp": 2, "dp": 4, "cp": 2, "tp": 4},
}


def test_64_ranks_fit(page: Page, server: Server) -> None:
    with open_notebook(page, server, "many.ipynb") as notebook:
        for name, dims in LAYOUTS.items():
            shown = Dashboard(notebook.run(FAKE.format(dims=dims)))
            shown.expect_doing(5, "dead")
            for width in (1000, 700):
                notebook.page.set_viewport_size({"width": width, "height": 1600})
                expect(shown.root.locator(".cmd-card:visible")).to_have_count(64)
                outside = shown.root.evaluate(
                    """root => {
                        const room = root.getBoundingClientRect();
                        const kinds = '.cmd-card, .cmd-label, .cmd-buttons button';
                        const parts = root.querySelectorAll(kinds);
                        return [...parts].filter(element => {
                            const box = element.getBoundingClientRect();
                            const isOut = box.left < room.left - 1 || box.right > room.right + 1;
                            return isOut || box.width < 20;
                        }).map(element => element.outerHTML);
                    }"""
                )
                assert outside == []
                assert shown.root.evaluate("root => root.scrollWidth - root.clientWidth") <= 0
                value = shown.card(7).locator('[data-series="cpu"] .cmd-value')
                expect(value).to_have_text(re.compile(r"8\d %"))
                shown.picture(f"64-{name}-{width}")
            notebook.page.set_viewport_size({"width": 1000, "height": 900})
