"""What people see: a notebook in JupyterLab in a real browser, with a mesh of four ranks."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import psutil
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import Cell, Notebook, Server, open_notebook
from tests.conftest import processes_of

README = Path(__file__).resolve().parents[2] / "README.md"
SUM = "%%dist\nx = torch.ones(1, device=device)\ndist.all_reduce(x)\nx.item()"

SCALE = 1.5

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def notebook(notebook: Notebook) -> Notebook:
    """An empty notebook with a mesh of four ranks."""
    said = "\n".join(notebook.run("%dist_start 4", timeout_s=60).texts())
    assert re.fullmatch(r"4 ranks ready in \d+\.\d s: \S+ on \w+, mesh dp=4", said)
    return notebook


def test_an_error_of_one_rank_is_red_and_names_it(notebook: Notebook) -> None:
    cell = notebook.run(
        '%%dist\ndist.barrier()\nprint("fine")\nif rank == 2:\n    raise ValueError("odd")'
    )
    shown, traceback, failure = cell.texts()
    assert shown == "[0-3] fine"
    assert traceback.startswith("[2]\n")
    assert re.search(rf"Cell In\[{cell.number()}\], line 5\n", traceback)
    assert traceback.endswith("\nValueError: odd")
    assert failure == "RankFailure: rank 2 raised ValueError: odd (line 5); ranks 0-1,3 finished"
    error = cell.outputs.nth(1)
    expect(error).to_have_attribute("data-mime-type", "application/vnd.jupyter.stderr")
    expect(error.locator(".ansi-red-fg", has_text="ValueError").last).to_be_visible()

    failing = notebook.run("%%dist\ntorch.nn.Linear(2, 2)(torch.zeros(3))")
    assert "site-packages" not in failing.texts()[0]
    frames = failing.outputs.nth(1)
    expect(frames.locator("pre")).to_be_hidden()
    frames.locator("summary", has_text="the traceback with the frames of libraries").click()
    expect(frames.locator("pre")).to_contain_text("site-packages/torch/nn/modules")


def test_rich_displays_are_labelled(notebook: Notebook) -> None:
    cell = notebook.run(
        "%%dist\n"
        "from IPython.display import HTML, display\n"
        "dist.barrier()\n"
        'display(HTML("<b>alike</b>"))\n'
        'display(HTML(f"<i>rank {rank}</i>"))'
    )
    each = [text for rank in range(4) for text in (f"[{rank}]", f"rank {rank}")]
    assert cell.texts() == ["[0-3]", "alike", *each]
    expect(cell.outputs.nth(1).locator("b")).to_have_text("alike")
    plot = notebook.run(
        "%%dist --ranks 1\n"
        "import matplotlib.pyplot as plt\n"
        "figure, axes = plt.subplots(figsize=(3, 1))\n"
        "plt.show()"
    )
    assert plot.texts() == ["[1]"]
    picture = plot.outputs.locator("img")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100


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


def part_of(switch: Locator, title: str) -> Locator:
    return switch.locator("details").filter(
        has=switch.page.locator("summary", has_text=re.compile(f"^{title}$"))
    )


def test_one_ranks_output_also_in_an_untrusted_notebook(
    notebook: Notebook, page: Page, server: Server
) -> None:
    switch = notebook.run(SOURCE).root.locator(".cellmesh-ranks")
    assert switch.locator("summary").all_inner_texts() == ["0-1", "2", "3"]
    two, three = (part_of(switch, rank).locator("div").first for rank in ("2", "3"))
    expect(two).to_be_hidden()
    part_of(switch, "2").locator("summary").click()
    expect(two).to_be_visible()
    text = two.inner_text()
    assert text.startswith("step 1\nloss 1.5\n")
    assert "ValueError: odd <batch>" in text
    assert "   x  rank\n0  1     1\n1  2     1" in text

    page.keyboard.press("Tab")  # to rank 3's
    page.keyboard.press("Enter")
    expect(three).to_be_visible()
    expect(two).to_be_hidden()
    assert "</style><script>" in three.inner_text()
    assert page.title() != "broken"
    page.set_viewport_size({"width": 700, "height": 900})
    assert switch.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    notebook.picture("tabs")

    html = page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.model.cells.get(1).toJSON().outputs"
        ".map((each) => (each.data || {})['text/html'] || '').flat().join('')"
    )
    output = nbformat.v4.new_output("display_data", data={"text/html": html})
    code = nbformat.v4.new_code_cell("1", outputs=[output], execution_count=1)
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    copy = nbformat.v4.new_notebook(cells=[code], metadata={"kernelspec": kernel})
    server.write("untrusted.ipynb", copy)
    with open_notebook(page, server, "untrusted.ipynb") as other:
        switch = other.panel.locator(".cellmesh-ranks")
        expect(switch.locator("style")).to_have_count(0)
        shown = part_of(switch, "2").locator("div").first
        expect(shown).to_be_hidden()
        part_of(switch, "2").locator("summary").click()
        expect(shown).to_contain_text("ValueError: odd <batch>")


def filled(cell: Cell) -> float:
    """The part of a progress bar that is full."""
    track = cell.root.locator('.jp-OutputArea-output span[style*="width:120px"]').first
    whole, part = track.bounding_box(), track.locator("span").first.bounding_box()
    assert whole is not None
    assert part is not None
    return part["width"] / whole["width"]


def test_a_bar_is_one_for_the_mesh(notebook: Notebook, server: Server) -> None:
    running = notebook.start(
        "%%dist\n"
        "import time\nfrom pathlib import Path\nfrom tqdm.auto import tqdm\n"
        "with tqdm(total=100, desc='<b>train</b>', postfix={'loss': 0.3}) as bar:\n"
        "    bar.update(42 if rank == 3 else 55 + rank); bar.refresh()\n"
        "    while not Path('go_on').exists(): time.sleep(0.01)\n"
        "    if rank == 2: raise ValueError('no')\n"
        "    bar.update(100 - bar.n)"
    )
    output = running.root.locator(".jp-OutputArea-output").first
    expect(output).to_contain_text("rank 3 slowest")
    expect(output).to_contain_text("<b>train</b>")  # and not bold
    expect(output).to_contain_text("42-57/100")
    assert filled(running) == pytest.approx(0.42, abs=0.01)
    notebook.picture("progress")
    (server.notebooks / "go_on").touch()
    running.wait_for_end()
    expect(output).to_contain_text("57-100/100")
    expect(output.locator('span[style*="#8b8b8b"]').first).to_be_visible()


# The titles of the elements below the pointer, along a rank's row of the timeline.
TITLES = """image => {
  const { left, top, width } = image.getBoundingClientRect();
  const rows = document.querySelectorAll("map area");
  const heights = new Set([...rows].map((area) => area.coords.split(",")[1]));
  return [...heights].map((height) => [...Array(40).keys()].map((step) => {
    const found = document.elementFromPoint(left + (step / 40) * width, top + Number(height) + 4);
    return found?.title ?? "";
  }));
}"""


def test_a_timeline_with_titles_shows_who_waited(notebook: Notebook) -> None:
    notebook.run(
        "%%dist\nimport time\nif rank == 1:\n    time.sleep(0.3)\ndist.all_reduce(torch.ones(1000))"
    )
    shown = notebook.run("%dist_timeline")
    expect(shown.root).to_contain_text("rank 1 was last in")
    picture = shown.root.locator("img.cellmesh-timeline")
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("image => image.naturalWidth") == 800
    rows = [" ".join(titles) for titles in picture.evaluate(TITLES)]
    for rank in (0, 2, 3):
        (row,) = (text for text in rows if f"rank {rank}: all_reduce, " in text)
        assert "of it waiting for rank 1" in row, row
    notebook.picture("timeline", 2, 2)


def type_cell(notebook: Notebook, source: str) -> Locator:
    """Replace the text of the last cell."""
    editor = notebook.cells.last.locator(".cm-content")
    editor.click()
    notebook.page.keyboard.press("Control+A")
    notebook.page.keyboard.press("Delete")
    notebook.page.keyboard.insert_text(source)
    expect(editor).to_contain_text(source.rpartition("\n")[2])
    return editor


def test_tab_and_shift_tab_show_names_of_the_ranks(notebook: Notebook) -> None:
    # A loaded machine takes its time, and its length is not tested here.
    notebook.run("from cellmesh.magics import completion\ncompletion._WAIT_S = 10")
    notebook.run(
        "%%dist\nnet_of_ranks = torch.nn.ModuleList([torch.nn.Linear(2, 3)])\n"
        "net_of_nobody = net_of_ranks\n"
        'def double_it(value):\n    "as many times as one likes"'
    )
    items = notebook.page.locator(".jp-Completer:visible .jp-Completer-item")
    matches = items.locator("code.jp-Completer-match")
    type_cell(notebook, "%%dist\nnet_of")
    notebook.page.keyboard.press("Tab")
    expect(matches).to_have_text(["net_of_nobody", "net_of_ranks"], timeout=20_000)
    notebook.page.keyboard.press("Escape")

    editor = type_cell(notebook, "%%dist\nnet_of_ranks[0].weig")
    notebook.page.keyboard.press("Tab")
    expect(matches).to_have_text(["weight"], timeout=20_000)
    notebook.page.keyboard.press("Tab")
    expect(editor).to_contain_text("net_of_ranks[0].weight")

    type_cell(notebook, "%%dist\ndouble_it(")
    notebook.page.keyboard.press("Shift+Tab")
    tooltip = notebook.page.locator(".jp-Tooltip")
    expect(tooltip).to_contain_text("as many times as one likes", timeout=20_000)
    notebook.page.keyboard.press("Escape")


def type_answer(notebook: Notebook, prompt: str, text: str) -> None:
    """Type into the input box that shows this prompt."""
    box = notebook.panel.locator(".jp-Stdin:has(.jp-Stdin-input)")
    expect(box).to_contain_text(prompt.strip(), timeout=20_000)
    field = box.locator(".jp-Stdin-input")
    # The next question has a box of its own.
    field.evaluate("field => { field.dataset.answered = 'yes' }")
    field.fill(text)
    field.press("Enter")
    expect(notebook.panel.locator(".jp-Stdin-input[data-answered]")).to_have_count(0)


def test_a_breakpoint_is_typed_into_the_notebooks_own_box(notebook: Notebook) -> None:
    cell = notebook.start(
        "%%dist\n"
        "def scale(x):\n"
        "    factor = 10 * rank\n"
        "    breakpoint()\n"
        "    return factor * x\n"
        "y = scale(torch.ones(1)) if rank == 2 else torch.zeros(1)\n"
        "dist.all_reduce(y)\n"
        "y.item()"
    )
    type_answer(notebook, "[2] (Pdb) ", "p factor")
    expect(cell.root).to_contain_text("[2] 20")
    expect(cell.root).to_contain_text("----> 5     return factor * x")
    expect(notebook.panel.locator(".jp-Stdin-input")).to_have_count(1)
    type_answer(notebook, "[2] (Pdb) ", "c")
    cell.wait_for_end()
    assert cell.texts()[-1].endswith("[0-3] 20.0")


def test_hanging_cell_shows_where_and_the_stop_button_ends_it(notebook: Notebook) -> None:
    cell = notebook.start("%%dist\nimport time\nif rank == 0:\n    time.sleep(600)\ndist.barrier()")
    expect(cell.outputs.last).to_have_text(
        re.compile(
            r"ranks 1-3 in barrier at line 5 for \d+ s; rank 0 running time\.sleep at line 4\s*"
        ),
        timeout=20_000,
    )
    notebook.picture("waiting")
    notebook.press_stop()
    cell.wait_for_end()
    assert (
        "RanksInterrupted: rank 0 raised KeyboardInterrupt: interrupted in time.sleep (line 4); "
        "ranks 1-3 raised KeyboardInterrupt: interrupted in barrier (line 5)"
    ) in cell.texts()
    assert notebook.run(SUM).texts() == ["[0-3] 4.0"]


def test_the_ten_lines_of_the_readme(page: Page, server: Server) -> None:
    """They run as they stand there, and the README's picture is the one that is kept here."""
    section = README.read_text().partition("## The ten lines that matter")[2].partition("\n## ")[0]
    sources = re.findall(r"```python\n(.*?)\n```", section, re.DOTALL)
    assert sum(len(source.splitlines()) for source in sources) == 10
    with open_notebook(page, server, "readme.ipynb") as notebook:
        start, build, step, inspect = (notebook.run(source, 60) for source in sources)
        assert start.texts()[0].startswith("4 ranks ready in ")
        assert build.texts() == []
        assert re.match(r"\[0-3\] my loss: [\d.]+ … [\d.]+ \(rank \d\)", step.texts()[0])
        expect(inspect.outputs).to_contain_text("replicas are equal, bit for bit")
        assert len(inspect.outputs.locator("tbody tr").all()) == 1
        waiting = notebook.start(
            '%%dist\nif rank == 2:\n    raise ValueError("odd batch")\ndist.barrier()'
        )
        expect(waiting.outputs.last).to_contain_text("process groups rebuilt in", timeout=15_000)
        waiting.wait_for_end()
        assert notebook.run(sources[2]).texts() != [], "the model steps on"
        notebook.picture("readme", last=len(sources) + 1)


def test_restart_leaves_the_mesh_and_shut_down_ends_it(page: Page, server: Server) -> None:
    before = processes_of(server.runtime)
    with open_notebook(page, server, "restart.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 4", timeout_s=60)
        notebook.run("%%dist\nkept = rank")
        notebook.command("kernelmenu:restart")
        notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
        notebook.wait_for_kernel()
        lives_on = "held by nobody, and lives on for 30 min"
        assert lives_on in "\n".join(notebook.run("%load_ext cellmesh", timeout_s=60).texts())
        attached = notebook.run("%dist_attach", timeout_s=60)
        assert "4 ranks (dp=4), ready" in "\n".join(attached.texts())
        assert notebook.run("%%dist\nprint(kept)").texts() == ["[0-3] 0 … 3"]
        ended = [
            each
            for each in processes_of(server.runtime)
            if each.name().startswith("cellmesh-") and each not in before
        ]
        # The guardian, the agent, the zygote, the store, four ranks; a zygote for the next mesh.
        assert len(ended) == 9
        notebook.command("kernelmenu:shutdown")
        _, running = psutil.wait_procs(ended, timeout=20)
        assert running == []
        assert list(server.runtime.glob("cellmesh/*")) == []
