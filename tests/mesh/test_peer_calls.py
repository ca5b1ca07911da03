"""Calls of other ranks that last, as their mesh knows, stops and outlives them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import RankFailure, RanksInterrupted
from tests.faults.watching import wait_until
from tests.mesh.conftest import state_of

WAIT_S = 60.0


class Generator:
    """What the tests call; a call ends once a file is there."""

    def sample(self, path: str = "") -> int:
        import os
        import time

        until = time.monotonic() + 2 * WAIT_S
        while not os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.01)
        return 1

    def reduce(self, failing: int = -1) -> float:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == failing:
            raise ValueError("no")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)

    def loop(self) -> None:
        while True:
            self.step()

    def step(self) -> int:
        import torch
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model, self.num_steps = fully_shard(torch.nn.Linear(4, 4)), 0
        self.model(torch.ones(2, 4)).sum().backward()
        self.num_steps += 1
        return self.num_steps


class Trainer:
    """Calls it."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.generator, method)(*args)


def titles(mesh: cm.Mesh) -> list[str]:
    return [run.title for run in mesh.runs]


def pid_of(mesh: cm.Mesh, rank: int) -> int:
    return mesh.report()[rank].pid


@pytest.fixture(scope="module")
def generator(meshes: tuple[cm.Mesh, cm.Mesh]) -> Any:
    """An actor on the two ranks, made again on a new one."""
    return meshes[0].spawn(Generator, on_death="restart")


def test_a_call_is_known_and_interrupted(meshes: tuple[cm.Mesh, cm.Mesh], generator: Any) -> None:
    left, right = meshes
    run = right.spawn(Trainer, generator).call.submit("sample")
    wait_until(lambda: titles(left))
    wait_until(lambda: len(left.runs[0].ranks) == 2)
    title = "generator.sample for right 0"
    assert str(left.runs[0]) == f"{title} on ranks 0-1: waits for ranks 0-1"
    served = state_of(left, 0).serves
    assert served is not None
    assert (served.title, served.ranks) == (title, (0, 1))
    left.interrupt()
    with pytest.raises(RankFailure, match=r"generator.sample on left 0 was interrupted there"):
        run.result(WAIT_S)
    wait_until(lambda: not titles(left))


def test_a_collective_is_left_with_the_caller_and_by_ranks_whose_peer_fails(
    meshes: tuple[cm.Mesh, cm.Mesh], generator: Any
) -> None:
    left, right = meshes
    part = right.spawn(Trainer, generator[0], name="part")
    run = part.call.submit("reduce")
    wait_until(lambda: state_of(left, 0).collective)
    run.cancel()
    with pytest.raises(RanksInterrupted):
        run.result(WAIT_S)
    wait_until(lambda: state_of(left, 0).run < 0 and not titles(left))
    whole = right.spawn(Trainer, generator, name="whole")
    with pytest.raises(RankFailure, match="Released"):
        whole.call.submit("reduce", 1).result(WAIT_S)
    wait_until(lambda: not titles(left))
    left.run(int)  # waits for the heal
    assert whole.call("reduce") == {0: 2.0, 1: 2.0}


def test_ranks_whose_caller_stops_waiting_stand_before_the_same_operation(
    meshes: tuple[cm.Mesh, cm.Mesh], generator: Any
) -> None:
    left, right = meshes
    trainer = right.spawn(Trainer, generator, name="looping")
    assert generator.step() == {0: 1, 1: 1}
    for _ in range(3):
        run = trainer.call.submit("loop")
        wait_until(lambda: titles(left) and len(left.runs[0].ranks) == 2)
        run.cancel()
        with pytest.raises(RanksInterrupted):
            run.result(WAIT_S)
        # Sent behind the call, as the user's next cell: it begins after the models' reset.
        first, second = (generator.step() for _ in range(2))
        assert [*second.values()] == [first[0] + 1] * 2
        assert generator.reduce() == {0: 2.0, 1: 2.0}


def test_a_dead_rank_is_replaced_at_the_end_of_a_call_and_a_caller_ends_its_calls(
    meshes: tuple[cm.Mesh, cm.Mesh], generator: Any, tmp_path: Any
) -> None:
    left, right = meshes
    one = right.spawn(Trainer, generator[0], name="one")
    run = one.call.submit("sample", str(tmp_path / "end"))
    wait_until(lambda: titles(left))
    os.kill(pid_of(left, 1), signal.SIGKILL)
    wait_until(lambda: left.rank_set.session.dead_ranks)
    assert not run.done()
    (tmp_path / "end").touch()
    assert run.result(WAIT_S) == 1
    wait_until(lambda: not left.rank_set.session.dead_ranks)
    assert left.heal().failure == ""  # waits until the actor is made again
    assert generator.reduce() == {0: 2.0, 1: 2.0}
    one.call.submit("sample")
    wait_until(lambda: titles(left))
    os.kill(pid_of(right, 0), signal.SIGKILL)
    wait_until(lambda: not titles(left) and state_of(left, 0).run < 0)
