"""torch.distributed.rpc on ranks that are stopped, restarted and replaced."""

from __future__ import annotations

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted

from .conftest import Recorder

START = """
import os, time, warnings
from torch.distributed import rpc

warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)


def scale(x):
    return x.to_here() * 10 + rank


def nap():
    print("napping", flush=True)
    time.sleep(2.0)


# At the first failure, not after a minute.
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=30)
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
answer = rpc.rpc_sync(f"rank{1 - rank}", scale, args=(rpc.RRef(7),))
dist.barrier()
"""


def test_rpc_starts_again_on_new_ranks(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(START)
    assert own_mesh.pull("answer").list == [71, 70]
    assert own_mesh.pull("os.environ['TP_SOCKET_IFNAME']").list == ["lo", "lo"]
    own_mesh.restart()
    own_mesh.cell(START)
    assert own_mesh.pull("answer").list == [71, 70]
    own_mesh.cell("rpc.shutdown()")


def test_init_rpc_is_refused_where_rpc_runs_and_costs_nothing(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(START)
    again = "rpc.init_rpc(f'rank{rank}', rank=rank, world_size=world_size)"
    for ranks in (own_mesh, own_mesh[0]):  # one rank alone does not wait for the others
        with pytest.raises(cm.RankFailure, match="RPC is already initialized"):
            ranks.cell(again)
    add = "\nanswer = rpc.rpc_sync(f'rank{1 - rank}', torch.add, args=(1, 2))\nrpc.shutdown()"
    own_mesh.cell(f"answer = None\nrpc.shutdown()\n{again}{add}")
    assert own_mesh.pull("answer").list == [3, 3]


def test_rpc_starts_again_beside_a_replaced_rank(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(START + "rpc.shutdown()")
    with pytest.raises(cm.RankFailure, match="SIGKILL"):
        own_mesh[1].cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    own_mesh.heal(source=0)
    again = START.replace("scale, args=(rpc.RRef(7),)", "torch.add, args=(1, 2)")
    own_mesh.cell(again)
    assert own_mesh.pull("answer").list == [3, 3]


def test_a_call_that_is_waited_for_can_be_interrupted(
    own_mesh: cm.Mesh, recorder: Recorder
) -> None:
    own_mesh.cell(START)
    begun = "print('calling')\nanswer = None\nrpc.rpc_sync('rank1', nap)\nanswer = 'came'"
    run = own_mesh[0:1].submit_cell(begun, sink=recorder)
    recorder.wait_for_line("calling")
    run.interrupt()
    with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
        run.result(timeout_s=30)
    assert own_mesh[0].pull("answer") is None
    own_mesh.cell(
        "answer = rpc.rpc_sync(f'rank{1 - rank}', torch.add, args=(1, 2))\nrpc.shutdown()"
    )
    assert own_mesh.pull("answer").list == [3, 3]


def test_rpc_again_after_failures(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(START)
    with pytest.raises(cm.RankFailure, match="mine"):
        own_mesh.cell(
            "if rank == 1: raise ValueError('mine')\nrpc.rpc_sync('rank1', torch.add, args=(1, 2))"
        )
    own_mesh.cell(
        "answer = rpc.rpc_sync(f'rank{1 - rank}', torch.add, args=(1, 2))\nrpc.shutdown()"
    )
    with pytest.raises(cm.RankFailure, match=r"waited in init_rpc for rank 1 of 2.*released"):
        own_mesh.cell("if rank == 1: raise ValueError('early')\n" + START)
    again = START.replace("scale, args=(rpc.RRef(7),)", "torch.add, args=(1, 3)")
    own_mesh.cell(again)
    with pytest.raises(cm.RankFailure, match="SIGKILL"):
        own_mesh[1].cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    own_mesh.heal(source=0)
    own_mesh[0].cell("rpc.shutdown(graceful=False)")
    own_mesh.cell("answer = None\n" + again + "rpc.shutdown()")
    assert own_mesh.pull("answer").list == [4, 4]


def test_rpc_again_after_a_shutdown_that_was_released(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(START)
    with pytest.raises(
        cm.RankFailure, match=r"rank 0 waited in rpc\.shutdown at line 2 and was released"
    ):
        own_mesh.cell("if rank == 1: raise ValueError('mine')\nrpc.shutdown()")
    own_mesh[1].cell("rpc.shutdown(graceful=False)")
    again = START.replace("scale, args=(rpc.RRef(7),)", "torch.add, args=(1, 2)")
    own_mesh.cell("answer = None\n" + again + "rpc.shutdown()")
    assert own_mesh.pull("answer").list == [3, 3]
