"""Tab, Shift+Tab and ``?`` in JupyterLab: what lives on the ranks comes up where one types."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import PICTURES, Notebook, Server, open_notebook

pytestmark = pytest.mark.timeout(240)

CELL = """%%dist
from torch import nn

class Net(nn.Module):
    "a net of two layers"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])

def double_it(value, times=2):
    "as many times as one likes"
    return value * times

net_of_ranks = Net()
net_of_nobody = net_of_ranks
part = rank // 2
loss = torch.tensor(0.5)
batch = torch.ones(2 + rank % 2, 3)"""


@pytest.fixture(scope="module")
def notebook(page: Page, server: Server) -> Iterator[Notebook]:
    """A notebook with a mesh of four ranks that hold a model."""
    with open_notebook(page, server, "completion.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 4", timeout_s=60)
        # A loaded machine takes its time, and what is tested here is not how long.
        notebook.run("from cellmesh.magics.completion import hooks\nhooks._WAIT_S = 10")
        notebook.run(CELL)
        yield notebook


def type_cell(notebook: Notebook, source: str) -> Locator:
    """Replace what stands in the last cell."""
    editor = notebook.cells.last.locator(".cm-content")
    editor.click()
    notebook.page.keyboard.press("Control+A")
    notebook.page.keyboard.press("Delete")
    notebook.page.keyboard.insert_text(source)
    expect(editor).to_contain_text(source.rpartition("\n")[2])
    return editor


def photograph(notebook: Notebook, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    notebook.page.screenshot(path=PICTURES / f"{name}.png")


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_tab_shows_names_of_the_ranks(notebook: Notebook, theme: str) -> None:
    notebook.set_theme(theme)
    type_cell(notebook, "%%dist\nnet_of")
    notebook.page.keyboard.press("Tab")
    popup = notebook.page.locator(".jp-Completer:visible")
    items = popup.locator(".jp-Completer-item")
    expect(items).to_have_count(2, timeout=20_000)
    matches = items.locator("code.jp-Completer-match").all_inner_texts()
    assert matches == ["net_of_nobody", "net_of_ranks"]
    photograph(notebook, f"completion-names-{theme.split()[-1].lower()}")
    notebook.page.keyboard.press("Escape")
    expect(popup).to_have_count(0)


def test_tab_after_a_dot_shows_attributes_of_the_ranks(notebook: Notebook) -> None:
    editor = type_cell(notebook, "%%dist\nnet_of_ranks.layers[1].weig")
    notebook.page.keyboard.press("Tab")
    items = notebook.page.locator(".jp-Completer:visible .jp-Completer-item")
    expect(items).to_have_count(1, timeout=20_000)
    assert items.locator("code.jp-Completer-match").all_inner_texts() == ["weight"]
    notebook.page.keyboard.press("Tab")
    expect(editor).to_contain_text("net_of_ranks.layers[1].weight")


def test_tab_on_the_magics_line_shows_its_options(notebook: Notebook) -> None:
    type_cell(notebook, "%%dist --")
    notebook.page.keyboard.press("Tab")
    items = notebook.page.locator(".jp-Completer:visible .jp-Completer-item")
    options = ("--argv", "--ranks", "--at", "--nowait", "--quiet", "--time")
    expect(items).to_have_count(len(options), timeout=20_000)
    texts = "\n".join(items.all_inner_texts())
    assert all(option in texts for option in options)
    photograph(notebook, "completion-options")
    notebook.page.keyboard.press("Escape")


def test_shift_tab_shows_the_ranks_docstring(notebook: Notebook) -> None:
    type_cell(notebook, "%%dist\ndouble_it(")
    notebook.page.keyboard.press("Shift+Tab")
    tooltip = notebook.page.locator(".jp-Tooltip")
    expect(tooltip).to_contain_text("as many times as one likes", timeout=20_000)
    photograph(notebook, "completion-tooltip")
    notebook.page.keyboard.press("Escape")


def test_a_question_mark_shows_source_and_docstring(notebook: Notebook) -> None:
    type_cell(notebook, "")
    cell = notebook.run("%%dist\ndouble_it??")
    expect(cell.outputs).to_contain_text("return value * times")
    assert re.search(r"def double_it\(value, times=2\):", cell.outputs.inner_text())
    notebook.picture("completion-help", first=-2)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_who_table_is_shown_in_the_page(notebook: Notebook, theme: str) -> None:
    notebook.set_theme(theme)
    table = notebook.run("%dist_who").outputs.locator("table")
    headers = [text.strip() for text in table.locator("th").all_inner_texts()]
    assert headers == ["name", "type", "shape", "size", "value", "between ranks"]
    rows = {cells[0]: cells for cells in _rows(table)}
    assert rows["part"] == ["part", "int", "", "", "[0-1] 0, [2-3] 1", "differ in value"]
    assert rows["batch"][2] == "[0,2] (2, 3), [1,3] (3, 3)"
    assert rows["loss"] == ["loss", "Tensor float32", "()", "4 B", "0.5", "alike"]
    assert rows["double_it"][:5] == ["double_it", "function", "", "", "(value, times)"]
    notebook.picture(f"who-{theme.split()[-1].lower()}", first=-2)


def test_who_table_fits_700_pixels(notebook: Notebook) -> None:
    notebook.page.set_viewport_size({"width": 700, "height": 800})
    output = notebook.run("%dist_who").outputs
    table = output.locator("table").bounding_box()
    frame = output.bounding_box()
    assert table is not None
    assert frame is not None
    photograph(notebook, "who-700")
    assert table["width"] <= frame["width"], "its cells have more lines instead"


def _rows(table: Locator) -> list[list[str]]:
    return [
        [cell.strip() for cell in row.locator("td").all_inner_texts()]
        for row in table.locator("tbody tr").all()
    ]
