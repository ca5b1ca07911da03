"""Process groups over two meshes of real ranks, and failures on either side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError, NoMeshError, RankDied, RankFailure
from tests.conftest import own_runtime_dir

from .conftest import state_of

WAIT_S = 90.0
CODE = """
import os, signal
import torch, torch.distributed as dist
import cellmesh as cm

def total(name="weights"):
    group = cm.group(name)
    value = torch.tensor([10.0 ** group.rank()])
    dist.all_reduce(value, group=group)
    return int(value)

def take(name="weights", source=0):
    group = cm.group(name)
    value = torch.full((3,), float(group.rank() + 1))
    dist.broadcast(value, source, group=group)
    return value.tolist()

def publish(model):
    for value in model.state_dict().values():
        dist.broadcast(value.full_tensor(), 0, group=cm.group("weights"))

def follow(model):
    for value in model.state_dict().values():
        dist.broadcast(value, 0, group=cm.group("weights"))
    return [value.tolist() for value in model.state_dict().values()]
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[cm.Mesh, cm.Mesh]]:
    with (
        own_runtime_dir(),
        cm.start(2, name="trainer", settle_s=0.5) as trainer,
        cm.start(2, name="generator", settle_s=0.5) as generator,
    ):
        for mesh in (trainer, generator):
            mesh.cell(CODE)
        cm.link(trainer, generator, timeout_s=WAIT_S)
        yield trainer, generator


def at_rank(expression: str) -> Any:
    """Evaluate an expression in the namespace of a rank."""
    from IPython.core.getipython import get_ipython

    return eval(expression, get_ipython().user_ns)


def both(pair: tuple[cm.Mesh, cm.Mesh], call: str) -> list[Any]:
    """The values of a call on all ranks of both meshes."""
    runs = [mesh.submit(at_rank, call) for mesh in pair]
    return [value for run in runs for value in run.result(WAIT_S).values()]


def wait_in_link(mesh: cm.Mesh, call: str = "take()") -> cm.Run[Any]:
    """Begin a call on all ranks, which wait in the link's group when this returns."""
    run = mesh.submit(at_rank, call)
    for rank in mesh.ranks:
        while " on the link '" not in state_of(mesh, rank).collective:
            assert not run.done()
    return run


def failure(run: cm.Run[Any]) -> str:
    with pytest.raises(RankFailure) as caught:
        run.result(WAIT_S)
    return str(caught.value)


def test_ranks_of_both_meshes_share_a_group(pair: tuple[cm.Mesh, cm.Mesh]) -> None:
    assert both(pair, "total()") == [1111] * 4
    assert both(pair, "take(source=3)") == [[4.0] * 3] * 4
    trainer, generator = pair
    generator[1].submit(at_rank, "dist.send(torch.ones(2), 0, group=cm.group('weights'))")
    got = trainer[0].submit(
        at_rank, "(got := torch.zeros(2), dist.recv(got, 3, group=cm.group('weights')))"
    )
    assert got.result(WAIT_S)[0].tolist() == [1.0, 1.0]
    trainer.cell("from torch.distributed.fsdp import fully_shard")
    trainer.cell("model = fully_shard(torch.nn.Linear(5, 3))")
    generator.cell("model = torch.nn.Linear(5, 3)")
    sent = trainer.submit(at_rank, "publish(model)")
    taken = generator.run(at_rank, "follow(model)").list
    sent.result(WAIT_S)
    whole = "[value.full_tensor().tolist() for value in model.state_dict().values()]"
    assert trainer.run(at_rank, whole).list == taken
    waiting = wait_in_link(generator)
    assert "wait in broadcast on the link 'weights'" in generator.why()
    assert trainer.run(at_rank, "take()").list == waiting.result(WAIT_S).list


def test_failures_on_either_side_release_the_other_and_the_link_works_again(
    pair: tuple[cm.Mesh, cm.Mesh],
) -> None:
    trainer, generator = pair
    waiting = wait_in_link(generator)
    assert "raised ZeroDivisionError" in failure(trainer.submit(at_rank, "1 / (rank == 1)"))
    text = "waited in broadcast on the link 'weights' (rank 0 of trainer raised ZeroDivisionError)"
    assert text in failure(waiting)
    assert both(pair, "total()") == [1111] * 4

    waiting = wait_in_link(trainer)
    waiting.interrupt()
    with pytest.raises(KeyboardInterrupt):
        waiting.result(WAIT_S)
    assert both(pair, "total()") == [1111] * 4


def test_a_rank_that_is_killed_costs_neither_mesh(pair: tuple[cm.Mesh, cm.Mesh]) -> None:
    trainer, generator = pair
    pids = generator.pull("os.getpid()")
    waiting = wait_in_link(generator), wait_in_link(trainer[1:])
    trainer[0].submit(at_rank, "os.kill(os.getpid(), signal.SIGKILL)").wait(WAIT_S)
    for run in waiting:
        assert "on the link 'weights'" in failure(run)
    down = failure(generator.submit(at_rank, "total()"))
    assert "link 'weights' is down: rank 0 of trainer was killed by SIGKILL" in down
    assert "%dist_heal --on trainer" in down
    assert generator.run(at_rank, "(dist.barrier(), world_size)[1]").list == [2, 2]
    with pytest.raises(RankDied, match="dist_heal"):
        cm.link(trainer, generator, "other")

    trainer.heal()
    trainer[0].cell(CODE)
    assert both(pair, "total()") == [1111] * 4
    assert generator.pull("os.getpid()") == pids


def test_bad_input_is_refused_by_name(pair: tuple[cm.Mesh, cm.Mesh]) -> None:
    trainer, generator = pair
    link: Callable[..., Any] = cm.link
    for args, text in (
        ((trainer, trainer), "trainer cannot be linked with itself"),
        ((trainer, "generator"), "takes two meshes, and 'generator' is none"),
        ((trainer, generator), "trainer has a link 'weights' .* choose another name"),
        ((trainer, generator, "a b"), "'a b' is no name of a link"),
    ):
        with pytest.raises(MeshUsageError, match=text):
            link(*args)
    with pytest.raises(MeshUsageError, match="is for code on ranks"):
        cm.group("weights")
    assert "no link 'weight' (there is weights)" in failure(
        trainer.submit(at_rank, "cm.group('weight')")
    )


def test_a_mesh_without_a_group_takes_part_until_it_ends(pair: tuple[cm.Mesh, cm.Mesh]) -> None:
    trainer, _ = pair
    with cm.start(1, name="scorer", group=False) as scorer:
        scorer.cell(CODE)
        link = cm.link(scorer, trainer, "scores", timeout_s=WAIT_S)
        runs = [each.submit(at_rank, "total('scores')") for each in (scorer, trainer)]
        assert runs[0].result(WAIT_S)[0] == 111
        assert runs[1].result(WAIT_S).list == [111, 111]
        waiting = wait_in_link(trainer, "take('scores')")
        assert "2 ranks" in repr(link)
    assert "(scorer has ended)" in failure(waiting)
    assert "no link 'scores'" in failure(trainer.submit(at_rank, "total('scores')"))
    with pytest.raises(NoMeshError):
        cm.link(scorer, trainer, "again")
    assert both(pair, "total()") == [1111] * 4
