"""What people see: a notebook in JupyterLab in a real browser, with a mesh of four ranks."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import psutil
import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Notebook, Server, open_notebook
from tests.conftest import processes_of

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"
README = ROOT / "README.md"
SUM = "%%dist\nx = torch.ones(1, device=device)\ndist.all_reduce(x)\nx.item()"

SCALE = 1.5

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def notebook(notebook: Notebook) -> Notebook:
    """An empty notebook with a mesh of four ranks."""
    said = "\n".join(notebook.run("%dist_start 4", timeout_s=60).texts())
    assert re.fullmatch(r"4 ranks ready in \d+\.\d s: \S+ on \w+, mesh dp=4", said)
    return notebook


def test_ranks_that_say_the_same_are_folded(notebook: Notebook) -> None:
    # Ranks are told apart by what they say, and by when: the barrier is so that they say it
    # together.
    printed = notebook.run('%%dist\ndist.barrier()\nprint("hello")\nprint(f"rank {rank}")')
    assert printed.texts() == ["[0-3] hello\n[0-3] rank 0 … 3"]
    assert notebook.run("%%dist\nrank // 2").texts() == ["[0-1] 0\n[2-3] 1"]
    some_ranks = notebook.run(
        '%%dist --ranks 0,2-3\nimport sys\nprint("to stderr", file=sys.stderr)'
    )
    assert some_ranks.texts() == ["[0,2-3] to stderr"]
    expect(some_ranks.outputs).to_have_attribute("data-mime-type", "application/vnd.jupyter.stderr")
    notebook.picture("folded")


def test_a_thread_prints_into_the_cell_that_started_it(notebook: Notebook) -> None:
    first = notebook.run(
        "%%dist --ranks 1\n"
        "import threading\n"
        "go = threading.Event()\n"
        'thread = threading.Thread(target=lambda: (go.wait(30), print("from the thread")))\n'
        "thread.start()\n"
        'print("first cell")'
    )
    second = notebook.run('%%dist --ranks 1\nprint("second cell")\ngo.set()\nthread.join()')
    expect(first.outputs.last).to_contain_text("from the thread")
    assert "\n".join(first.texts()).split("\n") == ["[1] first cell", "[1] from the thread"]
    assert second.texts() == ["[1] second cell"]
    notebook.picture("thread")


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
    background = "element => getComputedStyle(element).backgroundColor"
    assert error.evaluate(background) != cell.outputs.first.evaluate(background)
    notebook.picture("error")


def test_rich_displays_are_labelled(notebook: Notebook) -> None:
    cell = notebook.run(
        "%%dist\n"
        "from IPython.display import HTML, display\n"
        "dist.barrier()\n"
        'display(HTML("<b>alike</b>"))\n'
        'display(HTML(f"<i>rank {rank}</i>"))'
    )
    assert cell.texts() == ["[0-3]\nalike", *(f"[{rank}]\nrank {rank}" for rank in range(4))]
    expect(cell.outputs.first.locator("b")).to_have_text("alike")

    plot = notebook.run(
        "%%dist --ranks 1\n"
        "import matplotlib.pyplot as plt\n"
        "figure, axes = plt.subplots(figsize=(3, 1))\n"
        "axes.plot([0, 1, 0])\n"
        "plt.show()"
    )
    assert plot.texts() == ["[1]"]
    picture = plot.outputs.locator("img")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100

    frame = notebook.run(
        '%%dist\nimport pandas as pd\ndist.barrier()\npd.DataFrame({"a": [1, 2], "b": [rank // 2] '
        "* 2})"
    )
    assert [text.split("\n")[0] for text in frame.texts()] == ["[0-1]", "[2-3]"]
    cells = frame.outputs.last.locator("tbody tr").last.locator("th, td")
    assert cells.all_inner_texts() == ["1", "2", "1"]
    notebook.picture("displays")


def test_progress_is_redrawn_in_one_line_for_all_ranks(notebook: Notebook) -> None:
    cell = notebook.run(
        "%%dist\n"
        "import sys, time\n"
        "for percent in range(0, 101, 5):\n"
        "    sys.stderr.write(f\"\\rrank {rank}: {percent}%|{'#' * (percent // 5):20}|\")\n"
        "    sys.stderr.flush()\n"
        "    time.sleep(0.02 * (1 + rank))\n"
        'sys.stderr.write("\\n")\n'
        "dist.barrier()\n"
        'print("done")'
    )
    notebook.picture("progress")
    lines = "\n".join(cell.texts()).split("\n")
    assert sorted(lines) == ["[0-3] done", f"[0-3] rank 0 … 3: 100%|{'#' * 20}|"]


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_tables(notebook: Notebook, theme: str) -> None:
    notebook.set_theme(theme)
    status = notebook.run("%dist_status").outputs.locator("table")
    headers = status.locator("th").all_inner_texts()
    assert [header.strip() for header in headers[:6]] == [
        "rank",
        "host",
        "pid",
        "device",
        "state",
        "memory",
    ]
    rows = status.locator("tbody tr")
    assert [row.split()[0] for row in rows.all_inner_texts()] == ["0", "1", "2", "3"]
    assert all("idle" in row for row in rows.all_inner_texts())

    notebook.run(
        "%%dist\nweight = torch.full((2, 3), 1.0 + (rank == 3))\nweight[0, 0] = float('nan')"
    )
    inspected = notebook.run("%dist_inspect weight").outputs
    expect(inspected).to_contain_text("replicas differ: ranks 0-2 ≠ 3")
    ranks = inspected.locator("tbody tr > :first-child").all_inner_texts()
    assert [text.strip() for text in ranks] == ["0-2", "3"]
    notebook.run("%dist_inspect [rank, device]")
    notebook.picture(f"tables-{theme.split()[-1].lower()}")


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_frames_of_libraries_open_on_a_click(notebook: Notebook, theme: str) -> None:
    notebook.set_theme(theme)
    defined = notebook.run("%%dist\ndef step(m, x):\n    return m(x).sum()")
    cell = notebook.run(
        "%%dist\nm = torch.nn.Sequential(torch.nn.Linear(2, 2))\nstep(m, torch.zeros(3))"
    )
    traceback, _, failure = cell.texts()
    assert traceback.startswith("[0-3]\n")
    assert re.search(r"\[\.\.\. \d+ frames of torch, to torch/nn/modules/linear\.py:", traceback)
    assert "site-packages" not in traceback
    where = f"(In[{defined.number()}] line 3, called at line 3)"
    assert failure.endswith(where)
    summary = cell.outputs.nth(1).locator("summary")
    expect(summary).to_have_text("the traceback with the frames of libraries")
    expect(cell.outputs.nth(1).locator("pre")).to_be_hidden()
    summary.click()
    expect(cell.outputs.nth(1).locator("pre")).to_contain_text("site-packages/torch/nn/modules")
    notebook.picture(f"traceback-{theme.split()[-1].lower()}")


def test_ranks_that_wait_for_one_that_raised_are_released(notebook: Notebook) -> None:
    cell = notebook.start('%%dist\nif rank == 0:\n    raise ValueError("gives up")\ndist.barrier()')
    expect(cell.outputs.last).to_contain_text("process groups rebuilt in", timeout=15_000)
    cell.wait_for_end()
    traceback, failure, _ = cell.texts()
    assert traceback.endswith("\nValueError: gives up")
    assert re.fullmatch(
        r"RankFailure: rank 0 raised ValueError: gives up \(line 3\); "
        r"ranks 1-3 waited in barrier at line 4 for \d+\.\d s and were released",
        failure,
    )
    notebook.picture("released")
    assert notebook.run("6 * 7").texts() == ["42"]
    assert notebook.run(SUM).texts() == ["[0-3] 4.0"]


def test_hanging_cell_shows_where_and_the_stop_button_ends_it(notebook: Notebook) -> None:
    cell = notebook.start("%%dist\nimport time\nif rank == 0:\n    time.sleep(600)\ndist.barrier()")
    expect(cell.outputs.last).to_have_text(
        re.compile(
            r"ranks 1-3 wait in barrier \(line 5\) \d+ s; rank 0 runs line 4: time\.sleep\s*"
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
    notebook.picture("stopped")
    assert notebook.run(SUM).texts() == ["[0-3] 4.0"]
    restarted = "\n".join(notebook.run("%dist_restart").texts())
    assert re.fullmatch(r"4 ranks ready in \d+\.\d s: .*", restarted)
    assert notebook.run(SUM).texts() == ["[0-3] 4.0"]


def test_quickstart_runs_in_jupyterlab(page: Page, server: Server) -> None:
    source = nbformat.read(QUICKSTART, as_version=4)
    code = [cell for cell in source.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    server.write("quickstart.ipynb", source)
    with open_notebook(page, server, "quickstart.ipynb") as notebook:
        notebook.run_all()
        for index in range(len(code)):
            notebook.cell(index).wait_for_end(timeout_s=60)
        expect(
            notebook.panel.locator('[data-mime-type="application/vnd.jupyter.error"]')
        ).to_have_count(0)
        ids = [cell.id for cell in code]
        (checked,) = notebook.cell(ids.index("check")).texts()
        assert re.match(r"\[[-,\d]+\] weights equal on 4 ranks; mean loss ", checked)
        expect(notebook.cell(ids.index("plot")).outputs.locator("img")).to_be_visible()
        notebook.picture("quickstart")


def test_the_ten_lines_of_the_readme(page: Page, server: Server) -> None:
    """They run as they stand there, and the README's picture is the one that is kept here."""
    section = README.read_text().partition("## The ten lines that matter")[2].partition("\n## ")[0]
    sources = re.findall(r"```python\n(.*?)\n```", section, re.DOTALL)
    assert sum(len(source.splitlines()) for source in sources) == 10
    with open_notebook(page, server, "readme.ipynb") as notebook:
        start, build, step, inspect = (notebook.run(source, 60) for source in sources)
        assert start.texts()[0].startswith("4 ranks ready in ")
        assert build.texts() == []
        assert re.match(r"\[0-3\] my loss: [\d.]+ … [\d.]+ \(rank 3\)", step.texts()[0])
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
        lives_on = "of this notebook, lives on for 30 min: 4 ranks,"
        assert lives_on in "\n".join(notebook.run("%load_ext cellmesh", timeout_s=60).texts())
        offered = "\n".join(notebook.run("%dist_start 4").texts())
        assert lives_on in offered
        assert "has it again with what its ranks hold" in offered
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
        notebook.picture("shut_down")
