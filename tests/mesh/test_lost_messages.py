"""Operations that gloo does not end with their connection (gloo/transport/tcp/pair.cc,
signalException).

A message that was being received when the rank that sends it died; and one that its receiver had
asked for and that could not be written any more, as the receiver had died.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import cellmesh as cm
from tests.conftest import stop_process
from tests.faults.watching import wait_until

from .conftest import state_of

WAIT_S = 40.0
# What rank 1 begins before it dies, and where rank 0 waits: in Python, in C++ for a Work, or for a
# future.
ASK, SEND = "dist.broadcast(t, 0, async_op=True)", "dist.broadcast(big, 1, async_op=True)"
WAITS = {
    "Python": (ASK, "dist.broadcast(t, 0)"),
    "Work": (ASK, "dist.broadcast(t, 0, async_op=True).wait()"),
    "future": (ASK, "dist.broadcast(t, 0, async_op=True).get_future().wait()"),
    "future of C++": (ASK, "pg.broadcast([t], options).get_future().wait()"),
    "C++": (ASK, "dist._broadcast_coalesced(pg, [t], 1 << 20, 0)"),
    "functional": (ASK, "funcol.wait_tensor(funcol.broadcast(t, 0, pg))"),
    "send": ("dist.irecv(some, 0)", "dist.send(some, 1)"),
    "isend": ("dist.irecv(some, 0)", "dist.isend(some, 1).wait()"),
    "batch": (
        "dist.irecv(some, 0)",
        "[work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, some, 1)])]",
    ),
    "Python, arriving": (SEND, "dist.broadcast(big, 1)"),
    "C++, arriving": (SEND, "dist._broadcast_coalesced(pg, [big], 1 << 30, 1)"),
    "functional, arriving": (SEND, "funcol.wait_tensor(funcol.broadcast(big, 1, pg))"),
    "recv": ("dist.isend(big, 0)", "dist.recv(big, 1)"),
    "recv from anyone": ("dist.isend(big, 0)", "dist.recv(big)"),
}
PREPARE = """
import os, signal, socket, struct, time
import torch.distributed._functional_collectives as funcol
from cellmesh.workers.groups import connections
kept, t, some, big = rank, torch.ones(4), torch.ones(1 << 15), torch.ones(25_000_000)
pg = dist.distributed_c10d._get_default_group()
options = dist.BroadcastOptions()
options.rootRank = 0
"""
# Rank 1's connections are reset, not closed, once what it has sent has arrived.
CELL = """
if rank == 0:
    {wait}
else:
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    work = {ask}
    sockets = connections.connected(connections.open_sockets())
    connections.await_quiet(sockets)
    for descriptor in sockets:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("ask", "wait"), WAITS.values(), ids=WAITS.keys())
def test_a_rank_that_waits_for_one_that_died_in_the_middle_of_a_message_is_released(
    ask: str, wait: str, own_mesh: cm.Mesh, tmp_path: Path
) -> None:
    own_mesh.cell(PREPARE)
    pid = own_mesh.report()[0].pid
    gate = tmp_path / "gate"
    run = own_mesh.submit_cell(CELL.format(ask=ask, wait=wait, gate=str(gate)))
    wait_until(lambda: has_begun(own_mesh), WAIT_S, "rank 0's operation")
    stop_process(pid)
    gate.touch()
    wait_until(lambda: own_mesh.report()[1].phase == "dead", WAIT_S, "rank 1's death")
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(cm.RankFailure) as caught:
        run.result(timeout_s=WAIT_S)
    assert isinstance(caught.value.exceptions_by_rank[0], cm.Released)
    own_mesh.heal()
    own_mesh.cell("sums = torch.ones(1); dist.all_reduce(sums)")
    assert own_mesh.pull("sums.item()").list == [2.0, 2.0]
    assert own_mesh[0].pull("kept") == 0


def has_begun(mesh: cm.Mesh) -> bool:
    """Whether rank 0 has begun what it waits in."""
    state = state_of(mesh, 0)
    numbers = (
        (count.num_collectives, count.num_sent, count.num_received) for count in state.counts
    )
    return bool(state.collective) or any(map(any, numbers))
