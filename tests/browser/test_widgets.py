"""The widgets in JupyterLab, on real ranks: dashboard, live plots, tensor inspector."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import PICTURES, Cell, Notebook, Server

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

    def press(self, name: str) -> None:
        self.root.locator(f'.cmd-buttons [data-action="{name}"]').click()

    def expect_doing(self, rank: int, doing: str) -> None:
        expect(self.rank(rank)).to_have_attribute("data-doing", doing, timeout=SOON_MS)


@pytest.fixture
def dashboard(notebook: Notebook) -> Dashboard:
    """Of a mesh of 2 x 2 ranks."""
    notebook.run("%dist_start --mesh dp=2,tp=2", timeout_s=60)
    shown = Dashboard(notebook.run("%dist_status --live"))
    shown.expect_doing(3, "idle")
    return shown


SLEEP = "%%dist\nimport time\ntime.sleep(600)"


def test_waiting_cell_is_reported_and_interrupted(notebook: Notebook, dashboard: Dashboard) -> None:
    rows = dashboard.root.locator(".cmd-grid tr")
    expect(rows.first.locator("th").nth(2)).to_have_text("tp=1")
    expect(rows.nth(2).locator("th")).to_have_text("dp=1")
    last = rows.nth(2).locator("td").nth(1).locator(".cmd-rank")
    expect(last).to_have_attribute("data-rank", "3")
    expect(last).to_contain_text(re.compile(r"\d+ MB"))
    cell = notebook.start("%%dist\nimport time\nif rank == 0:\n    time.sleep(600)\ndist.barrier()")
    for rank in (1, 2, 3):
        dashboard.expect_doing(rank, "waits")
        expect(dashboard.rank(rank)).to_contain_text(re.compile(r"In\[\d+\]: in barrier"))
    dashboard.expect_doing(0, "runs")
    expect(dashboard.rank(0)).to_contain_text("time.sleep")
    notebook.picture("dashboard", first=1, last=2)
    dashboard.press("interrupt")
    cell.wait_for_end()
    assert any("RanksInterrupted" in text for text in cell.texts())
    expect(dashboard.told).to_have_text("interrupt: interrupted ranks 0-3")

    # It continues when the page is reloaded.
    notebook.save()
    notebook.page.reload()
    dashboard.expect_doing(0, "idle")
    cell = notebook.start(SLEEP)
    dashboard.expect_doing(0, "runs")
    dashboard.press("interrupt")
    cell.wait_for_end()
    dashboard.expect_doing(0, "idle")


def test_a_rank_that_was_killed_is_healed_and_restart_is_pressed_twice(
    notebook: Notebook, dashboard: Dashboard
) -> None:
    notebook.run("import os, signal\nos.kill(mesh.report()[2].pid, signal.SIGKILL)")
    dashboard.expect_doing(2, "dead")
    expect(dashboard.rank(2)).to_contain_text("dead: was killed by SIGKILL")
    busy = notebook.start(SLEEP.replace("%%dist", "%%dist --ranks 0"))
    dashboard.expect_doing(0, "runs")
    dashboard.press("heal")
    expect(dashboard.told).to_contain_text("MeshUsageError")
    expect(dashboard.told).to_have_class(re.compile("cmd-bad"))
    dashboard.press("interrupt")
    busy.wait_for_end()
    dashboard.press("heal")
    dashboard.expect_doing(2, "new")
    expect(dashboard.told).to_contain_text("heal: rank 2 is new and empty")

    notebook.run("%%dist\nkept = 1")
    busy = notebook.start(SLEEP)
    dashboard.expect_doing(0, "runs")
    dashboard.press("restart")
    expect(dashboard.told).to_contain_text("press again to do it")
    dashboard.expect_doing(1, "runs")
    dashboard.press("restart")
    restarted = re.compile(r"restart: 4 ranks ready in \d+\.\d s")
    expect(dashboard.told).to_have_text(restarted, timeout=SOON_MS)
    busy.wait_for_end()
    assert notebook.run("%%dist\n'kept' in globals()").texts() == ["[0-3] False"]
    notebook.run("%dist_stop")
    output = notebook.cell(1).outputs
    expect(output).to_contain_text("has ended (stopped)", timeout=SOON_MS)
    expect(output.locator("table tbody tr")).to_have_count(4)
    expect(dashboard.root).to_have_count(0)


FAKE = """
from cellmesh.controller.status import Snapshot
from cellmesh.magics.views.dashboard.dashboard import DashboardWidget, draw_mesh
from cellmesh.wire.messages import RankInfo, RankState
infos = [RankInfo(rank, 100 + rank, "node", "running", "cuda:0", "nccl", 3 << 30)
         for rank in range(64)]
infos[5] = RankInfo(5, 0, "node", "dead", ending="was killed by SIGSEGV", last_output="bye")
states = {{rank: RankState(1, 4, 7, 12, "model.forward", "all_gather_into_tensor", "cuda:0",
                           40 << 30, "", 7.0) for rank in range(64) if rank != 5}}
