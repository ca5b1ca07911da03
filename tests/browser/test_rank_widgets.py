"""Widgets made on a rank, as a person uses them in JupyterLab: with the keyboard, and after a
reload.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import PICTURES, Server, open_notebook

pytestmark = pytest.mark.timeout(300)

SLIDER = (
    "%%dist\n"
    "import ipywidgets as w\n"
    "slider = w.IntSlider(value=2, max=10, description='steps')\n"
    "label = w.Label('untouched')\n"
    "def moved(change):\n"
    "    label.value = f'rank {rank} of {world_size} has {change[\"new\"]}'\n"
    "    print('moved to', change['new'])\n"
    "slider.observe(moved, 'value')\n"
    "w.VBox([slider, label])"
)
INTERACT = (
    "%%dist\n"
    "import matplotlib.pyplot as plt\n"
    "def draw(power=(1, 4)):\n"
    "    x = torch.linspace(0, 1, 50)\n"
    "    plt.figure(figsize=(3, 1.5))\n"
    "    plt.plot(x, x**power)\n"
    "    plt.show()\n"
    "    print('power', power)\n"
    "w.interact(draw);"
)

# What a callback clears is not its own widget.
PRESSED = (
    "%%dist --ranks 0\n"
    "from IPython.display import clear_output\n"
    "presses = []\n"
    "def press(button):\n"
    "    presses.append(button)\n"
    "    clear_output()\n"
    "    print('pressed', len(presses), 'times')\n"
    "button = w.Button(description='again')\n"
    "button.on_click(press)\n"
    "button"
)


def handle_of(root: Locator) -> Locator:
    """What the keyboard moves of a slider."""
    return root.locator(".noUi-handle").first


def readout_of(root: Locator) -> Locator:
    """The number beside a slider."""
    return root.locator(".widget-readout").first


def test_a_slider_runs_its_callback_on_its_rank(page: Page, server: Server) -> None:
    with open_notebook(page, server, "rank_widgets.ipynb") as notebook:
        complaints: list[str] = []
        notebook.page.on("pageerror", lambda error: complaints.append(str(error)))
        notebook.run("%load_ext cellmesh\n%dist_start 4", 60)
        cell = notebook.run(SLIDER, 60)
        expect(cell.root).to_contain_text(
            "[0] (ranks 1-3 have one, too: `%%dist --ranks 1` shows rank 1's)"
        )
        expect(handle_of(cell.root)).to_have_attribute("aria-valuenow", "2.0")
        handle_of(cell.root).focus()
        for _ in range(3):
            notebook.page.keyboard.press("ArrowRight")
        expect(cell.root).to_contain_text("rank 0 of 4 has 5")
        expect(cell.root).to_contain_text("[0] moved to 5")
        assert notebook.run("%%dist\nslider.value").texts() == ["[0] 5\n[1-3] 2"]

        drawn = notebook.run(INTERACT, 60)
        expect(drawn.root.locator(".jp-OutputArea-child img")).to_have_count(1)
        expect(drawn.root).to_contain_text("power 2")
        handle_of(drawn.root).focus()
        notebook.page.keyboard.press("ArrowRight")
        expect(drawn.root).to_contain_text("power 3")
        expect(drawn.root).not_to_contain_text("power 2")
        expect(drawn.root.locator("img")).to_have_count(1)
        assert drawn.root.locator("img").evaluate("image => image.naturalWidth") > 100
        for theme in ("Dark", "Light"):
            notebook.set_theme(f"JupyterLab {theme}")
            notebook.picture(f"rank_widgets_{theme.lower()}", first=1)

        # From the rank to the page, and what the page shows of a rank that is no more.
        notebook.run("%%dist --ranks 0\nslider.value = 9")
        expect(handle_of(cell.root)).to_have_attribute("aria-valuenow", "9.0")
        expect(readout_of(cell.root)).to_have_text("9")
        notebook.run("%%dist\nimport os\nif rank == 0:\n    os.kill(os.getpid(), 9)")
        expect(cell.root).to_contain_text("rank 0 was killed by SIGKILL")
        expect(readout_of(cell.root)).to_have_text("9")
        handle_of(cell.root).focus()
        notebook.page.keyboard.press("ArrowRight")
        expect(drawn.root.locator("img")).to_have_count(1)
        notebook.picture("rank_widgets_dead", first=1)
        notebook.run("%dist_stop")
        assert complaints == []


def test_widgets_are_there_after_a_reload(page: Page, server: Server) -> None:
    with open_notebook(page, server, "rank_widgets_reload.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 2", 60)
        cell = notebook.run(SLIDER, 60)
        handle_of(cell.root).focus()
        notebook.page.keyboard.press("ArrowRight")
        expect(cell.root).to_contain_text("rank 0 of 2 has 3")
        save(notebook.page)
        notebook.page.reload()
        expect(handle_of(cell.root)).to_have_attribute("aria-valuenow", "3.0", timeout=30_000)
        expect(cell.root).to_contain_text("rank 0 of 2 has 3")
        handle_of(cell.root).focus()
        notebook.page.keyboard.press("ArrowRight")
        expect(cell.root).to_contain_text("rank 0 of 2 has 4")
        notebook.page.screenshot(path=PICTURES / "rank_widgets_reload.png")


def test_a_slider_answers_while_another_rank_runs_a_cell(page: Page, server: Server) -> None:
    with open_notebook(page, server, "rank_widgets_busy.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 2", 60)
        cell = notebook.run(SLIDER, 60)
        pressed = notebook.run(PRESSED)
        for count in (1, 2, 3):
            pressed.root.get_by_role("button", name="again").click()
            expect(pressed.root).to_contain_text(f"[0] pressed {count} times")
        expect(pressed.root).not_to_contain_text("pressed 2 times")
        busy = notebook.start("%%dist --ranks 1\nimport time\nprint('begins')\ntime.sleep(600)")
        expect(busy.root).to_contain_text("[1] begins")
        handle_of(cell.root).focus()
        notebook.page.keyboard.press("ArrowRight")
        expect(cell.root).to_contain_text("rank 0 of 2 has 3")
        notebook.press_stop()
        busy.wait_for_end()


def test_a_plotly_figure_is_changed_by_its_rank(page: Page, server: Server) -> None:
    with open_notebook(page, server, "rank_widgets_plotly.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 2", 60)
        cell = notebook.run(
            "%%dist\nimport plotly.graph_objects as go\nfigure = go.FigureWidget(go.Bar(x=['a', "
            "'b', 'c'], y=[1, 2, 3]), layout={'height': 300})\nfigure",
            60,
        )
        bars = cell.root.locator(".bars .point path")
        expect(bars).to_have_count(3, timeout=30_000)
        notebook.run(
            "%%dist --ranks 0\nfigure.data[0].update(x=['a', 'b', 'c', 'd'], y=[4, 3, 2, 1])"
        )
        expect(bars).to_have_count(4)
        notebook.picture("rank_widgets_plotly", first=1)


def test_at_700_pixels(page: Page, server: Server) -> None:
    with open_notebook(page, server, "rank_widgets_narrow.ipynb") as notebook:
        notebook.page.set_viewport_size({"width": 700, "height": 800})
        notebook.run("%load_ext cellmesh\n%dist_start 2", 60)
        cell = notebook.run(SLIDER, 60)
        expect(handle_of(cell.root)).to_be_visible()
        box, panel = cell.outputs.last.bounding_box(), notebook.panel.bounding_box()
        assert box is not None
        assert panel is not None
        assert box["x"] + box["width"] <= panel["x"] + panel["width"]
        notebook.page.screenshot(path=PICTURES / "rank_widgets_narrow.png")


def save(page: Page) -> None:
    """Save the notebook, and wait until that is done."""
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
