"""What is typed after a rank has died, or to take a mesh over, in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cellmesh as cm
from cellmesh.errors import NoMeshError
from tests.conftest import check_nothing_left, own_runtime_dir

from .test_kernel import Notebook, open_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh").status == "ok"
            yield opened
        check_nothing_left(directory)


def refusal(notebook: Notebook, code: str) -> str:
    outcome = notebook.run(code)
    assert outcome.status == "error"
    assert len(outcome.errors()[-1]["traceback"]) == 1
    return str(outcome.errors()[-1]["evalue"])


def test_heal_reports_what_was_healed_and_what_was_not(notebook: Notebook) -> None:
    assert notebook.run("%dist_start 3").status == "ok"
    nothing = "nothing to heal: every rank lives, and their process groups agree"
    assert notebook.run("%dist_heal").text().strip() == nothing
    assert notebook.run("%dist_heal --from 0").text().strip() == nothing
    assert "there is no rank 9: the mesh has 0-2" in refusal(notebook, "%dist_heal --from 9")

    notebook.run("%%dist\nvalue = rank")
    died = refusal(
        notebook, "%%dist --ranks 1\nimport os\nos.system('echo last words >&2')\nos._exit(3)"
    )
    assert "rank 1 exited with code 3" in died
    status = notebook.run("%dist_status").data("execute_result")[0]
    for kind in ("text/plain", "text/html"):
        assert "dead: exited with code 3" in status[kind]
        assert "last words" in status[kind]
    assert "nothing can run on rank 1" in refusal(notebook, "%%dist\nvalue")
    assert "rank 1 is dead" in refusal(notebook, "%dist_heal --from 1")

    assert "rank 1 is new and empty" in notebook.run("%dist_heal").text()
    copies = "rank 1 is new and empty (`%dist_heal --from 0` copies from a rank)"
    assert notebook.run("%dist_heal").text().strip() == f"{nothing}; {copies}"
    assert "rank 1 is new itself and holds nothing" in refusal(notebook, "%dist_heal --from 1")
    assert "copied: " in notebook.run("%dist_heal --from 2").text()
    assert notebook.run("%%dist\nvalue").text() == "[0] 0\n[1-2] 2\n"
    assert notebook.run("%dist_heal --from 0").text().strip() == nothing
    assert notebook.run("%dist_stop").status == "ok"


def test_a_mesh_is_taken_over_with_steal_only(notebook: Notebook) -> None:
    held = cm.start(2, name="held", lease_s=60)
    try:
        held.cell("value = rank")
        assert "take it over with `--steal`" in refusal(notebook, "%dist_attach held")
        assert "attached to held: 2 ranks" in str(
            notebook.run("%dist_attach --steal held").messages
        )
        assert notebook.run("%%dist\nvalue").text() == "[0] 0\n[1] 1\n"
        with pytest.raises(NoMeshError, match="has taken the mesh over"):
            held.cell("pass")
        assert notebook.run("%dist_stop").status == "ok"
    finally:
        held.stop()
