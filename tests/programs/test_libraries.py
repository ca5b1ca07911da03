"""Programs of libraries on top of torch: as cells, with a failure, exported, and as scripts, all
equal.
"""

from __future__ import annotations

import pytest

from tests.programs.running import Program
from tests.programs.running import test_program as test_program

pytestmark = pytest.mark.timeout(200)

# What takes long to import: the mesh's zygote and the launcher import it once.
MODULES = ("lightning", "accelerate", "transformers")
PROGRAMS = [
    Program("lightning_trainer"),
    Program("fabric"),
    Program("accelerate_example"),
    Program("hf_trainer"),
]
