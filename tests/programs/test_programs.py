"""Programs of torch alone: as cells, with a failure, exported, and as scripts, all equal bit for
bit.
"""

from __future__ import annotations

import pytest

from tests.programs import test_libraries, test_pressed
from tests.programs.running import SCRIPTS, Program
from tests.programs.running import test_program as test_program

pytestmark = pytest.mark.timeout(200)

PROGRAMS = [
    Program("ddp_example"),
    # A test cannot reach into the processes that it spawns.
    Program("ddp_spawn", fault="", by_hand=1),
    Program("rpc_rl", fault="", by_hand=1),
    Program("snapshot_trainer", counts=(14,)),
    Program("fsdp1"),
    Program("fsdp2", fault="forward", counts=(6,)),
    Program("tensor_parallel", fault="forward", counts=(2,)),
    Program("tensor_parallel", argv=("--sequence",)),
    Program("gpt_argparse", argv=("--n-layer=2", "--max-iters=4"), counts=(9,)),
    Program("gpt_configurator", argv=("--max_iters=4", "--n_layer=2")),
    Program("compile_ddp", fault="between"),
    Program("compile_ddp", fault="between", argv=("--fp16",)),
    # Once in each schedule: those before have 36 calls (GPipe, 1F1B), 63 (of two stages a rank), 54
    # (ZBV).
    Program(
        "pipelines", fault="forward", counts=(6, 36 + 9, 36 + 15, 63 + 4, 63 + 26, 63 + 12, 54 + 40)
    ),
    Program("join"),
    Program("zero"),
    Program("dcp_checkpoint"),
    Program("rpc_parameter_server", fault="forward", counts=(1,)),
    Program("rpc_rnn", fault="forward", counts=(1,), by_hand=2),
    Program("fsdp_tp", num_ranks=4, counts=(5,)),
    Program("hsdp", num_ranks=4),
    # On trainer 0, whose answer is waited for first: were it trainer 1, trainer 0 would wait for
    # it, and all for trainer 0, until RPC's time-out, as in any script.
    Program("rpc_ddp", fault="forward", counts=(3,), rank=0, num_ranks=4),
]


def test_every_script_is_run() -> None:
    names = {path.stem for path in SCRIPTS.glob("*.py")}
    programs = (*PROGRAMS, *test_libraries.PROGRAMS, *test_pressed.PROGRAMS)
    assert names == {program.name for program in programs}
