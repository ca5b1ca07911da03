"""Programs of libraries on top of torch: as cells, with a failure, exported, and as scripts, all
equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mesh.test_kernel import Notebook, plain
from tests.programs.running import Program, begin, results_of, run_as_cells
from tests.programs.running import test_program as test_program

pytestmark = pytest.mark.timeout(200)

# What takes long to import: the mesh's zygote and the launcher import it once.
MODULES = ("lightning", "accelerate", "transformers")
PROGRAMS = [
    Program("lightning_trainer"),
    Program("fabric"),
    ACCELERATE := Program("accelerate_example"),
    Program("hf_trainer"),
]


def test_accelerate_runs_again_after_its_end(
    notebook_of: Callable[[int], Notebook], tmp_path: Path
) -> None:
    notebook = notebook_of(ACCELERATE.num_ranks)
    first = run_as_cells(ACCELERATE, notebook, tmp_path / "cells")
    # `end_training` has destroyed the group, and accelerate does not make it again.
    cells = [f"%%dist\n{text}" for _, text in ACCELERATE.cells()]
    begin(notebook, cells[0])
    outcome = notebook.run(cells[1])
    said = "\n".join(plain(line) for each in outcome.errors() for line in each["traceback"])
    assert (
        "`dist.init_process_group()` in a cell on all ranks brings the mesh's groups back" in said
    )
    begin(notebook, "%%dist\ndist.init_process_group()")
    for cell in cells:
        begin(notebook, cell)
    assert results_of(notebook) == first
