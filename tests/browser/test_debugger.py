"""The debugger and the live line, as a person sees them in JupyterLab."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Notebook

SCALE = 1.5

pytestmark = pytest.mark.timeout(240)


def type_answer(notebook: Notebook, prompt: str, text: str) -> None:
    """Type into the input box that shows this prompt."""
    box = notebook.panel.locator(".jp-Stdin:has(.jp-Stdin-input)")
    expect(box).to_contain_text(prompt.strip(), timeout=20_000)
    field = box.locator(".jp-Stdin-input")
    field.evaluate(
        "field => { field.dataset.answered = 'yes' }"
    )  # the next question has a box of its own
    field.fill(text)
    field.press("Enter")
    expect(notebook.panel.locator(".jp-Stdin-input[data-answered]")).to_have_count(0)


def test_a_breakpoint_is_typed_into_the_notebooks_own_box(notebook: Notebook) -> None:
    notebook.run("%dist_start 4", 60)
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
    notebook.picture("debugger")
    type_answer(notebook, "[2] (Pdb) ", "c")
    cell.wait_for_end()
    assert cell.texts()[-1].endswith("[0-3] 20.0")

    failing = notebook.run("%%dist\nif rank == 1:\n    [][rank]\ndist.barrier()")
    expect(failing.root).to_contain_text("ranks 0,2-3 waited in barrier at line 4")
    debugged = notebook.start("%dist_debug --ranks 1")
    type_answer(notebook, "[1] (Pdb) ", "p rank + 41")
    expect(debugged.root).to_contain_text("[1] 42")
    type_answer(notebook, "[1] (Pdb) ", "q")
    debugged.wait_for_end()


def test_long_cell_shows_where_its_ranks_are(notebook: Notebook) -> None:
    notebook.run("%dist_start 4", 60)
    cell = notebook.start(
        "%%dist\nimport time\nif rank == 3:\n    time.sleep(60)\ndist.all_reduce(torch.ones(1))"
    )
    live = "ranks 0-2 wait in all_reduce (line 5) 7 s; rank 3 runs line 4: time.sleep"
    expect(cell.outputs).to_have_text([live], timeout=20_000)
    notebook.picture("live")
    notebook.press_stop()
    cell.wait_for_end()
    expect(cell.root).not_to_contain_text("rank 3 runs")
    notebook.picture("live_after")
