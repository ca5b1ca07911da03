"""The timeline in JupyterLab: who was late, what is drawn where, and the trace that it gives
away.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import Cell, Notebook, Server, open_notebook

pytestmark = pytest.mark.timeout(240)

# 64 ranks, of which one is late: 40 steps of a millisecond.
MANY_RANKS = """
from array import array
from cellmesh.magics.widgets.base.widget import LiveView
from cellmesh.magics.widgets.timeline.timeline import TimelineWidget, pack, static_of
from cellmesh.controller.trace.timeline import merge
from cellmesh.wire.trace import CellSpan, Operations, Past, What
whats = tuple(What(name, "0", (), 0) for name in ("all_reduce", "all_gather_into_tensor"))
def past(rank):
    begins, ends, waits = array("d"), array("d"), array("d")
    for step in range(80):
        begin = 100 + step * 1e-3 + (7e-4 if rank == 37 else 2e-4 + rank * 3e-6)
        begins.append(begin); ends.append(100 + step * 1e-3 + 9e-4)
        waits.append(begin if step % 2 == 0 else float("nan"))
    count = range(1, 81)
    cells = (CellSpan(1, "", 5, 100.0, 100.04), CellSpan(2, "train_step", 0, 100.04, 100.08))
    operations = Operations(
        whats, array("i", [n % 2 for n in range(80)]), array("q", count), array("i", [-1] * 80),
        array("q", [1] * 40 + [2] * 40), begins, ends, waits)
    return Past(cells, operations, 0, 90.0, 101.0)
