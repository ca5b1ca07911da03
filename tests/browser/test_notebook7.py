"""Notebook 7: the same cells and widgets as in JupyterLab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import NOTEBOOK, Notebook, Server, open_notebook, serve

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(NOTEBOOK) as server:
        yield server


@pytest.fixture
def notebook(page: Page, server: Server) -> Iterator[Notebook]:
    with open_notebook(page, server, "seven.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 2", timeout_s=60)
        yield notebook


def test_cells_and_widgets(notebook: Notebook) -> None:
    assert notebook.run("%%dist\nrank").texts() == ["[0] 0\n[1] 1"]
    notebook.run(
        "%%dist\nimport cellmesh as cm\nfor step in range(20):\n    cm.log(loss=step * (rank + "
        "1), step=step)"
    )
    plot = notebook.run("%dist_plot loss")
    panel = plot.root.locator(".cm-panel")
    expect(panel).to_have_attribute("aria-label", "loss by step: ranks 0, 1; 40 points")
    plot.root.get_by_role("button", name="rank 0").click()
    expect(panel).to_have_attribute("aria-label", "loss by step: ranks 1; 20 points")
    notebook.picture("notebook7")
