"""Programs that bring an address, a store or processes of their own meet on a mesh as they do in a
script.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted
from cellmesh.wire.status import RankState
from tests.conftest import check_nothing_left, own_runtime_dir

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
    "file": init(f'init_method="file:///tmp/no/such", {OF_FOUR}'),
    "device mesh": 'dist.init_device_mesh("cpu", (4,))',
}
PARTS = {
    "ports": f'os.environ["MASTER_PORT"] = str(29613 + rank // 2)\n{init(OF_TWO)}',
    "environment": 'os.environ["MASTER_PORT"] = str(29615 + rank // 2)\n'
    'os.environ.update(RANK=str(rank % 2), WORLD_SIZE="2")\n'
    "dist.init_process_group()",
    "tcp": 'address = f"tcp://127.0.0.1:{29617 + rank // 2}"\n'
    + init('f"{address}?rank={rank % 2}&world_size=2"'),
    "file": init('f"file:///tmp/pair{rank // 2}", ' + OF_TWO),
    "server": 'store = dist.TCPStore("127.0.0.1", 29650 + 2 * number + rank // 2, 2, '
    f"rank % 2 == 0)\n{init(f'store=store, {OF_TWO}')}",
    "store": 'store = dist.FileStore(f"{directory}/{rank // 2}-{number}", 2)\n'
    + init(f"store=store, {OF_TWO}"),
}
RPC = """
import warnings
from torch.distributed import rpc
warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=30)
"""
CALL = """
names = sorted(info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos())
value = rpc.rpc_sync(names[-1], torch.add, args=(torch.ones(1), rank)).item()
rpc.shutdown()
"""
INIT_RPC = f'rpc.init_rpc(f"w{{rank}}", {OF_FOUR}, rpc_backend_options=options)'
RPC_OF_TWO = INIT_RPC.replace("world_size=4", "world_size=2")
RPCS = {
    "mesh's": INIT_RPC,
    "own port": f'os.environ["MASTER_PORT"] = "29631"\n{INIT_RPC}',
    "init_method": f'options.init_method = "tcp://localhost:29632"\n{INIT_RPC}',
    "part": f'options.init_method = "tcp://localhost:29633"\n{RPC_OF_TWO}',
    "beside a group": f"""
if rank < 2:
    {init('"tcp://localhost:29635", rank=rank, world_size=2')}
