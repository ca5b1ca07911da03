"""Live plots in JupyterLab: what is drawn is what ranks logged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.lab import Notebook, Server, open_notebook


@pytest.fixture
def notebook(
    browser: Browser, server: Server, request: pytest.FixtureRequest
) -> Iterator[Notebook]:
    with open_notebook(browser, server, f"{request.node.name}.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 2", 60)
        yield notebook


def test_lines_grow_while_a_cell_runs_and_tell_what_was_logged(
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
    lines = plot.root.locator("path.cm-line")
    expect(lines).to_have_count(2)
    expect(running.root.locator(".jp-InputPrompt")).to_have_text("[*]:")  # drawn while it runs
    (server.notebooks / "go_on").touch()
    running.wait_for_end()
    expect(lines.first).to_have_attribute("data-points", "101")
    # The number at the right end is the last that was logged there.
    box = plot.root.locator(".cm-plots svg").bounding_box()
    assert box is not None
    notebook.page.mouse.move(box["x"] + box["width"] * 0.98, box["y"] + box["height"] / 2)
    tip = plot.root.locator(".cm-tip")
    expect(tip).to_contain_text("step 100")
    expect(tip).to_contain_text("rank 0: 5")
    expect(tip).to_contain_text("rank 1: 6")
    notebook.picture("plots-lines")


def test_what_was_chosen_outlives_a_reload_and_a_stopped_mesh_leaves_a_picture(
    notebook: Notebook,
) -> None:
    notebook.run(
        "%%dist\nimport cellmesh as cm\nfor step in range(50):\n    cm.log(acc=step * (rank + 1), "
        "step=step)"
    )
    plot = notebook.run("%dist_plot acc")
    page = notebook.page
    plot.root.get_by_role("button", name="rank 0").click()
    expect(plot.root.locator("path.cm-line")).to_have_count(1)
    expect(plot.root.locator("path.cm-line")).to_have_attribute("data-rank", "1")
    plot.root.get_by_role("button", name="mean and range").press("Enter")
    expect(plot.root.locator("path.cm-mean")).to_have_count(1)
    expect(plot.root.locator("path.cm-line")).to_have_count(0)
    notebook.save()
    page.reload()
    expect(plot.root.locator("path.cm-mean")).to_have_count(1, timeout=30_000)
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
from cellmesh.controller.metrics_plot import Plot
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
    expect(plot.root.locator("path.cm-line")).to_have_count(128)
    area = plot.root.locator(".jp-OutputArea-output").bounding_box()
    shown = plot.root.locator(".cm-plots")
    assert area is not None
    assert shown.evaluate("element => element.scrollWidth") <= area["width"]
    # A number that is none is a gap, and a logarithmic scale has the decades.
    assert shown.locator("path.cm-line").last.get_attribute("d").count("M") == 2  # type: ignore[union-attr]
    plot.root.get_by_role("button", name="log").click()
    expect(shown.locator("svg").last).to_contain_text("10000")
    notebook.picture(f"plots-64-{width}", 1, 1, width)