DashboardWidget(table=draw_mesh("fake", Snapshot(1.0, "ready", {dims}, infos, states)))
"""


def test_64_ranks_stay_within_the_page(notebook: Notebook) -> None:
    for dims in ({"dp": 2, "tp": 32}, {"pp": 2, "dp": 4, "cp": 2, "tp": 4}):
        shown = Dashboard(notebook.run(FAKE.format(dims=dims), 60))
        shown.expect_doing(5, "dead")
        notebook.page.set_viewport_size({"width": 700, "height": 1600})
        expect(shown.root.locator(".cmd-rank")).to_have_count(64)
        assert shown.root.evaluate("root => root.scrollWidth - root.clientWidth") <= 0
        notebook.page.set_viewport_size({"width": 1000, "height": 900})
        PICTURES.mkdir(parents=True, exist_ok=True)
        shown.root.screenshot(path=PICTURES / f"dashboard-64-{len(dims)}d.png")


def expect_drawn(panel: Locator, text: str) -> None:
    expect(panel).to_have_attribute("aria-label", re.compile(re.escape(text)))


def point_at(panel: Locator, share: float) -> None:
    """Move the pointer to a share of the panel's width."""
    over = panel.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    x = box["x"] + share * (box["width"] - 1)
    panel.page.mouse.move(x, box["y"] + box["height"] / 2)


def test_plot_lines_grow_while_a_cell_runs_and_can_be_zoomed(
    notebook: Notebook, server: Server
) -> None:
    notebook.run("%dist_start 2", timeout_s=60)
    notebook.run("%%dist\nimport cellmesh as cm, math, time\nfrom pathlib import Path")
    plot = notebook.run("%dist_plot loss")
    expect(plot.root.locator(".cm-empty")).to_contain_text("cellmesh.log(loss=..., step=...)")
    running = notebook.start(
        "%%dist\n"
        "for step in range(100):\n    cm.log(loss=math.exp(-step / 30) + rank / 10, step=step)\n"
        "while not Path('draw_on').exists():\n    time.sleep(0.01)\n"
        "cm.log(loss=5.0 + rank, step=100)"
    )
    panel = plot.root.locator(".cm-panel")
    expect_drawn(panel, "loss by step: ranks 0, 1; ")
    expect(running.root.locator(".jp-InputPrompt")).to_have_text("[*]:")  # drawn while it runs
    (server.notebooks / "draw_on").touch()
    running.wait_for_end()
    expect_drawn(panel, "; 202 points")
    # The number at the right end is the last that was logged there.
    tip = plot.root.locator(".cm-tip")
    point_at(panel, 1.0)
    expect(tip).to_contain_text("step 100")
    expect(tip).to_contain_text("rank 0: 5")
    expect(tip).to_contain_text("rank 1: 6")
    # Dragging zooms in, and later points do not zoom out; a double click does.
    point_at(panel, 0.5)
    notebook.page.mouse.down()
    point_at(panel, 0.6)
    notebook.page.mouse.up()
    notebook.run("%%dist\ncm.log(loss=7.0, step=101)")
    expect_drawn(panel, "; 204 points")
    point_at(panel, 1.0)
    expect(tip).to_contain_text(re.compile(r"step (59|60|61)rank"))
    panel.locator(".u-over").dblclick()
    point_at(panel, 1.0)
    expect(tip).to_contain_text("step 101")
    notebook.picture("plots")


def test_plot_choices_outlive_a_reload_and_a_stopped_mesh_leaves_a_picture(
    notebook: Notebook,
) -> None:
    notebook.run("%dist_start 2", timeout_s=60)
    notebook.run(
        "%%dist\nimport cellmesh as cm\n"
        "for step in range(50):\n    cm.log(acc=step * (rank + 1), step=step)"
    )
    plot = notebook.run("%dist_plot acc")
    panel = plot.root.locator(".cm-panel")
    button = plot.root.get_by_role("button", name="rank 0")
    button.click()
    expect_drawn(panel, "acc by step: ranks 1; 50 points")
    plot.root.get_by_role("button", name="mean and range").press("Enter")
    expect_drawn(panel, "acc by step, mean and range: ranks 1")
    notebook.save()
    notebook.page.reload()
    text = "acc by step, mean and range: ranks 1; 50 points"
    expect(panel).to_have_attribute("aria-label", text, timeout=60_000)
    expect(button).to_have_attribute("aria-pressed", "false")
    # The reloaded page does not know which output a display's id names: the widget stays, and says
    # so.
    again = notebook.run("%dist_plot acc")
    notebook.run("%dist_stop")
    expect(plot.root).to_contain_text("has ended (stopped)")
    expect(again.root.locator("img.cellmesh-plot")).to_be_visible()
    expect(again.root).to_contain_text("has ended (stopped)")
    expect(again.root.locator(".cm-plots")).to_have_count(0)


MANY = """\
import math
from cellmesh.controller.metrics import Metrics, Plot
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Logged

metrics = Metrics()
steps = tuple(map(float, range(200)))
for rank in range(64):
    loss = tuple(math.exp(-s / 50) * (1 + rank / 64) for s in steps)
    rows = (loss, tuple(math.nan if s == 100 else 10 ** (s / 40) for s in steps))
    metrics.take(1, (rank,), Parcel(Logged(1, ("loss", "tokens"), steps, rows)))
Plot(metrics, ("loss", "tokens"), tuple(range(64)))"""


