"""Programs of torch alone: as cells, with a failure, exported, and as scripts, all equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exactness.comparing import Losses
from tests.exactness.launching import Job
from tests.mesh.test_kernel import Notebook
from tests.programs import test_libraries
from tests.programs.running import SCRIPTS, Program, check

pytestmark = pytest.mark.timeout(200)

PROGRAMS = [
    Program("ddp_example"),
    Program("ddp_spawn", fault="", by_hand=1),  # a test cannot reach into the processes that it spawns
    Program("snapshot_trainer", count=14),
    Program("fsdp1"),
    Program("fsdp2", fault="forward", count=6),
    Program("tensor_parallel", fault="forward", count=1),
    Program("sequence_parallel"),
    Program("gpt_argparse", argv=("--n-layer=2", "--max-iters=4"), count=9),
    Program("gpt_configurator", argv=("--max_iters=4", "--n_layer=2")),
    Program("compile_ddp", fault="between"),
    Program("compile_comm_hook", fault="between"),
    Program("pipelines", fault="forward", count=6),
    Program("join"),
    Program("zero"),
    Program("dcp_checkpoint"),
    Program("rpc_parameter_server", fault="forward", count=1),
    Program("rpc_rnn", fault="forward", count=1, by_hand=2),
    Program("fsdp_tp", num_ranks=4, count=5),
    Program("hsdp", num_ranks=4),
    # A trainer runs in a thread of RPC: where it fails, the other one waits for it as in any script.
    Program("rpc_ddp", num_ranks=4, fault=""),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_a_program_computes_the_same_in_every_way(
    program: Program,
    notebook_of: Callable[[int], Notebook],
    launch: Callable[[Job], Losses],
    tmp_path: Path,
) -> None:
    check(program, notebook_of(program.num_ranks), launch, tmp_path)


def test_every_script_is_run() -> None:
    names = {path.stem for path in SCRIPTS.glob("*.py")}
    assert names == {program.name for program in (*PROGRAMS, *test_libraries.PROGRAMS)}
