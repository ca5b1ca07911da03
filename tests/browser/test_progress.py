"""Progress bars in JupyterLab: one for all ranks, as long as the slowest has come."""

from __future__ import annotations

from collections.abc import Iterator

import nbformat
import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import PICTURES, Cell, Notebook, Server, open_notebook

pytestmark = pytest.mark.timeout(240)

MANY = """
from cellmesh.controller.output.bars import Bars, as_html, make_row
from cellmesh.wire.messages import Bar
from IPython.display import HTML, display
def bar(rank, title, state="open", outer=0):
    done = 100.0 if state == "done" else 40.0 + (rank * 7) % 50
    return Bar(1, 1, title, done, 100.0, 33.0, rate=12.0, note=f"loss={rank / 100:.2f}",
               state="stopped" if state == "failed" and rank != 7 else state, num_outer=outer)
rows = [make_row(n, {r: bar(r, title, state, outer) for r in range(64)}, {})
        for n, (title, state, outer) in enumerate(
            [("epoch", "open", 0), ("a rather long title of a bar", "done", 1),
             ("batch", "failed", 1)])]
display(HTML(as_html(Bars(0, tuple(rows), 92))))
"""


SCALE = 2


@pytest.fixture
def notebook(page: Page, server: Server) -> Iterator[Notebook]:
    with open_notebook(page, server, "progress.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 4", 60)
        notebook.run(
            "%%dist\nimport time\nfrom pathlib import Path\nfrom tqdm.auto import tqdm, trange"
        )
        yield notebook


def filled(cell: Cell, row: int = 0) -> float:
    """The part of a row's bar that is full."""
    track = cell.root.locator('.jp-OutputArea-output span[style*="width:120px"]').nth(row)
    whole, part = track.bounding_box(), track.locator("span").first.bounding_box()
    assert whole is not None
    assert part is not None
    return part["width"] / whole["width"]


def test_bars_are_one_for_the_mesh(notebook: Notebook, server: Server, page: Page) -> None:
    done = notebook.run(
        "%%dist\n"
        "print('before')\ndist.barrier()\n"
        "for epoch in trange(2, desc='epoch'):\n"
        "    for i in (bar := tqdm(range(40), desc=f'batches of {epoch}')):\n"
        "        time.sleep(0.002)\n        bar.set_postfix(loss=1 / (1 + i + epoch + rank / 10))\n"
        "dist.barrier()\nprint('after')"
    )
    texts = done.texts()
    assert texts[0] == "[0-3] before"
    assert "[0-3] after" in texts[-1]
    for words in ("epoch", "batches of 0", "batches of 1", "2/2", "40/40", "100 %", "loss=0.02"):
        assert words in texts[1]
    assert filled(done) == pytest.approx(1, abs=0.01)

    running = notebook.start(
        "%%dist\n"
        "with tqdm(total=100, desc='train', postfix={'loss': 0.3}) as bar:\n"
        "    bar.update(42 if rank == 3 else 55 + rank); bar.refresh()\n"
        "    while not Path('go_on').exists(): time.sleep(0.01)\n"
        "    bar.update(100 - bar.n)"
    )
    expect(running.root.locator(".jp-OutputArea-output").first).to_contain_text("rank 3 slowest")
    expect(running.root.locator(".jp-OutputArea-output").first).to_contain_text("42-57/100")
    assert filled(running) == pytest.approx(0.42, abs=0.01)
    notebook.picture("progress-running", 2)
    (server.notebooks / "go_on").touch()
    running.wait_for_end()
    expect(running.root.locator(".jp-OutputArea-output").first).to_contain_text("100/100")
    assert filled(running) == pytest.approx(1, abs=0.01)

    failed = notebook.run(
        "%%dist\nfor i in tqdm(range(100), desc='<b>fails</b>'):\n"
        "    if i == 60 and rank == 2: raise ValueError('no')\n"
        "    if i == 80: break\n"
        "dist.barrier()"
    )
    bar = failed.root.locator(".jp-OutputArea-output", has_text="%").first
    expect(bar).to_contain_text("<b>fails</b>")  # and not bold
    expect(bar).to_contain_text("60-80/100")
    expect(bar.locator('span[style*="#e5484d"]', has_text="rank 2 failed").first).to_be_visible()

    many = notebook.run(MANY)
    for theme, kind in (("JupyterLab Light", "light"), ("JupyterLab Dark", "dark")):
        notebook.set_theme(theme)
        notebook.picture(f"progress-{kind}", 2)
    page.set_viewport_size({"width": 700, "height": 900})
    for cell in (done, failed, many):
        output = cell.root.locator(".jp-OutputArea-output").first
        assert output.evaluate("element => element.scrollWidth <= element.clientWidth + 1")
    many.root.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / "progress-700-dark.png")
    notebook.set_theme("JupyterLab Light")
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)
    page.screenshot(path=PICTURES / "progress-700-light.png")

    # What is saved is the last state, and a notebook that is not trusted shows the same.
    notebook.save()
    saved = nbformat.read(server.notebooks / "progress.ipynb", as_version=4)
    saved.cells[-1]["source"] = "# so that it is another notebook"
    server.write("untrusted.ipynb", saved)
    with open_notebook(page, server, "untrusted.ipynb") as other:
        kept = other.cell(3)
        expect(kept.root.locator(".jp-OutputArea-output")).to_contain_text("100/100")
        assert filled(kept) == pytest.approx(1, abs=0.01)
        other.picture("progress-untrusted", 2)
