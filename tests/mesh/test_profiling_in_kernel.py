"""`%%dist_profile` and `%dist_mem` in a real kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir

from .test_kernel import Notebook, open_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh\n%dist_start 2").status == "ok"
            yield opened
            assert opened.run("%dist_stop").status == "ok"
        check_nothing_left(directory)


def test_a_profiled_cell_prints_as_ever_and_is_drawn(notebook: Notebook, tmp_path: Path) -> None:
    cell = notebook.run(
        f"%%dist_profile -o {tmp_path / 'trace.json'} --rows 3\n"
        "dist.all_reduce(torch.ones(3))\nprint('from', __name__)"
    )
    assert cell.status == "ok"
    assert cell.text() == "[0-1] from __main__\n"
    [shown] = [data for data in cell.data() if "text/html" in data]
    assert 'class="cellmesh-timeline"' in shown["text/html"]
    assert "rank 1" in shown["text/html"]
    assert "A all_reduce" in shown["text/plain"]
    assert str(tmp_path / "trace.json") in shown["text/plain"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_profiled_cell_fails_as_ever_and_is_drawn_all_the_same(notebook: Notebook) -> None:
    cell = notebook.run("%%dist_profile\ntorch.ones(1)\nraise ValueError('odd')")
    assert cell.status == "error"
    shown, failed = cell.errors()
    assert shown["ename"] == "[0-1] ValueError"
    assert "line 3" in "".join(shown["traceback"])
    assert "ranks 0-1 raised ValueError: odd (line 3)" in failed["evalue"]
    assert any("text/html" in data for data in cell.data())


def test_some_ranks_are_profiled_also_in_auto_mode(notebook: Notebook) -> None:
    notebook.run("%dist_auto on")
    try:
        cell = notebook.run("%%dist_profile --ranks 1\ntorch.ones(1)")
    finally:
        notebook.run("%dist_auto off")
    [shown] = [data for data in cell.data() if "text/html" in data]
    assert "rank 1" in shown["text/plain"]
    assert "rank 0" not in shown["text/plain"]


def test_mistake_in_the_magics_line_is_reported(notebook: Notebook) -> None:
    assert (
        "Did you mean '--rows'?"
        in notebook.run("%%dist_profile --row 3\npass").errors()[0]["evalue"]
    )
    assert (
        "write %%dist_profile on its first line"
        in notebook.run("%dist_profile").errors()[0]["evalue"]
    )
    assert (
        "no directory"
        in notebook.run("%%dist_profile -o /nowhere/t.json\npass").errors()[0]["evalue"]
    )


def test_memory_is_shown_of_the_last_cell(notebook: Notebook) -> None:
    notebook.run("%%dist --ranks 1\nkept = torch.ones(10_000_000)")
    cell = notebook.run("%dist_mem")
    [shown] = cell.data("execute_result")
    _, zero, one = shown["text/plain"].splitlines()
    assert zero.startswith("0 ")
    assert "+4" in one
    notebook.run("%dist_mem --ranks 1")
    assert "<table" in shown["text/html"]
