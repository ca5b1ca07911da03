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
SUM = "rpc.rpc_sync(f'rank{1 - rank}', torch.add, args=(1, 2))"
ADD = f"answer = {SUM}\nrpc.shutdown()"
AGAIN = "answer = None\n" + START.replace("scale, args=(rpc.RRef(7),)", "torch.add, args=(1, 2)")
KILL = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


def test_rpc_starts_again_on_new_ranks_and_beside_a_replaced_one(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(START)
    assert own_mesh.pull("answer").list == [71, 70]
    assert own_mesh.pull("os.environ['TP_SOCKET_IFNAME']").list == ["lo", "lo"]
    own_mesh.restart()
    own_mesh.cell(START)
    assert own_mesh.pull("answer").list == [71, 70]
    own_mesh.cell("rpc.shutdown()")
    with pytest.raises(cm.RankFailure, match="SIGKILL"):
        own_mesh[1].cell(KILL)
    own_mesh.heal(source=0)
    own_mesh.cell(AGAIN)
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
    own_mesh.cell(ADD)
    assert own_mesh.pull("answer").list == [3, 3]


def test_rpc_again_after_failures(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(START)
    with pytest.raises(cm.RankFailure, match="mine"):
        own_mesh.cell(f"if rank == 1: raise ValueError('mine')\n{SUM}")
    own_mesh.cell(ADD)
    with pytest.raises(cm.RankFailure, match=r"waited in init_rpc.*released"):
        own_mesh.cell("if rank == 1: raise ValueError('early')\n" + START)
    own_mesh.cell(AGAIN)
    with pytest.raises(cm.RankFailure, match="SIGKILL"):
        own_mesh[1].cell(KILL)
    own_mesh.heal(source=0)
    own_mesh[0].cell("rpc.shutdown(graceful=False)")
    own_mesh.cell(AGAIN + "rpc.shutdown()")
    assert own_mesh.pull("answer").list == [3, 3]
