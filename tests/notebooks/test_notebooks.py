"""Every notebook, executed in a real kernel; the demo that executes one; the script of the
documentation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.notebooks.kernels import NOTEBOOKS, ROOT, execute, runtime_directory_of_a_test, script_of

# tests/exactness executes the others.
EXECUTED_HERE = [path for path in NOTEBOOKS if not script_of(path).exists()]

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("shared_prestart")]


@pytest.fixture(autouse=True)
def runtime_directory() -> Iterator[Path]:
    """A runtime directory of the test's own: no file may be left in it, no process that was given
    it.
    """
    with runtime_directory_of_a_test() as directory:
        yield directory


@pytest.mark.parametrize("path", EXECUTED_HERE, ids=lambda path: path.stem)
def test_executes(path: Path) -> None:
    execute(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        kinds = {output.output_type for output in cell.outputs}
        may_fail = "raises-exception" in cell.metadata.get("tags", [])
        assert kinds <= {"stream", "display_data", "execute_result"} | (
            {"error"} if may_fail else set()
        )


def test_the_reinforcement_loop_has_at_most_60_lines_beside_prose() -> None:
    notebook = nbformat.read(ROOT / "notebooks/18_reinforcement_loop.ipynb", as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    lines = [line.strip() for line in code.splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= 60


def run_python(*words: object, where: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, **env}
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=100
    )


def demo(path: Path, html: Path, runtime: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "notebooks.demo", path, "--html", html, TMPDIR=str(runtime))


def test_demo_prints_and_writes_html(tmp_path: Path, runtime_directory: Path) -> None:
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# A heading\n\nprose"),
            new_code_cell("%load_ext cellmesh\n%dist_start 2"),
            new_code_cell("%%dist\nprint('loss', 0.25)"),
            new_code_cell("%dist_inspect world_size"),
        ]
    )
    path, html = tmp_path / "small.ipynb", tmp_path / "small.html"
    nbformat.write(notebook, path)
    source = path.read_bytes()
    done = demo(path, html, runtime_directory)
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[:2] == ["", "A heading"]
    assert "[0-1] loss 0.25" in lines
    assert "0-1    int   2" in lines
    assert f"Open it live:          .venv/bin/jupyter lab {path}" in lines
    assert "[0-1] loss 0.25" in html.read_text()
    assert path.read_bytes() == source, "only --save may change the notebook"


def test_demo_fails_with_the_traceback_of_the_cell(tmp_path: Path, runtime_directory: Path) -> None:
    notebook = new_notebook(
        cells=[
            new_code_cell("%load_ext cellmesh\n%dist_start 2"),
            new_code_cell("%%dist\nif rank == 1:\n    raise ValueError('odd')"),
            new_code_cell("print('not reached')"),
        ]
    )
    path, html = tmp_path / "broken.ipynb", tmp_path / "broken.html"
    nbformat.write(notebook, path)
    done = demo(path, html, runtime_directory)
    assert done.returncode == 1
    assert "RankFailure: rank 1 raised ValueError: odd" in done.stderr
    assert "not reached" not in done.stdout
    assert "odd" in html.read_text()


def test_the_script_of_the_documentation_runs(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "usage.md").read_text().partition("## From Python")[2]
    blocks = re.findall(r"```python\n(.*?)\n```", section, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(blocks[0])
    done = run_python(script, where=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} {9 + rank}" for rank in range(8)]
