"""Where cellmesh runs beside JupyterLab: programs that execute notebooks, and terminals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

from tests.conftest import kernel_config
from tests.mesh.test_kernel import plain

CELLS = (
    "%load_ext cellmesh\n%dist_start 2",
    "%%dist\nimport cellmesh as cm\nfor i in range(5): cm.log(loss=i, step=i)\nx = torch.eye(3) + "
    "rank",
    "%dist_plot loss",
    "%dist_inspect x",
    "%dist_timeline",
    "%dist_who",
    "%dist_status --live",
)


def test_an_executed_notebook_shows_still_pictures(runtime_dir: Path) -> None:
    more = ("%dist_plot later", "%%dist\ncm.log(later=2.5)", "%dist_stop")
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in [*CELLS, *more]])
    NotebookClient(notebook, timeout=60, kernel_name="python3", config=kernel_config()).execute()
    shown = [output for cell in notebook.cells[2:7] for output in cell.outputs]
    assert all(output.output_type in ("display_data", "execute_result") for output in shown)
    assert all({"text/plain", "text/html"} == set(output.data) for output in shown)
    assert len(shown) == 5
    # What is logged later is in the picture of the cell above.
    (later,) = notebook.cells[7].outputs
    assert "later [0] 1 points, last 2.5" in later.data["text/plain"]
    assert "widgets" not in notebook.metadata
    nbformat.validate(notebook)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert "cellmesh-plot" in page


SHOWN = (
    r"loss \[0\] 5 points, last 4, least 0, most 4",
    r"1 .*Tensor +\(3, 3\) +float32 +cpu +36 B +1 +2 ",
    r"x: replicas differ: ranks 0 ≠ 1",
    r"cell +took +compute +in collectives",
    r"x +Tensor float32 +\(3, 3\) +36 B",
    r"1 +\S+ +\d+ +cpu +idle",
    "--watch needs a notebook",
)
LOG = "import cellmesh as cm; [cm.log(loss=i, step=i) for i in range(5)]; x = torch.eye(3) + rank"


def test_a_terminal_shows_text_and_its_exit_ends_its_mesh(
    runtime_dir: Path, tmp_path: Path
) -> None:
    lines = ("%load_ext cellmesh", "%dist_start 2", f"mesh.cell({LOG!r})", *CELLS[2:])
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--simple-prompt"],
        input="\n".join([*lines, "%dist_inspect x --watch", "exit", ""]),
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "dumb", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = plain(done.stdout + done.stderr)
    for pattern in SHOWN:
        assert re.search(pattern, said), said
    assert "Traceback" not in said
