"""Groups of backends that are neither gloo nor NCCL, and gloo groups that a program constructs: one
rank that fails releases the others, a press of stop ends a wait, and a heal makes them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted
from tests.conftest import clean_runtime_dir
from tests.mesh.conftest import Recorder

IMPORT = "from tests.mesh import backends\nbackends.register()"
NEW_GROUP = "group = dist.new_group(backend={!r})"
REDUCE = "x = torch.ones(1) + rank\ndist.all_reduce(x, group=group)"
OWN = (
    "import uuid\nwhere = [uuid.uuid4().hex]\ndist.broadcast_object_list(where)\n"
    "store = dist.PrefixStore(where[0], dist.distributed_c10d._get_default_store())\n"
)
GLOO = OWN + "group = dist.ProcessGroupGloo(store, rank, world_size)"
# As torchft does: the gloo group is registered in a plain ProcessGroup, and nothing else holds it.
PLAIN = OWN + (
    "group = dist.ProcessGroup(store, rank, world_size)\n"
    "group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)\n"
    "gloo = dist.ProcessGroupGloo(store, rank, world_size)\n"
    "group._register_backend(torch.device('cpu'), dist.ProcessGroup.BackendType.GLOO, gloo)\n"
    "del gloo"
)
RAW_REDUCE = "x = torch.ones(1) + rank\ngroup.allreduce([x]).wait()"
KINDS = {
    "lazy": (NEW_GROUP.format("lazy"), REDUCE),
    "blocking": (NEW_GROUP.format("blocking"), REDUCE),
    "stubborn": (NEW_GROUP.format("stubborn"), REDUCE),
    "program's gloo": (GLOO, RAW_REDUCE),
    "program's gloo in a group": (PLAIN, RAW_REDUCE),
}


@pytest.fixture(scope="module")
def quick() -> Iterator[cm.Mesh]:
    """Two ranks with the backends of the tests registered."""
    with clean_runtime_dir(), cm.start(2, settle_s=0.1) as started:
        started.cell(IMPORT)
        yield started


def check_release_and_stop(mesh: cm.Mesh, work: str, make: str = "") -> list[str]:
    """Have rank 1 fail while rank 0 waits in `work`, and stop rank 0 in it; return the notes.

    Between the two, all ranks do the work; they `make` before what is not made again for them.
    """
    failing, stopping = Recorder(), Recorder()
    source = f"if rank == 1: raise ValueError('mine')\n{work}"
    with pytest.raises(cm.RankFailure, match="mine") as raised:
        mesh.submit_cell(source, sink=failing).result(timeout_s=60)
    assert "released" in str(raised.value)
    failing.wait_for_note("process groups rebuilt")
    if RAW_REDUCE in work:
        mesh.cell(make)
    mesh.cell(work)
    run = mesh[0:1].submit_cell(f"print('waiting')\n{work}", sink=stopping)
    stopping.wait_for_line("waiting")
    run.interrupt()
    with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
        run.result(timeout_s=60)
    return failing.notes


@pytest.mark.parametrize("kind", KINDS)
def test_waits_end_and_the_group_works_after_the_heal(quick: cm.Mesh, kind: str) -> None:
    make, reduce = KINDS[kind]
    is_registered = reduce == REDUCE
    quick.cell(f"{make}\nbefore = group\n{reduce}")
    assert quick.pull("x.item()").list == [3, 3]

    noted = "\n".join(check_release_and_stop(quick, reduce, make))
    if is_registered:
        assert f"backend '{kind}', was made again by" in noted
    else:
        assert "a ProcessGroupGloo that code constructed itself" in noted
    if not is_registered:
        quick.cell(make)
    quick.cell(reduce)
    assert quick.pull("x.item()").list == [3, 3]
    if is_registered:
        assert quick.pull("group is before").list == [True, True]
    if kind in ("lazy", "stubborn"):
        acts = {"aborted", "shut down"} if kind == "lazy" else {"shut down"}
        events = f"backends.{kind.title()}.events"
        assert all(acts <= set(each) for each in quick.pull(events).list)
    assert quick.pull("dist.get_backend()").list == ["gloo", "gloo"]


def test_a_constructor_that_raises_leaves_its_group_down_and_others_work(quick: cm.Mesh) -> None:
    quick.cell(NEW_GROUP.format("lazy") + "\nbackends.Lazy.refusal = 'no more'")
    failing = f"if rank == 1: raise ValueError('mine')\n{REDUCE}"
    with pytest.raises(cm.RankFailure, match="mine"):
        quick.cell(failing)
    with pytest.raises(cm.RankFailure, match=r"Lazy, .* raised ValueError: no more"):
        quick.cell(REDUCE)
    quick.cell("backends.Lazy.refusal = ''\nx = torch.ones(1)\ndist.all_reduce(x)")
    with pytest.raises(cm.RankFailure, match="mine"):
        quick.cell(failing.replace(", group=group", ""))
    quick.cell(REDUCE)
    assert quick.pull("x.item()").list == [3, 3]


def test_a_new_rank_without_the_backend_leaves_its_group_down(own_mesh: cm.Mesh) -> None:
    own_mesh.cell(f"{IMPORT}\n{NEW_GROUP.format('lazy')}")
    with pytest.raises(cm.RankFailure, match="SIGKILL"):
        own_mesh[1].cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    own_mesh.heal()
    with pytest.raises(cm.RankFailure, match="rank 1 is without it"):
        own_mesh[0].cell(REDUCE)
    own_mesh.cell("x = torch.ones(1)\ndist.all_reduce(x)")
    assert own_mesh.pull("x.item()").list == [2, 2]


DETAIL = """
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
fully_shard(sharded, mesh=mesh)


def step(model):
    loss = model(torch.full((2, 8), 1.0 + rank)).sum()
    loss.backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None
    return loss.item()
"""


def test_with_debug_level_detail_waits_end_and_models_train_on(runtime_dir: Path) -> None:
    with cm.start(2, settle_s=0.1, env=["TORCH_DISTRIBUTED_DEBUG=DETAIL"]) as mesh:
        mesh.cell(DETAIL)
        assert mesh.pull("dist.get_debug_level().name").list == ["DETAIL"] * 2
        backend = "mesh.get_group()._get_backend(torch.device('cpu'))"
        assert set(mesh.pull(f"type({backend}).__name__").list) == {"_ProcessGroupWrapper"}
        for work in ("dist.all_reduce(torch.ones(1))", "step(ddp)", "step(sharded)"):
            mesh.cell("for model in (ddp, sharded): step(model)")
            check_release_and_stop(mesh, work)
        with pytest.raises(cm.RankFailure, match=r"rank 1 .*released"):
            mesh.cell("if rank == 0: raise ValueError('mine')\nstep(ddp)")
        mesh.cell("for model in (ddp, sharded): step(model)\nx = torch.ones(1)\ndist.all_reduce(x)")
        assert mesh.pull("x.item()").list == [2, 2]
        assert mesh.pull("dist.get_backend()").list == ["gloo", "gloo"]
        first, second = mesh.pull("[p.sum().item() for p in ddp.parameters()]").list
        assert first == second
        # What the level is for: ranks that differ are named, and the next cell works.
        with pytest.raises(cm.RankFailure, match="mismatch"):
            mesh.cell("dist.all_reduce(torch.ones(1 + rank))")
        mesh.cell("x = torch.ones(1)\ndist.all_reduce(x)")
