"""What an inspection shows in a notebook, whatever its viewer can draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir
from tests.mesh.test_kernel import Notebook, open_notebook

VIEW = "application/vnd.jupyter.widget-view+json"
CELL = """%%dist
import torch
w = torch.arange(6.).reshape(2, 3)
if rank == 1: w[0, 0] = float("nan")
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh\n%dist_start 2").status == "ok"
            assert opened.run(CELL).status == "ok"
            yield opened
            opened.run("%dist_inspect w --watch")
            opened.run("%%dist\nw += 1")  # it is looked at again while the mesh is stopped
            stopped = opened.run("%dist_stop")
            assert stopped.status == "ok"
            assert (
                stopped.text() == stopped.text("stderr") == ""
            )  # nothing of looks that came too late
            check_nothing_left(directory)
        check_nothing_left(directory)


def show(notebook: Notebook, code: str) -> dict[str, Any]:
    outcome = notebook.run(code)
    assert outcome.status == "ok", outcome.errors()
    (data,) = outcome.data()
    return data


@pytest.mark.parametrize("code", ["%dist_inspect w", "mesh.inspect('w')"])
def test_an_inspection_has_a_form_for_every_viewer(notebook: Notebook, code: str) -> None:
    data = show(notebook, code)
    assert data.keys() == {"text/plain", "text/html", VIEW}
    assert "ranks 0 ≠ 1 by a NaN or an infinity" in data["text/plain"]
    assert "<table" in data["text/html"]
    assert '<img class="cellmesh"' in data["text/html"]
    assert 'src="data:image/png;base64,' in data["text/html"]


def test_an_inspection_is_a_mapping_for_code(notebook: Notebook) -> None:
    assert notebook.run(
        "print({rank: facts.num_nan for rank, facts in mesh.inspect('w').items()})"
    ).text() == ("{0: 0, 1: 1}\n")
