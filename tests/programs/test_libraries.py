"""Programs of libraries on top of torch: as cells, with a failure, exported, and as scripts, all equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exactness.comparing import Losses
from tests.exactness.launching import Job
from tests.mesh.test_kernel import Notebook
from tests.programs.running import Program, check

pytestmark = pytest.mark.timeout(200)

# What takes long to import: the mesh's zygote and the launcher import it once.
MODULES = ("lightning", "accelerate", "transformers")
PROGRAMS = [
    Program("lightning_trainer"),
    Program("fabric"),
    Program("accelerate_example", fault=""),
    Program("hf_trainer"),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_a_program_computes_the_same_in_every_way(
    program: Program,
    notebook_of: Callable[[int], Notebook],
    launch: Callable[[Job], Losses],
    tmp_path: Path,
) -> None:
    check(program, notebook_of(program.num_ranks), launch, tmp_path)
