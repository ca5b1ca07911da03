"""Programs that bring an address, a store or processes of their own meet on a mesh as they do in a
script.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted
from cellmesh.wire.status import RankState
from tests.conftest import clean_runtime_dir

from .conftest import state_of

TIMEOUT_S = 240.0  # processes that import torch, on a loaded machine

SUM = """
t = torch.ones(1)
dist.all_reduce(t)
value = t.item(), dist.get_rank(), dist.get_world_size()
"""
DESTROY = "dist.destroy_process_group()\n"
WHOLE = [(4.0, rank, 4) for rank in range(4)]
PAIRS = [(2.0, rank % 2, 2) for rank in range(4)]

OF_FOUR, OF_TWO = "rank=rank, world_size=4", "rank=rank % 2, world_size=2"


def init(arguments: str) -> str:
    return f'dist.init_process_group("gloo", {arguments})'


# How a program may say where and as whom its ranks meet.
WHOLE_MESH = {
    "nothing": "dist.init_process_group()",
    "own port": f'os.environ["MASTER_PORT"] = "29611"\n{init(OF_FOUR)}',
    "tcp": init(f'"tcp://localhost:29612", {OF_FOUR}'),
    "device mesh": 'dist.init_device_mesh("cpu", (4,))',
}
PARTS = {
    "ports": f'os.environ["MASTER_PORT"] = str(29613 + rank // 2)\n{init(OF_TWO)}',
    "environment": 'os.environ["MASTER_PORT"] = str(29615 + rank // 2)\n'
    'os.environ.update(RANK=str(rank % 2), WORLD_SIZE="2")\n'
    "dist.init_process_group()",
    "tcp": 'address = f"tcp://127.0.0.1:{29617 + rank // 2}"\n'
    + init('f"{address}?rank={rank % 2}&world_size=2"'),
    "server": 'store = dist.TCPStore("127.0.0.1", 29650 + 2 * number + rank // 2, 2, '
    f"rank % 2 == 0)\n{init(f'store=dist.PrefixStore(str(number), store), {OF_TWO}')}",
    "store": 'store = dist.FileStore(f"{directory}/{rank // 2}-{number}", 2)\n'
    + init(f"store=store, {OF_TWO}"),
}
RPC = """
import warnings
from torch.distributed import rpc
warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
options = rpc.TensorPipeRpcBackendOptions(
    rpc_timeout=30, init_method="tcp://localhost:29633"
)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
value = rpc.rpc_sync("w1", torch.add, args=(torch.ones(1), rank)).item()
rpc.shutdown()
"""
CHILDREN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def setup(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=size)

def work(rank, size, results):
    setup(rank, size)
    t = torch.ones(1) * (rank + 1)
    dist.all_reduce(t)
    results.put((rank, t.item(), dist.get_world_size()))
    dist.destroy_process_group()
"""
START = """
context = mp.get_context(method)
results = context.SimpleQueue()
children = [context.Process(target=work, args=(one, 2, results)) for one in range(2)]
for child in children: child.start()
for child in children: child.join()
value = sorted(results.get() for _ in children), [child.exitcode for child in children]
"""
ENVIRONMENT = "import os\nos.environ |= kept\n"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cm.Mesh]:
    with clean_runtime_dir(), cm.start(4, mesh={"dp": 2, "tp": 2}) as started:
        started.push(directory=str(tmp_path_factory.mktemp("stores")))
        started.cell("import os\nkept = dict(os.environ)\nmade = mesh\nnumber = 0")
        yield started


@pytest.fixture(autouse=True)
def _as_it_was(mesh: cm.Mesh) -> Iterator[None]:
    """After each program all ranks have the mesh's groups in use, and these work."""
    yield
    run(mesh, ENVIRONMENT + "value = None\ndist.init_process_group()" + SUM)
    assert mesh.pull("value").list == WHOLE
    run(mesh, "dist.all_reduce(t, group=made.get_group('tp'))\nassert made is mesh")
    assert mesh.pull("t.item()").list == [8.0] * 4