def test_plots_of_64_ranks_fit(notebook: Notebook) -> None:
    notebook.page.set_viewport_size({"width": 700, "height": 900})
    plot = notebook.run(MANY)
    panels = plot.root.locator(".cm-panel")
    expect_drawn(panels.first, "loss by step: ranks 0, 1, 2, ")
    expect_drawn(panels.first, "; 12800 points")
    area = plot.root.locator(".jp-OutputArea-output").bounding_box()
    assert area is not None
    width = plot.root.locator(".cm-plots").evaluate("element => element.scrollWidth")
    assert width <= area["width"]
    expect(panels.last).to_contain_text("NaN on ranks 0-63 at step 100")
    plot.root.get_by_role("button", name="log").click()
    expect_drawn(panels.last, "tokens by step, logarithmic")


def opened(cell: Cell) -> Locator:
    """The inspector that a cell shows, once the kernel answers it."""
    root = cell.outputs.locator(".cmi").last
    expect(root).to_have_attribute("data-live", "true", timeout=20_000)
    return root


def open_heatmap(root: Locator) -> Locator:
    """The canvas, once there is a picture in it."""
    root.get_by_role("tab", name="Heatmap").click()
    canvas = root.locator("canvas")
    expect(canvas).to_have_attribute("data-shown", re.compile(r"\d+"), timeout=20_000)
    canvas.scroll_into_view_if_needed()
    return canvas


def expect_value_of_rank(notebook: Notebook, root: Locator, rank: int) -> None:
    """Point at an element of `w`: its value must be the rank's own."""
    root.locator("canvas").scroll_into_view_if_needed()
    box = root.locator("canvas").bounding_box()
    assert box is not None
    x, y = box["x"] + 0.4013 * box["width"], box["y"] + 0.3017 * box["height"]
    notebook.page.mouse.move(x, y, steps=2)
    value = root.locator(".cmi-value[data-final=true]")
    expect(value).to_be_visible()
    index, shown = (value.get_attribute(name) for name in ("data-whole", "data-value"))
    (text,) = notebook.run(f"%%dist --ranks {rank}\nprint(w[{index}].item())").texts()
    assert float(text.removeprefix(f"[{rank}] ")) == pytest.approx(float(shown or ""), rel=1e-6)


def test_the_inspector_shows_values_of_the_ranks(notebook: Notebook, server: Server) -> None:
    notebook.run("%dist_start 2", 60)
    notebook.run("%%dist\ntorch.manual_seed(0)\nw = torch.randn(240, 360) + rank")
    root = opened(notebook.run("%dist_inspect w --watch"))
    rows = root.locator("[data-tab=overview] tr[data-ranks]")
    assert [row.get_attribute("data-ranks") for row in rows.all()] == ["0", "1"]
    expect(root).to_contain_text("replicas differ: ranks 0 ≠ 1")
    canvas = open_heatmap(root)
    expect_value_of_rank(notebook, root, 0)
    canvas.click(position={"x": 200, "y": 120})
    count = canvas.get_attribute("data-shown") or ""
    notebook.page.mouse.wheel(0, -600)
    expect(canvas).not_to_have_attribute("data-shown", count)
    root.get_by_label("rank", exact=True).select_option("1")
    expect_value_of_rank(notebook, root, 1)
    notebook.picture("inspector", first=2, last=2)

    # --watch: the next cell changes it
    root.get_by_role("tab", name="Overview").click()
    notebook.run("%%dist\nw.fill_(41 + rank)")
    root.scroll_into_view_if_needed()  # an inspector out of sight looks again once it is seen
    expect(rows.nth(1).locator("[data-key=max]")).to_have_text("42")

    # refresh: while a cell runs, without stopping it
    running = notebook.start(
        "%%dist\nimport os, time\nw.fill_(77 + rank)\nprint('fil' + 'led')\n"
        "while not os.path.exists('look-on'):\n    time.sleep(0.05)\nw.fill_(99 + rank)"
    )
    root.scroll_into_view_if_needed()
    expect(running.root).to_contain_text("filled")
    root.get_by_role("button", name="Look again now").click()
    expect(rows.nth(1).locator("[data-key=max]")).to_have_text("78", timeout=20_000)
    expect(root.locator(".cmi-notice")).to_contain_text("values may be torn")
    expect(running.root.locator(".jp-InputPrompt")).to_have_text("[*]:")
    (server.notebooks / "look-on").touch()
    running.wait_for_end()
    root.scroll_into_view_if_needed()
    expect(rows.nth(1).locator("[data-key=max]")).to_have_text("100")
    expect(root.locator(".cmi-notice")).to_be_hidden()

    # The mesh ends: the last view stays.
    notebook.run("%dist_stop")
    first = notebook.cell(2)
    expect(first.root).to_contain_text("has ended (stopped)")
    expect(first.outputs.locator("table").first).to_contain_text("100")
    expect(first.outputs.locator("canvas")).to_have_count(0)
