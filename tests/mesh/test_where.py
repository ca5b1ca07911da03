"""Where cellmesh runs beside JupyterLab: programs that execute notebooks, and terminals."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

from tests.conftest import check_nothing_left, kernel_config
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
    check_nothing_left(runtime_dir)


SHOWN = (
    r"loss \[0\] 5 points, last 4, least 0, most 4",
    r"1 .*Tensor +\(3, 3\) +float32 +cpu +36 B +1 +2 ",
    r"x: replicas differ: ranks 0 ≠ 1",
    r"cell +took +compute +in collectives",
    r"x +Tensor float32 +\(3, 3\) +36 B",
    r"1 +\S+ +\d+ +cpu +idle",
)


@pytest.mark.parametrize(
    ("program", "more", "shown"),
    [
        (
            ("IPython", "--no-banner"),
            ("%dist_inspect x --watch --follow",),
            ("--watch and --follow need a notebook",),
        ),
        (("jupyter_console", "--transport=ipc"), (), ()),
    ],
)
def test_a_terminal_shows_text(
    program: tuple[str, ...],
    more: tuple[str, ...],
    shown: tuple[str, ...],
    runtime_dir: Path,
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", *program, "--simple-prompt"]
    said = converse(command, tmp_path, (*map(in_one_line, CELLS[1:]), *more))
    for pattern in (*SHOWN, *shown):
        assert re.search(pattern, said), said
    assert "Traceback" not in said
    check_nothing_left(runtime_dir)


def converse(command: list[str], folder: Path, cells: tuple[str, ...]) -> str:
    """Start a mesh and type cells at a terminal's prompt, and give what it showed."""
    environment = {**os.environ, "IPYTHONDIR": str(folder), "TERM": "dumb", "COLUMNS": "200"}
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    said = ""

    def read_until(text: str) -> None:
        nonlocal said
        begin = len(said)
        while not re.search(text, said[begin:]):
            if not select.select([controller], [], [], 60)[0]:
                pytest.fail(f"no {text!r} in 60 s after:\n{said}")
            try:
                said += plain(os.read(controller, 65536).decode(errors="replace"))
            except OSError:  # it has ended
                return

    try:
        read_until(r"In \[1\]: ")
        count = 1
        for cell in ("%load_ext cellmesh", "%dist_start 2", *cells):
            os.write(controller, f"{cell}\n".encode())
            count += 1
            read_until(rf"In \[{count}\]: ")
        os.write(controller, b"%dist_stop\n")
        read_until(rf"In \[{count + 1}\]: ")
        os.write(controller, b"exit\n")
        process.wait(20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(controller)
    return said


def in_one_line(cell: str) -> str:
    """A cell as a terminal's prompt takes it."""
    if not cell.startswith("%%dist\n"):
        return cell
    source = cell.removeprefix("%%dist\n").replace(
        "for i in range(5): cm.log(loss=i, step=i)", "[cm.log(loss=i, step=i) for i in range(5)];"
    )
    return f"mesh.cell({source!r})"
