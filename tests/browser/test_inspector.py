"""The tensor inspector in JupyterLab, on real ranks."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import Cell, Notebook, Server

pytestmark = pytest.mark.timeout(300)


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


def value_at(notebook: Notebook, root: Locator, x: float, y: float) -> tuple[tuple[int, ...], str]:
    """What is told of the element at a place of the canvas: its index in the whole, and its
    value.
    """
    root.locator("canvas").scroll_into_view_if_needed()
    box = root.locator("canvas").bounding_box()
    assert box is not None
    notebook.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=2)
    value = root.locator(".cmi-value[data-final=true]")
    expect(value).to_be_visible()
    index = tuple(map(int, (value.get_attribute("data-whole") or "").split(",")))
    return index, value.get_attribute("data-value") or ""


def truth(notebook: Notebook, expression: str, rank: int) -> str:
    """What the rank itself says."""
    (said,) = notebook.run(f"%%dist --ranks {rank}\nprint({expression})").texts()
    return said.removeprefix(f"[{rank}] ")


def test_the_inspector_shows_what_ranks_hold(notebook: Notebook, server: Server) -> None:
    notebook.run("%dist_start 2", 60)
    notebook.run(
        "%%dist\n"
        "torch.manual_seed(0)\n"
        "w = torch.randn(900, 1300, dtype=torch.float64) + rank\n"
        "w[5, 7] = float('nan')"
    )
    root = opened(notebook.run("%dist_inspect w --watch"))
    rows = root.locator("[data-tab=overview] tr[data-ranks]")
    assert [row.get_attribute("data-ranks") for row in rows.all()] == ["0", "1"]
    expect(rows.first.locator("[data-key=NaN]")).to_have_text("1")
    expect(root).to_contain_text("replicas differ: ranks 0 ≠ 1")

    canvas = open_heatmap(root)
    index, value = value_at(notebook, root, 0.4013, 0.3017)
    assert value == truth(notebook, f"w[{index}].item()", 0)

    canvas.click(position={"x": 200, "y": 120})
    count = canvas.get_attribute("data-shown") or ""
    notebook.page.mouse.wheel(0, -600)
    expect(canvas).not_to_have_attribute("data-shown", count)
    index, value = value_at(notebook, root, 0.6013, 0.7017)
    assert value == truth(notebook, f"w[{index}].item()", 0)

    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    count = canvas.get_attribute("data-shown") or ""
    notebook.page.mouse.move(box["x"] + 300, box["y"] + 200)
    notebook.page.mouse.down()
    notebook.page.mouse.move(box["x"] + 200, box["y"] + 120, steps=5)
    notebook.page.mouse.up()
    expect(canvas).not_to_have_attribute("data-shown", count)
    index, value = value_at(notebook, root, 0.3013, 0.2017)
    assert value == truth(notebook, f"w[{index}].item()", 0)
    notebook.picture("inspector", first=2, last=2)

    root.get_by_label("rank", exact=True).select_option("1")
    index, value = value_at(notebook, root, 0.5013, 0.4017)
    assert value == truth(notebook, f"w[{index}].item()", 1)
    root.get_by_label("minus").select_option("0")
    index, value = value_at(notebook, root, 0.5513, 0.4517)
    assert float(value.split()[0]) == pytest.approx(1.0)

    # --watch: the next cell changes it
    root.get_by_role("tab", name="Overview").click()
    notebook.run("%%dist\nw.fill_(41 + rank)")
    root.scroll_into_view_if_needed()  # what nobody sees is looked at again once somebody does
    expect(rows.nth(1).locator("[data-key=max]")).to_have_text("42")
    expect(rows.nth(0).locator("[data-key=NaN]")).to_have_text("0")

    # --follow: while a cell runs, without stopping it
    root.get_by_role("button", name="Look again each second while a cell runs").click()
    running = notebook.start(
        "%%dist\n"
        "import os, time\n"
        "w.fill_(77 + rank)\n"
        "while not os.path.exists('go-on'):\n"
        "    time.sleep(0.05)\n"
        "w.fill_(99 + rank)"
    )
    root.scroll_into_view_if_needed()
    expect(rows.nth(1).locator("[data-key=max]")).to_have_text("78", timeout=20_000)
    expect(root.locator(".cmi-notice")).to_contain_text("values may be torn")
    expect(running.root.locator(".jp-InputPrompt")).to_have_text("[*]:")
    (server.notebooks / "go-on").touch()
    running.wait_for_end()
    root.scroll_into_view_if_needed()
    expect(rows.nth(1).locator("[data-key=max]")).to_have_text("100")
    expect(root.locator(".cmi-notice")).to_be_hidden()

    # names from users are no HTML
    evil = "<img src=x onerror='window.stolen = 1'>"
    notebook.run(f'%%dist\nnest = {{"{evil}": torch.ones(2), "b": torch.ones(3)}}')
    odd = opened(notebook.run("mesh.inspect('nest')"))
    expect(odd.locator(".cmi-panel[data-tab=overview]")).to_contain_text("<img src=x")
    assert notebook.page.evaluate("window.stolen") is None

    # the mesh ends: what was seen stays
    notebook.run("%dist_stop")
    first = notebook.cell(2)
    expect(first.root).to_contain_text("has ended (stopped)")
    expect(first.outputs.locator("table").first).to_contain_text("100")
    expect(first.outputs.locator("canvas")).to_have_count(0)
    notebook.picture("inspector-ended", first=2, last=2)


def test_shards_of_a_dtensor(notebook: Notebook) -> None:
    notebook.set_theme("JupyterLab Dark")
    notebook.run("%dist_start 4 --mesh dp=2,tp=2", 60)
    notebook.run(
        "%%dist\n"
        "from torch.distributed.tensor import Replicate, Shard, distribute_tensor\n"
        "whole = torch.arange(7 * 5.0).reshape(7, 5)\n"
        "d = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])\n"
        "model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 2))\n"
        "model(whole).square().mean().backward()\n"
        "if rank == 3:\n    model[1].bias.grad.zero_()",
        60,
    )
    root = opened(notebook.run("%dist_inspect d"))
    root.get_by_role("tab", name="Shards").click()
    blocks = root.locator(".cmi-block")
    assert [block.get_attribute("title") for block in blocks.all()] == [
        "ranks 0,2: [0:4, 0:5], (4, 5), tp=0, opens the heatmap",
        "ranks 1,3: [4:7, 0:5], (3, 5), tp=1, opens the heatmap",
    ]
    notebook.picture("inspector-lab-shards", first=2, last=2)
    blocks.nth(1).click()
    expect(root.get_by_label("rank", exact=True)).to_have_value("1")
    canvas = root.locator("canvas")
    expect(canvas).to_have_attribute("data-shown", re.compile(r"\d+"))
    canvas.scroll_into_view_if_needed()
    index, value = value_at(notebook, root, 0.97, 0.97)
    assert index == (6, 4)
    assert float(value) == 34.0
    notebook.picture("inspector-lab-heatmap", first=2, last=2)

    grads = opened(notebook.run("%dist_inspect model --grads"))
    row = grads.locator("tr[data-name='1.bias.grad']")
    expect(row).to_contain_text("unequal")
    notebook.picture("inspector-lab-gradients", first=3, last=3)
    notebook.run("%dist_stop")