def _place(state: RankState) -> str:
    return state.collective or state.where


def run(ranks: cm.Ranks, source: str) -> None:
    ranks.submit_cell(source).result(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", WHOLE_MESH)
def test_init_process_group_of_the_whole_mesh_returns_its_group(mesh: cm.Mesh, name: str) -> None:
    for ends in (DESTROY, ""):
        run(mesh, WHOLE_MESH[name] + SUM + ends)
        assert mesh.pull("value").list == WHOLE


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_mesh_make_groups_of_their_own_side_by_side(mesh: cm.Mesh, name: str) -> None:
    for ends in (DESTROY, ""):
        run(mesh, "number += 1\n" + PARTS[name] + SUM + ends)
        assert mesh.pull("value").list == PAIRS
        run(mesh, ENVIRONMENT)


@pytest.mark.parametrize("name", ["ports", "server"])
def test_a_failure_in_a_programs_own_group_costs_neither_it_nor_the_mesh(
    mesh: cm.Mesh, name: str
) -> None:
    run(mesh, "number += 1\n" + PARTS[name] + "\ngroup = dist.new_group([0, 1])")
    with pytest.raises(cm.RankFailure, match=r"ranks? 0.*waited in all_reduce"):
        run(mesh, "if rank == 1: raise ValueError('one')\n" + SUM)
    more = "dist.all_reduce(t, group=group)\ndist.all_reduce(t, group=dist.new_group([0, 1]))"
    run(mesh, SUM + more)
    assert mesh.pull("value").list == PAIRS
    assert mesh.pull("t.item()").list == [8.0] * 4
    if name == "ports":
        mesh.heal()
        run(mesh, SUM)


def test_an_error_without_a_default_group_names_the_line_that_destroyed_it(mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure) as caught:
        run(mesh, f"number += 1\n{DESTROY}dist.barrier()")
    (note,) = caught.value.exceptions_by_rank[0].__notes__
    assert re.search(r"on this rank by In\[\d+\] line 2: `dist.init_process_group", note)


@pytest.mark.parametrize("name", ["tcp", "server", "store"])
def test_a_wait_for_ranks_that_do_not_call_ends_with_the_first_stop(
    mesh: cm.Mesh, name: str
) -> None:
    started = mesh[[0, 3]].submit_cell("number += 1\n" + PARTS[name])
    deadline = time.monotonic() + 20
    expected = ["dist.TCPStore" if name == "server" else "init_process_group"] * 2
    while (found := [_place(state_of(mesh, one)) for one in (0, 3)]) != expected:
        assert time.monotonic() < deadline, found
    started.interrupt()
    with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
        started.result(timeout_s=20)
    run(mesh, ENVIRONMENT + "number += 1\n" + PARTS["tcp"] + SUM + DESTROY)
    assert mesh.pull("value").list == PAIRS


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (init("rank=rank, world_size=8"), "world_size is 8, but the mesh has 4 ranks"),
        (init("rank=0, world_size=2"), r"ranks \d and \d of the mesh both ask"),
        (init("'tcp://127.0.0.1:0?world_size=2'"), "rank parameter missing"),
        (DESTROY + "dist.barrier()", "has not been initialized"),
    ],
)
def test_unanswerable_call_gives_its_reason(mesh: cm.Mesh, source: str, error: str) -> None:
    with pytest.raises(cm.RankFailure) as caught:
        run(mesh, source)
    told = [str(one) for one in caught.value.exceptions_by_rank.values()]
    assert any(re.search(error, one) for one in told), told


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_a_rank_make_a_group_of_their_own(mesh: cm.Mesh, method: str) -> None:
    mesh[1].push(method=method, port=29641)
    run(mesh[1:2], CHILDREN + START)
    assert mesh[1].pull("value") == ([(0, 3.0, 2), (1, 3.0, 2)], [0, 0])


def test_rpc_of_a_part_meets_at_an_init_method(mesh: cm.Mesh) -> None:
    for _ in range(2):
        run(mesh[0:2], RPC)
        assert mesh[0:2].pull("value").list == [1.0, 2.0]