history = merge({rank: past(rank) for rank in range(64)}, {}, 5)
LiveView(TimelineWidget(**pack(history, [])), lambda: static_of(history, []))
"""


@pytest.fixture
def notebook(page: Page, server: Server) -> Iterator[Notebook]:
    with open_notebook(page, server, "timeline.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 4", 60)
        yield notebook


def root_of(cell: Cell) -> Locator:
    return cell.root.locator(".cm-timeline")


def range_of(root: Locator) -> tuple[float, float]:
    return float(root.get_attribute("data-from") or -1), float(root.get_attribute("data-to") or -1)


def seconds(text: str) -> float:
    """``305 ms`` as 0.305."""
    number, _, unit = text.partition(" ")
    return float(number) * {"": 0, "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}[unit]


def column(table: Locator, name: str) -> list[str]:
    return table.locator(f'td[data-column="{name}"]').all_inner_texts()


def hover(notebook: Notebook, root: Locator, rank: int, at_us: float) -> Locator:
    """Point at a time of a rank."""
    rows = root.locator(".cm-rows canvas")
    label = root.locator(f'.cm-label[data-rank="{rank}"]')
    rows.scroll_into_view_if_needed()
    box, place = rows.bounding_box(), label.bounding_box()
    assert box is not None
    assert place is not None
    begin, end = range_of(root)
    notebook.page.mouse.move(
        box["x"] + (at_us - begin) / (end - begin) * box["width"], place["y"] + place["height"] / 2
    )
    return root.locator(".cm-tip")


def test_timeline_shows_the_straggler_and_the_waits_of_the_others(notebook: Notebook) -> None:
    empty = notebook.run("%dist_timeline")
    expect(root_of(empty)).to_contain_text("no cell has run on the ranks yet")
    notebook.run("%%dist\nimport time\nx = torch.ones(1000)\ndist.barrier()")
    notebook.run(
        "%%dist\nif rank == 1:\n    time.sleep(0.3)\ndist.all_reduce(x)\nwork = "
        "dist.all_reduce(x, async_op=True)\ny = sum(range(200_000))\nwork.wait()\nprint('done')"
    )
    root = root_of(notebook.run("%dist_timeline"))
    expect(root).to_have_attribute("data-straggler", "1")
    expect(root.locator(".cm-sentence")).to_contain_text("rank 1 was last in")
    expect(root.locator('.cm-label[data-straggler="true"]')).to_have_text("rank 1straggler")
    cells = root.locator(".cm-tables > table")
    assert column(cells, "cell") == ["In[3]", "In[4]"]
    assert column(cells, "straggler")[1].startswith("rank 1, waited for ")
    root.locator("summary").click()
    by_rank = root.locator(".cm-by-rank table")
    waiting = [seconds(text) for text in column(by_rank, "waiting")]
    assert all(waiting[rank] >= 0.25 for rank in (0, 2, 3)), waiting
    assert waiting[1] < 0.25

    # What is drawn: rank 0 in the all_reduce while rank 1 computes.
    begin, end = range_of(root)
    root.get_by_role("button", name="show In[4] alone").click()
    near, far = range_of(root)
    assert begin < near
    assert far - near < end - begin
    middle = (near + far) / 2
    tip = hover(notebook, root, 0, middle)
    expect(tip).to_contain_text("all_reduce, ")
    expect(tip).to_contain_text("of it for rank 1")
    expect(tip).to_contain_text("rank 0, group 0 (all ranks), In[4]")
    expect(hover(notebook, root, 1, middle)).to_contain_text("compute, ")
    notebook.picture("timeline-light", 4, 4)

    with notebook.page.expect_download() as waited:
        root.get_by_role("button", name="download it as a Chrome trace").click()
    assert waited.value.suggested_filename == "timeline.json"
    events = json.loads(waited.value.path().read_text())["traceEvents"]
    for rank in range(4):
        ours = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        reduces = [event for event in ours if event["name"] == "all_reduce"]
        assert [event["args"]["cell"] for event in reduces] == ["In[4]", "In[4]"]
        assert (reduces[0]["args"]["waited_us"] >= 250_000) == (rank != 1)
        assert {"In[3]", "In[4]", "compute"} <= {event["name"] for event in ours}

    notebook.set_theme("JupyterLab Dark")
    notebook.picture("timeline-dark", 4, 4)


def test_timeline_is_zoomed_moved_and_highlighted(notebook: Notebook) -> None:
    notebook.run(
        "%%dist\nfor _ in range(20):\n    dist.all_reduce(torch.ones(10))\n    dist.barrier()"
    )
    cell = notebook.run("%dist_timeline")
    root, page = root_of(cell), notebook.page
    whole = range_of(root)
    canvas = root.locator(".cm-rows canvas")
    root.get_by_role("button", name="zoom in").click()
    begin, end = range_of(root)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2)

    canvas.hover()
    page.mouse.wheel(0, -200)  # the page's, as nobody has clicked there
    assert range_of(root) == (begin, end)
    canvas.click()
    page.mouse.wheel(0, -200)
    expect(root).not_to_have_attribute("data-to", str(end))
    begin, end = range_of(root)

    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 300, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 10)
    page.mouse.up()
    moved, _ = range_of(root)
    assert moved - begin == pytest.approx((end - begin) * 100 / box["width"], rel=0.02)

    page.keyboard.press("ArrowLeft")
    assert range_of(root)[0] < moved
    page.keyboard.press("0")
    page.keyboard.press("0")  # which would restart the kernel elsewhere in the notebook
    assert range_of(root) == whole
    page.keyboard.press("ArrowDown")
    expect(root.locator('.cm-label[data-chosen="true"]')).to_have_attribute("data-rank", "0")
    expect(root.locator(".cm-tip")).to_contain_text("all_reduce, ")
    page.keyboard.press("n")
    expect(root.locator(".cm-tip")).to_contain_text("barrier, ")
    expect(notebook.page.locator(".jp-Dialog")).to_have_count(0)

    legend = root.locator('.cm-legend button[data-name="barrier"]')
    before = canvas.screenshot()
    legend.press("Enter")
    expect(legend).to_have_attribute("aria-pressed", "true")
    expect(root).to_have_attribute("data-highlighted", "barrier")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    assert canvas.screenshot() != before
    notebook.picture("timeline-highlighted", 2, 2)

    # Asked again, it has the new cell; when the mesh ends, a picture is left.
    notebook.run("%%dist\ndist.broadcast(torch.ones(3), 0)")
    root.get_by_role("button", name="ask the ranks what they have done since").click()
    expect(root.locator(".cm-tables > table tbody tr")).to_have_count(2)
    expect(root.locator('.cm-legend button[data-name="broadcast"]')).to_be_visible()
    notebook.run("%dist_stop")
    expect(cell.root).to_contain_text("has ended (stopped)")
    expect(cell.root.locator("img.cellmesh-timeline")).to_be_visible()
    expect(root).to_have_count(0)
    notebook.picture("timeline-static", 2, 2)


def test_running_cell_shows_ranks_missing_from_a_collective(
    notebook: Notebook, server: Server
) -> None:
    running = notebook.start(
        "%%dist --nowait\nimport time\nfrom pathlib import Path\n"
        "while rank == 2 and not Path('go_on').exists():\n    time.sleep(0.01)\n"
        "dist.all_reduce(torch.ones(1))"
    )
    running.wait_for_end()
    root = root_of(notebook.run("%dist_timeline"))
    update = root.get_by_role("button", name="ask the ranks what they have done since")
    sentence = root.locator(".cm-sentence")
    for _ in range(20):  # the ranks may only just have begun
        if "rank 2 has not begun 1 collective" in "\n".join(sentence.all_inner_texts()):
            break
        update.click()
        expect(update).to_be_enabled()
    expect(sentence).to_contain_text("rank 2 has not begun 1 collective that others waited in")
    expect(root.locator(".cm-tables > table")).to_contain_text("(runs)")
    expect(hover(notebook, root, 0, range_of(root)[1] * 0.9)).to_contain_text(
        "all_reduce, goes on for"
    )
    (server.notebooks / "go_on").touch()


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_64_ranks_and_a_narrow_page(page: Page, server: Server, theme: str) -> None:
    kind = theme.split()[-1].lower()
    with open_notebook(page, server, f"timeline-{kind}.ipynb") as notebook:
        notebook.set_theme(theme)
        cell = notebook.run(MANY_RANKS.strip(), 60)
        root = root_of(cell)
        expect(root.locator(".cm-label")).to_have_count(64, timeout=20_000)
        expect(root).to_have_attribute("data-straggler", "37")
        expect(root.locator('.cm-label[data-rank="37"]')).to_be_in_viewport()
        _, end = range_of(root)
        expect(hover(notebook, root, 37, 0.75e3)).to_contain_text("was last")
        assert end == pytest.approx(80_000)
        notebook.picture(f"timeline-64-{kind}", 0, 0)
        notebook.page.set_viewport_size({"width": 700, "height": 900})
        expect(root.locator(".cm-frame")).to_be_visible()
        widths = root.evaluate("node => [node.scrollWidth, node.clientWidth]")
        assert widths[0] <= widths[1]
        root.screenshot(path=_picture(f"timeline-700-{kind}"))


def _picture(name: str) -> str:
    from tests.browser.lab import PICTURES

    PICTURES.mkdir(parents=True, exist_ok=True)
    return str(PICTURES / f"{name}.png")
