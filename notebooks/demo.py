"""Run a notebook (by default the quickstart) in a kernel of its own and show what it prints as it
comes.

``make demo`` runs it. The executed notebook is written as HTML; ``--save`` also writes the new
outputs into the notebook itself, for a commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"
ARTIFACTS = ROOT / "artifacts"


class Narrator(NotebookClient):
    """Executes a notebook and prints its headings and outputs as they come."""

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        out = super().output(outs, msg, display_id, cell_index)
        if msg["msg_type"] == "stream":
            print(msg["content"]["text"], end="", flush=True)
        return out


def show_heading(cell: NotebookNode, cell_index: int) -> None:
    """Print the headings of a text cell."""
    if cell.cell_type == "markdown":
        for line in cell.source.splitlines():
            if line.startswith("#"):
                print(f"\n{line.lstrip('# ')}", flush=True)


def show_displays(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
    """Print the tables of a cell that has ended; its streams have been printed while it ran."""
    for out in cell.outputs:
        if out.output_type in ("display_data", "execute_result") and "image/png" not in out.data:
            print(out.data.get("text/plain", ""), flush=True)


def execute(notebook: NotebookNode, directory: Path) -> None:
    """Execute a notebook in a real kernel, in place; the meshes that it starts end with it, however
    it ends.

    Args:
        notebook: gets the outputs, also those of a cell that fails.
        directory: where the kernel runs.

    Raises:
        CellExecutionError: a cell failed.
        DeadKernelError: the kernel died.
    """
    client = Narrator(
        notebook,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
        record_timing=False,
        on_cell_start=show_heading,
        on_cell_executed=show_displays,
        # On loopback others could listen; older versions of Jupyter pass over this option.
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),
    )
    # A mesh outlives its kernel, under its lease; those of this kernel have a directory to
    # themselves.
    with tempfile.TemporaryDirectory(prefix="cm-") as runtime:
        env = {**os.environ, "JUPYTER_RUNTIME_DIR": runtime}
        try:
            client.execute(env=env)
        finally:
            stop = [sys.executable, "-m", "cellmesh", "stop", "--all"]
            subprocess.run(stop, env=env, check=True, stdout=subprocess.DEVNULL)


def tidy_outputs(notebook: NotebookNode) -> None:
    """Join pieces of one stream that follow each other, and remove displays that show nothing.

    What is left of the live line of a cell that took long is an empty display. (nbclient's own
    ``coalesce_streams`` joins pieces across displays that stand between them.)
    """
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        tidy: list[NotebookNode] = []
        for out in cell.outputs:
            if "data" in out and not any(str(value).strip() for value in out.data.values()):
                continue
            if out.output_type == "stream" and tidy and tidy[-1].get("name") == out.name:
                tidy[-1].text += out.text
            else:
                tidy.append(out)
        cell.outputs = tidy


def write_html(notebook: NotebookNode, path: Path) -> None:
    """Write an executed notebook as one HTML file."""
    html, _ = HTMLExporter().from_notebook_node(notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo.

    Args:
        arguments: of the command line.

    Returns:
        Exit code: 1 if a cell failed.
    """
    parser = argparse.ArgumentParser(prog="python -m notebooks.demo", description=__doc__)
    parser.add_argument("notebook", nargs="?", type=Path, default=NOTEBOOK)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="default: artifacts/<notebook>.html"
    )
    parser.add_argument("--save", action="store_true", help="write the outputs into the notebook")
    options = parser.parse_args(arguments)
    page = options.html or ARTIFACTS / f"{options.notebook.stem}.html"
    notebook = nbformat.read(options.notebook, as_version=4)
    try:
        execute(notebook, options.notebook.parent)
    except (CellExecutionError, DeadKernelError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        tidy_outputs(notebook)
        write_html(notebook, page)
    if options.save:
        nbformat.write(notebook, options.notebook)
    print(f"\nThe executed notebook: {_short(page)}")
    print(f"Open it live:          .venv/bin/jupyter lab {_short(options.notebook)}")
    return 0


def _short(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    sys.exit(main())
