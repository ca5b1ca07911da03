"""The switch to one rank's output in JupyterLab: mouse and keyboard, after a reload, in an
untrusted copy.
"""

from __future__ import annotations

import re

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from cellmesh.wire.ranks import parse_ranks
from tests.browser.lab import PICTURES, Cell, Notebook, Server, open_notebook

pytestmark = pytest.mark.timeout(300)

SOURCE = """%%dist
import sys
import pandas as pd
from IPython.display import display
dist.barrier()
print("step 1")
print(f"loss {0.5 + rank // 2}")
if rank == 3:
    print("</style><script>document.title = 'broken'</script>", file=sys.stderr)
display(pd.DataFrame({"x": [1, 2], "rank": [rank // 2] * 2}))
dist.barrier()
if rank == 2:
    raise ValueError("odd <batch>")"""


@pytest.fixture
def notebook(notebook: Notebook) -> Notebook:
    """An empty notebook with a mesh of four ranks."""
    notebook.run("%dist_start 4", timeout_s=60)
    return notebook


def switch_of(cell: Cell) -> Locator:
    return cell.root.locator(".cellmesh-ranks")


def part_of(switch: Locator, title: str) -> Locator:
    return switch.locator("details").filter(
        has=switch.page.locator("summary", has_text=re.compile(f"^{title}$"))
    )


def test_one_ranks_output(notebook: Notebook) -> None:
    page = notebook.page
    cell = notebook.run(SOURCE)
    switch = switch_of(cell)
    assert switch.locator("summary").all_inner_texts() == ["0-1", "2", "3"]
    for title in ("0-1", "2", "3"):
        expect(part_of(switch, title).locator("div").first).to_be_hidden()
    closed = switch.bounding_box()
    assert closed is not None
    assert closed["height"] < 40, "it does not get in the way"

    part_of(switch, "2").locator("summary").click()
    two = part_of(switch, "2").locator("div").first
    expect(two).to_be_visible()
    text = two.inner_text()
    assert text.startswith("step 1\nloss 1.5\n")
    assert "ValueError: odd <batch>" in text
    assert two.locator("tbody tr").last.locator("td").all_inner_texts() == ["2", "1"]
    colour = two.locator("span", has_text="ValueError").first.evaluate(
        "e => getComputedStyle(e).color"
    )
    assert colour == "rgb(217, 69, 61)"

    page.keyboard.press("Tab")  # to rank 3's
    page.keyboard.press("Enter")
    three = part_of(switch, "3").locator("div").first
    expect(three).to_be_visible()
    expect(two).to_be_hidden()
    assert "</style><script>" in three.inner_text()
    assert page.title() != "broken"
    # The chips stand in one row, whichever is open.
    tops = {
        round(box["y"]) for each in switch.locator("summary").all() if (box := each.bounding_box())
    }
    assert len(tops) == 1
    notebook.picture("tabs-light")
    notebook.set_theme("JupyterLab Dark")
    part_of(switch, "2").locator("summary").click()
    notebook.picture("tabs-dark")
    page.set_viewport_size({"width": 700, "height": 900})
    inside = switch.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    assert inside
    switch.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / "tabs-700.png")


def test_parts_open_after_a_reload(notebook: Notebook) -> None:
    page = notebook.page
    notebook.run('%%dist\nprint("same")\nprint("rank", rank)')
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.reload()
    switch = notebook.panel.locator(".cellmesh-ranks")
    part_of(switch, "2").locator("summary").click(timeout=60_000)
    expect(part_of(switch, "2").locator("div").first).to_have_text("same\nrank 2")
    expect(part_of(switch, "0").locator("div").first).to_be_hidden()


