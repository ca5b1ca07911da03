"""Live plots in JupyterLab: what is drawn is what ranks logged."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import Notebook, Server


@pytest.fixture
def notebook(notebook: Notebook) -> Notebook:
    """An empty notebook with a mesh of two ranks."""
    notebook.run("%dist_start 2", timeout_s=60)
    return notebook


def expect_drawn(panel: Locator, text: str) -> None:
    expect(panel).to_have_attribute("aria-label", re.compile(re.escape(text)))


def test_plot_lines_grow_while_a_cell_runs_and_name_what_was_logged(
    notebook: Notebook, server: Server
) -> None:
    notebook.run("%%dist\nimport cellmesh as cm, math, time\nfrom pathlib import Path")
    plot = notebook.run("%dist_plot loss")
    expect(plot.root.locator(".cm-empty")).to_contain_text("cellmesh.log(loss=..., step=...)")
    running = notebook.start(
        "%%dist\n"
        "for step in range(100):\n    cm.log(loss=math.exp(-step / 30) + rank / 10, step=step)\n"
        "while not Path('go_on').exists():\n    time.sleep(0.01)\n"
        "cm.log(loss=5.0 + rank, step=100)"
    )
    panel = plot.root.locator(".cm-panel")
    expect_drawn(panel, "loss by step: ranks 0, 1; ")
    expect(running.root.locator(".jp-InputPrompt")).to_have_text("[*]:")  # drawn while it runs
    (server.notebooks / "go_on").touch()
    running.wait_for_end()
    expect_drawn(panel, "; 202 points")
    # The number at the right end is the last that was logged there.
    tip = plot.root.locator(".cm-tip")
    point_at(panel, 1.0)
    expect(tip).to_contain_text("step 100")
    expect(tip).to_contain_text("rank 0: 5")
    expect(tip).to_contain_text("rank 1: 6")
    # Dragging zooms in, and what is logged then does not zoom out; a double click does.
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
    notebook.picture("plots-lines")


def point_at(panel: Locator, share: float) -> None:
    """Move the pointer to a share of the panel's width."""
    over = panel.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    x = box["x"] + share * (box["width"] - 1)
    panel.page.mouse.move(x, box["y"] + box["height"] / 2)


def test_plot_choices_outlive_a_reload_and_a_stopped_mesh_leaves_a_picture(
    notebook: Notebook,
) -> None:
    notebook.run(
        "%%dist\nimport cellmesh as cm\nfor step in range(50):\n    cm.log(acc=step * (rank + 1), "
        "step=step)"
    )
    plot = notebook.run("%dist_plot acc")
    page = notebook.page
    plot.root.get_by_role("button", name="rank 0").click()
    panel = plot.root.locator(".cm-panel")
    expect_drawn(panel, "acc by step: ranks 1; 50 points")
    plot.root.get_by_role("button", name="mean and range").press("Enter")
    expect_drawn(panel, "acc by step, mean and range: ranks 1")
    notebook.save()
    page.reload()
    expect(panel).to_have_attribute(
        "aria-label", "acc by step, mean and range: ranks 1; 50 points", timeout=30_000
    )
    expect(plot.root.get_by_role("button", name="rank 0")).to_have_attribute(
        "aria-pressed", "false"
    )
    plot.root.get_by_role("button", name="rank 0").click()
    expect(plot.root.get_by_role("button", name="rank 0")).to_have_attribute("aria-pressed", "true")
    notebook.set_theme("JupyterLab Dark")
    notebook.picture("plots-dark", 2, 2)
    # The reloaded page does not know which output a display's id names: the widget stays, and says
    # so.
    again = notebook.run("%dist_plot acc")
    notebook.run("%dist_stop")
    expect(plot.root).to_contain_text("has ended (stopped)")
    expect(again.root.locator("img.cellmesh-plot")).to_be_visible()
    expect(again.root).to_contain_text("has ended (stopped)")
    expect(again.root.locator(".cm-plots")).to_have_count(0)
    notebook.picture("plots-static", 3, 3)


MANY = """\
import math
from cellmesh.controller.metrics import Metrics
from cellmesh.controller.metrics import Plot
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Logged

metrics = Metrics()
steps = tuple(map(float, range(200)))
for rank in range(64):
    loss = tuple(math.exp(-s / 50) * (1 + rank / 64) + 0.05 * math.sin(s / 7 + rank) for s in steps)
    rows = (loss, tuple(math.nan if s == 100 else 10 ** (s / 40) for s in steps))
    metrics.take(1, (rank,), Parcel(Logged(1, ("loss", "tokens"), steps, rows)))
Plot(metrics, ("loss", "tokens"), tuple(range(64)))"""


@pytest.mark.parametrize("width", [1000, 700])
def test_64_ranks_fit(notebook: Notebook, width: int) -> None:
    notebook.page.set_viewport_size({"width": width, "height": 900})
    plot = notebook.run(MANY)
    panels = plot.root.locator(".cm-panel")
    expect_drawn(panels.first, "loss by step: ranks 0, 1, 2, ")
    expect_drawn(panels.first, "; 12800 points")
    area = plot.root.locator(".jp-OutputArea-output").bounding_box()
    shown = plot.root.locator(".cm-plots")
    assert area is not None
    assert shown.evaluate("element => element.scrollWidth") <= area["width"]
    # A NaN is a gap: between the lines before and after it nothing is drawn.
    expect(panels.last).to_contain_text("NaN on ranks 0-63 at step 100")
    drawn = {step: column_of(panels.last, step) for step in (40, 100, 160)}
    assert [bool(drawn[step]) for step in drawn] == [True, False, True]
    plot.root.get_by_role("button", name="log").click()
    expect_drawn(panels.last, "tokens by step, logarithmic")
    notebook.picture(f"plots-64-{width}", 1, 1, width)


def column_of(panel: Locator, step: float) -> list[int]:
    """The heights in which a line is drawn at a step of 0 to 199; grid and axes are grey."""
    found: list[int] = panel.evaluate(
        """(panel, share) => {
            const canvas = panel.querySelector("canvas");
            const box = canvas.getBoundingClientRect();
            const over = panel.querySelector(".u-over").getBoundingClientRect();
            const x = Math.round(over.left - box.left + share * over.width) * devicePixelRatio;
            const { data } = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height);
            const isColoured = (y) => {
                const [red, green, blue] = data.slice(4 * y, 4 * y + 3);
                return Math.max(red, green, blue) - Math.min(red, green, blue) > 40;
            };
            return Array.from({ length: canvas.height }, (_, y) => y).filter(isColoured);
        }""",
        step / 199,
    )
    return found
