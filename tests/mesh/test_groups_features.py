"""All of torch.distributed does through our groups what it does through torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.mesh.forked import Rank, World
from tests.mesh.models import KINDS, Models

Feature = Callable[[], Any]


def _queries(rank: Rank) -> Iterator[tuple[str, Feature]]:
    tp = rank.mesh.get_group("tp")
    world = c10d._get_default_group()
    yield "get_backend", lambda: (dist.get_backend(), dist.get_backend(tp))
    yield "backend config", lambda: (c10d.get_backend_config(), c10d.get_backend_config(tp))
    yield "backend's name", lambda: (world.name(), world._get_backend(torch.device("cpu")).name())
    yield "sizes", lambda: (dist.get_world_size(), dist.get_world_size(tp), tp.size(), tp.rank())
    yield (
        "ranks",
        lambda: (dist.get_process_group_ranks(tp), dist.get_rank(tp), dist.get_global_rank(tp, 1)),
    )
    yield "names", lambda: (world.group_name, tp.group_name, world.group_desc, tp.group_desc)
    yield "by name", lambda: c10d._resolve_process_group(tp.group_name) is tp
    yield "by ranks", lambda: c10d._find_or_create_pg_by_ranks_and_tag("", [*_ranks(tp)], 2) is tp
    yield (
        "mesh",
        lambda: (rank.mesh.get_coordinate(), rank.mesh["tp"].get_local_rank(), rank.mesh.shape),
    )
    yield "flattened", lambda: dist.get_process_group_ranks(rank.mesh._flatten("all").get_group())
    yield "config of all", lambda: [one["pg_name"] for one in c10d._get_all_pg_configs()]
    yield "is a group", lambda: isinstance(tp, dist.ProcessGroup)
    yield "split_group", lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]])
    yield "pickle", lambda: __import__("pickle").dumps(tp)


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _collectives(rank: Rank) -> Iterator[tuple[str, Feature]]:
    me, tensor = rank.rank, torch.arange(4.0) + rank.rank

    def result(call: Callable[[torch.Tensor], Any]) -> Feature:
        def run() -> Any:
            mine = tensor.clone()
            out = call(mine)
            return (mine.tolist(), out if not isinstance(out, dist.Work) else "work")

        return run

    def gather(mine: torch.Tensor) -> Any:
        parts = [torch.zeros(4) for _ in range(4)]
        dist.all_gather(parts, mine)
        return [part.tolist() for part in parts]

    def into(mine: torch.Tensor) -> Any:
        out, part = torch.zeros(16), torch.zeros(1)
        dist.all_gather_into_tensor(out, mine)
        dist.reduce_scatter_tensor(part, mine)
        return out.tolist(), part.tolist()

    def to_all(mine: torch.Tensor) -> Any:
        out, parts = torch.zeros(4), [torch.zeros(1) for _ in range(4)]
        dist.all_to_all_single(out, mine)
        dist.all_to_all(parts, list(mine.split(1)))
        return out.tolist(), [part.item() for part in parts]

    def rooted(mine: torch.Tensor) -> Any:
        part = torch.zeros(4)
        dist.scatter(
            part, [torch.full((4,), float(i)) for i in range(4)] if me == 1 else None, src=1
        )
        dist.reduce(mine, 2)
        dist.gather(mine, [torch.zeros(4) for _ in range(4)] if me == 0 else None)
        dist.broadcast(mine, 3)
        return part.tolist()

    def objects(mine: torch.Tensor) -> Any:
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, {"rank": me})
        told = [f"from {me}"]
        dist.broadcast_object_list(told, src=2)
        given: list[Any] = [None]
        dist.scatter_object_list(given, ["a", "b", "c", "d"], src=0)
        return found, told, given

    def messages(mine: torch.Tensor) -> Any:
        got = torch.zeros(4)
        ops = [
            dist.P2POp(dist.isend, mine, (me + 1) % 4),
            dist.P2POp(dist.irecv, got, (me - 1) % 4),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if me == 0:
            return [dist.recv(got) for _ in range(3)].sort(), got.numel()
        dist.send(mine, 0)
        return got.tolist()

    def asynchronous(mine: torch.Tensor) -> Any:
        work = dist.all_reduce(mine, async_op=True)
        assert work is not None
        work.wait()
        again = dist.all_reduce(mine, async_op=True)
        assert again is not None
        return again.get_future().wait()[0].tolist()

    def subgroup(mine: torch.Tensor) -> Any:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=50))
        if me < 2:
            dist.all_reduce(mine, group=group)
        local = dist.new_group([2, 3], use_local_synchronization=True)
        if me >= 2:
            dist.all_reduce(mine, group=local)
        subgroups, _ = dist.new_subgroups(2)
        dist.all_reduce(mine, group=subgroups)
        return group is dist.GroupMember.NON_GROUP_MEMBER, local is None

    yield "all_reduce", result(dist.all_reduce)
    yield "all_reduce max", result(lambda mine: dist.all_reduce(mine, dist.ReduceOp.MAX))
    yield "coalesced", result(lambda mine: dist.all_reduce_coalesced([mine, mine.clone()]))
    yield "barriers", result(lambda mine: (dist.barrier(), dist.monitored_barrier()))
    for call in (gather, into, to_all, rooted, objects, messages, asynchronous, subgroup):
        yield call.__name__, result(call)
    yield "functional", lambda: functional.all_gather_tensor(tensor, 0, dist.group.WORLD).tolist()
    yield (
        "functional on a dim",
        lambda: functional.all_reduce(tensor, "sum", (rank.mesh, 1)).tolist(),
    )

    def compiled() -> Any:
        @torch.compile(backend="aot_eager", fullgraph=True)
        def reduce(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

        @torch.compile(backend="aot_eager")
        def in_place(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x + 1

        return reduce(tensor).tolist(), in_place(tensor.clone()).tolist()

    yield "torch.compile", compiled


def _above(rank: Rank) -> Iterator[tuple[str, Feature]]:
    models = Models(rank)
    for kind in KINDS:
        yield kind, lambda kind=kind: [models.step(kind, step) for step in range(3)]

    def redistribute() -> Any:
        whole = distribute_tensor(torch.arange(32.0).reshape(8, 4), rank.mesh, [Shard(0), Shard(1)])
        return whole.redistribute(rank.mesh, [Replicate(), Shard(0)]).full_tensor().tolist()

    def zero() -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(8, 8))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict()
        return model.module.weight.sum().item()

    def join() -> Any:
        from torch.distributed.algorithms.join import Join

        model = DistributedDataParallel(nn.Linear(8, 8))
        with Join([model]):
            for _ in range(2 + rank.rank):
                model(torch.ones(2, 8)).sum().backward()
        # Of the number of ranks that still train DDP's C++ learns from a Work that Python no longer
        # holds.
        alone = DistributedDataParallel(nn.Linear(2, 2))
        with Join([alone], divide_by_initial_world_size=False):
            for _ in range(rank.rank // 3):
                alone(torch.ones(2, 2)).sum().backward()
        gradient = alone.module.weight.grad
        return None if gradient is None else gradient.tolist()

    def ddp_options() -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        torch.manual_seed(1)
        model = DistributedDataParallel(
            nn.Linear(4, 4), gradient_as_bucket_view=True, find_unused_parameters=True
        )
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        other = DistributedDataParallel(nn.Linear(4, 4))
        other.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        other(torch.ones(2, 4)).sum().backward()
        return other.module.weight.grad.sum().item()

    def counted() -> Any:
        from torch.distributed.tensor.debug import CommDebugMode

        with CommDebugMode() as mode:
            left = distribute_tensor(torch.ones(4, 4), rank.mesh["tp"], [Shard(0)])
            (left @ distribute_tensor(torch.ones(4, 4), rank.mesh["tp"], [Shard(1)])).full_tensor()
        return mode.get_total_counts()

    for call in (redistribute, zero, join, ddp_options, counted):
        yield call.__name__, call
    yield "destroyed", lambda: dist.destroy_process_group(rank.mesh.get_group("tp"))
    yield "all destroyed", lambda: (dist.destroy_process_group(), dist.is_initialized())


def _run(rank: Rank) -> dict[str, Any]:
    """What each feature gives: its value, or the error that it raises."""
    warnings.simplefilter("ignore")  # what torch calls deprecated still has to work
    found: dict[str, Any] = {}
    for features in (_queries(rank), _collectives(rank), _above(rank)):
        for name, feature in features:
            try:
                found[name] = feature()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return found


def test_every_feature_gives_what_it_gives_under_torchrun() -> None:
    results = []
    for plain in (True, False):
        with World(4, {"dp": 2, "tp": 2}, plain=plain) as world:
            results.append(world.run(_run))
    for theirs, ours in zip(*results, strict=True):
        assert {name: ours.get(name) for name in theirs} == theirs
    failed = {
        name for name, value in results[0][0].items() if isinstance(value, str) and "Error" in value
    }
    assert failed == {"split_group", "pickle"}, "what torch itself refuses has changed"