def test_64_parts_wrap(notebook: Notebook, server: Server) -> None:
    # As 64 ranks would: it needs no mesh to be looked at.
    cell = notebook.run(
        "from cellmesh.controller.output.rank_tabs import switch\n"
        "from cellmesh.controller.output.fold import Line\n"
        "from IPython.display import HTML\n"
        'outs = {r: (Line("stdout", "same"), Line("stdout", f"loss of {r}")) for r in range(64)}\n'
        'HTML(switch(outs, (), "64"))'
    )
    switch = switch_of(cell)
    expect(switch.locator("summary")).to_have_count(64)
    box = switch.bounding_box()
    assert box is not None
    assert box["height"] < 110
    part_of(switch, "40").locator("summary").click()
    expect(part_of(switch, "40").locator("div").first).to_have_text("same\nloss of 40")
    notebook.picture("tabs-64")


def test_tabs_are_readable_in_an_untrusted_notebook(
    page: Page, server: Server, notebook: Notebook
) -> None:
    cell = notebook.run(SOURCE)
    html = notebook.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.model.cells.get(1).toJSON().outputs"
        ".map((each) => (each.data || {})['text/html'] || '').flat().join('')"
    )
    assert switch_of(cell).count() == 1
    code = nbformat.v4.new_code_cell(
        "1",
        outputs=[nbformat.v4.new_output("display_data", data={"text/html": html})],
        execution_count=1,
    )
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    copy = nbformat.v4.new_notebook(cells=[code], metadata={"kernelspec": kernel})
    server.write("untrusted.ipynb", copy)
    with open_notebook(page, server, "untrusted.ipynb") as other:
        switch = other.panel.locator(".cellmesh-ranks")
        expect(other.panel.locator(".cellmesh-ranks style")).to_have_count(0)
        assert switch.locator("summary").all_inner_texts() == ["0-1", "2", "3"]
        expect(part_of(switch, "2").locator("div").first).to_be_hidden()
        part_of(switch, "2").locator("summary").click()
        expect(part_of(switch, "2").locator("div").first).to_contain_text("ValueError: odd <batch>")
        other.picture("tabs-untrusted")


def test_rich_output_of_ranks(notebook: Notebook) -> None:
    """Types that need a front end's own program, offline; and a rank that clears only what is its
    own.
    """
    notebook.run(
        "%%dist\nimport plotly.graph_objects as go\nfrom IPython.display import SVG, Latex, "
        "clear_output",
        60,
    )
    figure = notebook.run(
        "%%dist --ranks 1\nfigure = go.Figure(go.Scatter(y=[0, 1, 4]))\nfigure.show()", 60
    )
    expect(figure.root.locator(".js-plotly-plot .scatterlayer path.js-line")).to_have_count(
        1, timeout=20_000
    )
    shown = figure.outputs.filter(
        has_text=re.compile(r"\S")
    )  # a slow cell's live line leaves an empty one
    expect(shown.first).to_have_text(re.compile(r"^\[1\]\s*$"))

    svg = (
        "<svg xmlns='http://www.w3.org/2000/svg' width='60' "
        "height='20'><rect width='60' height='20'/></svg>"
    )
    # Of one rank: what ranks that share cores show at unequal times may be folded or not.
    drawing = notebook.run(f'%%dist --ranks 2\nSVG("{svg}")')
    picture = drawing.outputs.locator("img")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 60
    expect(drawing.outputs.first).to_contain_text("[2]")

    formula = notebook.run('%%dist --ranks 2\nLatex("$x^2$")')
    expect(formula.outputs.locator("mjx-container")).to_be_visible(timeout=20_000)
    expect(formula.outputs.first).to_contain_text("[2]")

    cleared = notebook.run(
        '%%dist\nprint("all")\ndist.barrier()\nif rank == 1:\n    clear_output(wait=True)\n    '
        'print("new")'
    )
    shown = [line.split("] ") for text in cleared.texts() for line in text.splitlines()]
    of_ranks = [(parse_ranks(ranks.lstrip("["), 4), text) for ranks, text in shown]
    assert sorted((rank, text) for ranks, text in of_ranks for rank in ranks) == [
        (0, "all"), (1, "new"), (2, "all"), (3, "all")
    ]  # fmt: skip
    notebook.picture("rich")
