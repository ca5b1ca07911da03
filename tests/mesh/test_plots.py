"""Plots of what real ranks log, in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir
from tests.mesh.test_kernel import Notebook, Outcome, open_notebook, plain

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh\n%dist_start 2").status == "ok"
            assert opened.run("%%dist\nimport cellmesh as cm").status == "ok"
            yield opened
            assert opened.run("%dist_stop").status == "ok"
            check_nothing_left(directory)
        check_nothing_left(directory)


def test_a_plot_has_a_form_for_every_viewer(notebook: Notebook) -> None:
    assert notebook.run("%%dist\nfor i in range(10): cm.log(loss=i + rank, step=i)").status == "ok"
    (data,) = notebook.run("%dist_plot loss").data()
    assert data.keys() == {"text/plain", "text/html", VIEW}
    assert "loss [1] 10 points, last 10, least 1, most 10" in data["text/plain"]
    assert '<img class="cellmesh-plot"' in data["text/html"]


def test_the_standing_picture_follows_at_a_cells_end(notebook: Notebook) -> None:
    shown = notebook.send("%dist_plot later")
    (data,) = notebook.finish(shown).data()
    assert "nothing logged yet" in data["text/plain"]
    assert notebook.run("%%dist\ncm.log(later=3.5)").status == "ok"

    def has_followed(outcome: Outcome) -> bool:
        return any(
            "later [0] 1 points, last 3.5" in d["text/plain"]
            for d in outcome.data("update_display_data")
        )

    notebook.read_until(shown, has_followed)


def test_a_background_cell_logs_while_others_run(notebook: Notebook) -> None:
    notebook.run("%%dist --nowait --ranks 1\nfor i in range(5): cm.log(apart=i)\ncm.log(apart=9)")
    assert notebook.run("%%dist\n1").status == "ok"
    outcome = notebook.run(
        "p = mesh.plot('apart')\n{r: s.values[-1] for r, s in p.series('apart').items()}"
    )
    assert outcome.data("execute_result")[0]["text/plain"] == "{1: 9.0}"


def test_numbers_of_a_call_and_of_a_cell_that_fails_are_there(notebook: Notebook) -> None:
    failed = notebook.run("%%dist\ncm.log(sunk=1.0)\n1 / 0")
    assert failed.status == "error"
    outcome = notebook.run("len(mesh.plot('sunk').series('sunk'))")
    assert outcome.data("execute_result")[0]["text/plain"] == "2"


def test_log_of_no_number_names_rank_and_line(notebook: Notebook) -> None:
    (error,) = notebook.run("%%dist --ranks 0\nx = 1\ncm.log(loss='high')").errors()[:1]
    assert "cellmesh.log(loss=...): str is no number" in plain("\n".join(error["traceback"]))


def test_names_are_asked_for(notebook: Notebook) -> None:
    assert "Missing argument" in plain(notebook.run("%dist_plot").errors()[0]["evalue"])
    assert "is no name" in plain(notebook.run("%dist_plot a-b").errors()[0]["evalue"])


def test_in_the_notebooks_process_log_does_nothing(notebook: Notebook) -> None:
    assert notebook.run("import cellmesh\ncellmesh.log(loss='anything')").status == "ok"
