"""The timeline in JupyterLab: a picture whose bars have titles, and tables."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Server, open_notebook

pytestmark = pytest.mark.timeout(240)

# The titles of the elements below the pointer, along a rank's row.
TITLES = """image => {
  const { left, top, width } = image.getBoundingClientRect();
  const rows = document.querySelectorAll("map area");
  const heights = new Set([...rows].map((area) => area.coords.split(",")[1]));
  return [...heights].map((height) => [...Array(40).keys()].map((step) => {
    const found = document.elementFromPoint(left + (step / 40) * width, top + Number(height) + 4);
    return found?.title ?? "";
  }));
}"""


def test_a_picture_with_titles_shows_who_waited(page: Page, server: Server) -> None:
    with open_notebook(page, server, "timeline.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 4", 60)
        empty = notebook.run("%dist_timeline")
        expect(empty.root).to_contain_text("no cell has run on the ranks yet")
        notebook.run(
            "%%dist\nimport time\nif rank == 1:\n    time.sleep(0.3)\n"
            "dist.all_reduce(torch.ones(1000))"
        )
        shown = notebook.run("%dist_timeline")
        expect(shown.root).to_contain_text("rank 1 was last in")
        expect(shown.root).to_contain_text("rank 1, waited for ")
        picture = shown.root.locator("img.cellmesh-timeline")
        picture.scroll_into_view_if_needed()
        assert picture.evaluate("image => image.naturalWidth") == 800
        rows = [" ".join(titles) for titles in picture.evaluate(TITLES)]
        for rank in (0, 2, 3):
            (row,) = (text for text in rows if f"rank {rank}: all_reduce, " in text)
            assert "of it waiting for rank 1" in row, row
        notebook.picture("timeline-light", 3, 3)
        notebook.set_theme("JupyterLab Dark")
        notebook.picture("timeline-dark", 3, 3)