options.init_method = "tcp://localhost:29635"
{INIT_RPC}
if rank < 2:
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
""",
}
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
    with own_runtime_dir() as directory:
        with cm.start(4, mesh={"dp": 2, "tp": 2}) as started:
            started.push(directory=str(tmp_path_factory.mktemp("stores")))
            started.cell("import os\nkept = dict(os.environ)\nmade = mesh\nnumber = 0")
            yield started
        check_nothing_left(directory)


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


@pytest.mark.parametrize("ends", [DESTROY, ""], ids=["destroyed", "left"])
@pytest.mark.parametrize("name", WHOLE_MESH)
def test_init_process_group_of_the_whole_mesh_returns_its_group(
    mesh: cm.Mesh, name: str, ends: str
) -> None:
    for _ in range(2):
        run(mesh, WHOLE_MESH[name] + SUM + ends)
        assert mesh.pull("value").list == WHOLE


@pytest.mark.parametrize("ends", [DESTROY, ""], ids=["destroyed", "left"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_mesh_make_groups_of_their_own_side_by_side(
    mesh: cm.Mesh, name: str, ends: str
) -> None:
    for _ in range(2):
        run(mesh, "number += 1\n" + PARTS[name] + SUM + ends)
        assert mesh.pull("value").list == PAIRS
        run(mesh, ENVIRONMENT)


@pytest.mark.parametrize("name", PARTS)
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


@pytest.mark.parametrize("name", [*PARTS, "rpc"])
def test_a_wait_for_ranks_that_do_not_call_ends_with_the_first_stop(
    mesh: cm.Mesh, name: str
) -> None:
    call, source = "init_process_group", "number += 1\n" + PARTS.get(name, "")
    if name == "rpc":
        pairs = {
            "rank=rank": "rank=rank % 2",
            '"tcp://localhost:29633"': 'f"tcp://localhost:{29636 + rank // 2}"',
        }
        call, source = "init_rpc", RPC + RPCS["part"]
        for whole, pair in pairs.items():
            source = source.replace(whole, pair)
    started = mesh[[0, 3]].submit_cell(source)
    deadline = time.monotonic() + 20
    expected = [f"{call} for rank 1 of 2", f"{call} for rank 0 of 2"]
    if name in ("store", "server"):  # which the program waits for, or through
        expected = [call if name == "store" else "dist.TCPStore"] * 2
    while (found := [_place(state_of(mesh, one)) for one in (0, 3)]) != expected:
        assert time.monotonic() < deadline, found
    started.interrupt()
    with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
        started.result(timeout_s=20)
    run(mesh, ENVIRONMENT + "number += 1\n" + PARTS["tcp"] + SUM + DESTROY)
    assert mesh.pull("value").list == PAIRS


def test_a_rank_that_fails_before_the_call_frees_those_that_wait_for_it(mesh: cm.Mesh) -> None:
    for _ in range(2):
        with pytest.raises(cm.RankFailure, match="waited in init_process_group for rank 1 of 2"):
            run(mesh, "if rank == 1: raise ValueError('early')\n" + PARTS["tcp"])
    run(mesh, PARTS["tcp"] + SUM)
    assert mesh.pull("value").list == PAIRS


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (init("rank=rank, world_size=8"), "world_size is 8, but the mesh has 4 ranks"),
        (init("rank=7, world_size=2"), "rank 7 of world_size 2"),
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


def test_after_a_destroy_the_next_error_says_what_to_type(mesh: cm.Mesh) -> None:
    run(mesh, DESTROY)
    with pytest.raises(cm.RankFailure) as caught:
        run(mesh, SUM)
    note = caught.value.exceptions_by_rank[0].__notes__[0]
    assert "`dist.init_process_group()` in a cell" in note


FINISH = "def end_training():\n    dist.destroy_process_group()\n"


def test_the_next_error_names_the_line_that_has_destroyed_the_group(
    mesh: cm.Mesh, tmp_path: Path
) -> None:
    def note() -> str:
        with pytest.raises(cm.RankFailure) as caught:
            run(mesh, SUM)
        run(mesh, "dist.init_process_group()")
        return str(caught.value.exceptions_by_rank[0].__notes__[0])

    mesh.submit_cell(FINISH, execution_count=7).result(60)
    mesh.submit_cell("x = 1\nend_training()", execution_count=8).result(60)
    assert "was called on this rank by In[7] line 2, called at In[8] line 2:" in note()
    (tmp_path / "train.py").write_text(f"import torch.distributed as dist\n{FINISH}")
    mesh.cell(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import train")
    mesh.run(lambda: __import__("train").end_training())
    assert f"was called on this rank by {tmp_path}/train.py line 3:" in note()


@pytest.mark.parametrize("name", RPCS)
def test_rpc_meets_at_any_init_method(mesh: cm.Mesh, name: str) -> None:
    ranks = mesh[0:2] if name == "part" else mesh
    for _ in range(2):
        run(ranks, RPC + RPCS[name] + CALL)
        assert ranks.pull("value").list == [1.0, 2.0, 3.0, 4.0][: len(ranks.ranks)]


def test_rpc_as_another_worker_says_that_it_takes_new_ranks(mesh: cm.Mesh) -> None:
    run(mesh, RPC + RPCS["mesh's"] + CALL)
    with pytest.raises(cm.RankFailure) as caught:
        run(mesh[3:4], RPC + 'rpc.init_rpc("alone", rank=0, world_size=1)')
    assert "%dist_restart" in caught.value.exceptions_by_rank[3].__notes__[0]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_a_rank_make_a_group_of_their_own(mesh: cm.Mesh, method: str) -> None:
    mesh[1].push(method=method, port=29641)
    for _ in range(2 if method == "fork" else 1):  # the others import torch anew
        run(mesh[1:2], CHILDREN + START)
        assert mesh[1].pull("value") == ([(0, 3.0, 2), (1, 3.0, 2)], [0, 0])
    queue = "mp.get_context(method).SimpleQueue()"
    spawn = f"mp.start_processes(work, (2, {queue}), 2, start_method=method)"
    fails = "def work(*args):\n    raise ValueError('of the child')\n"
    with pytest.raises(cm.RankFailure, match=r"ProcessRaisedException: -- Process \d") as caught:
        run(mesh[1:2], CHILDREN + fails + spawn)
    assert "of the child" in str(caught.value.exceptions_by_rank[1])
    run(mesh[1:2], CHILDREN + START)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_that_wait_for_others_end_with_the_cell(mesh: cm.Mesh, method: str) -> None:
    mesh[2].push(method=method, port=29642)
    child = "mp.get_context(method).Process(target=work, args=(0, 2, None))"
    for _ in range(2 if method == "fork" else 1):  # the port is free again
        started = mesh[2:3].submit_cell(f"{CHILDREN}child = {child}\nchild.start()\nchild.join()")
        _wait_until_served(29642)
        started.interrupt()
        with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
            started.result(timeout_s=20)
        assert mesh[2].pull("child.is_alive()") is False


def _wait_until_served(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        assert time.monotonic() < deadline


def test_a_module_preloaded_may_have_imported_the_name(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer_of_mine.py").write_text(
        "from torch.distributed import destroy_process_group, init_process_group\n"
        "import torch, torch.distributed as dist\n"
        "def train():\n    init_process_group('gloo')\n    t = torch.ones(1)\n"
        "    dist.all_reduce(t)\n    destroy_process_group()\n    return t.item()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with cm.start(2, preload=["trainer_of_mine"]) as mesh:
        for _ in range(2):
            run(mesh, "import trainer_of_mine\nvalue = trainer_of_mine.train()")
            assert mesh.pull("value").list == [2.0, 2.0]
    check_nothing_left(runtime_dir)


def test_a_module_ends_the_cell_by_quit(mesh: cm.Mesh) -> None:
    module = (
        "import sys, types\nsys.modules['leaving'] = module = types.ModuleType('leaving')\n"
        "exec('def leave(): quit()', vars(module))\n"
    )
    run(mesh, module + "value = 'before'\nimport leaving\nleaving.leave()\nvalue = 'after'")
    assert mesh.pull("value").list == ["before"] * 4
