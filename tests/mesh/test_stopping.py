"""A stop ends all ranks at the same point of what they run, however it was asked for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

import cellmesh as cm
from cellmesh.controller.run import Run
from cellmesh.errors import RanksInterrupted

from .conftest import state_of

SETUP = """
import torch.distributed._functional_collectives as functional
pair = dist.new_group([0, 1])
other = dist.new_group([2, 3])
own = pair if rank < 2 else other
row, column = mesh["tp"].get_group(), mesh["dp"].get_group()
after, before = (rank + 1) % world_size, (rank - 1) % world_size
"""
# Each makes one round of a loop.
ROUNDS = {
    "all_reduce": "dist.all_reduce(t); t /= world_size",
    "nested groups": (
        "dist.all_reduce(t, group=row)\n    dist.all_reduce(t, group=column)\n"
        "    dist.all_reduce(t, group=row)\n    dist.barrier()\n    t /= 8"
    ),
    "asynchronous": (
        "works = [dist.all_reduce(t.clone(), async_op=True) for _ in range(3)]\n"
        "    dist.all_reduce(t); t /= world_size\n    [work.wait() for work in works]"
    ),
    "batches of messages": (
        "got = torch.empty(4)\n"
        "    ops = [dist.P2POp(dist.isend, t, after), dist.P2POp(dist.irecv, got, before)]\n"
        "    [work.wait() for work in dist.batch_isend_irecv(ops)]"
    ),
    "a program's groups": "dist.all_reduce(t, group=own); t /= 2\n    dist.barrier()",
    "functional": ("t = functional.all_reduce(t, 'sum', row) / 2\n    dist.barrier()"),
    "ranks of different speed": (
        "sum(range(20000 * rank))\n    dist.all_reduce(t); t /= world_size"
    ),
}


@pytest.fixture(scope="module")
def _groups(mesh: cm.Mesh) -> None:
    mesh.cell(SETUP)


@pytest.fixture
def grid(mesh: cm.Mesh, _groups: None) -> cm.Mesh:
    mesh.cell("n, t = 0, torch.ones(4)")
    return mesh


def loop(body: str) -> str:
    return f"while True:\n    {body}\n    n += 1"


def begin(mesh: cm.Mesh, run: Run) -> None:
    """Wait until every rank is some rounds into its loop."""
    while any(state.run != run.number or not state.counts for state in mesh.states().values()):
        threading.Event().wait(0.05)
    threading.Event().wait(0.2)


def assert_interrupted(run: Run) -> None:
    with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
        run.result(20)


def stop_within(mesh: cm.Mesh, source: str) -> None:
    """Run a cell and stop it, some rounds into its loop."""
    run = mesh.submit_cell(source)
    begin(mesh, run)
    mesh.interrupt()
    assert_interrupted(run)


@pytest.mark.parametrize("body", ROUNDS.values(), ids=ROUNDS)
def test_all_ranks_have_made_the_same_rounds(grid: cm.Mesh, body: str) -> None:
    grid.cell(body.replace("\n    ", "\n"))  # the first round imports, and connects
    generation = grid[0].pull("mesh.get_group('dp')._ledger.generation")
    for _ in range(3):
        stop_within(grid, loop(body))
        assert len(set(grid.pull("n").list)) == 1
    # No connection was cut: nothing had to be made again.
    assert grid[0].pull("mesh.get_group('dp')._ledger.generation") == generation


STOPS: dict[str, Callable[[cm.Mesh, Run], object]] = {
    "interrupt": lambda mesh, run: mesh.interrupt(),
    "cancel": lambda mesh, run: run.cancel(),
    "interrupt of the run": lambda mesh, run: run.interrupt(),
    "ctrl-C of the waiting caller": lambda mesh, run: threading.Timer(
        0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    ).start(),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_each_way_to_stop_is_a_consistent_one(
    grid: cm.Mesh, stop: Callable[[cm.Mesh, Run], object]
) -> None:
    run = grid.submit_cell(loop(ROUNDS["all_reduce"]))
    begin(grid, run)
    stop(grid, run)
    assert_interrupted(run)
    assert len(set(grid.pull("n").list)) == 1


def test_a_model_goes_on_after_a_stop_that_the_cell_has_caught(grid: cm.Mesh) -> None:
    """Caught inside a backward pass, for the rest of which DDP's reducer would wait."""
    step = "m(torch.ones(2)).sum().backward()"
    grid.cell(f"m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n{step}")
    catching = "try:\n    while True:\n        {}; n += 1\nexcept KeyboardInterrupt:\n    pass"
    run = grid.submit_cell(catching.format(step))
    begin(grid, run)
    grid.interrupt()
    run.result(20)
    assert len(set(grid.pull("n").list)) == 1
    grid.cell(step)


# Each reduces in its step, between changes of parameters.
REDUCING = {
    "ZeRO": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "o = ZeroRedundancyOptimizer(m.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)"
    ),
    "a program's": (
        "class Reducing(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        super().step()\n"
        "        for p in m.parameters(): dist.all_reduce(p.data); p.data /= world_size\n"
        "o = Reducing(m.parameters(), lr=0.1)"
    ),
}


@pytest.mark.parametrize("make", REDUCING.values(), ids=REDUCING)
def test_a_step_that_reduces_is_completed(
    grid: cm.Mesh, make: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else in the loop does, so that each stop meets a step's operation."""
    grid.cell(f"torch.manual_seed(0)\nm = torch.nn.Linear(2, 2)\n{make}")
    step = "m(torch.randn(2)).sum().backward(); o.step(); o.zero_grad()"
    grid.cell(step)
    for _ in range(3):
        stop_within(grid, loop(step))
        assert len(set(grid.pull("n").list)) == 1
        if "ZeRO" in make:
            assert len(set(grid.pull("m.weight.detach().sum().item()").list)) == 1
    assert "step was interrupted" not in "".join(capsys.readouterr())


def test_a_rank_that_leaves_the_others_waiting_is_named(
    grid: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 3 never gets to the operation that the others are in."""
    run = grid.submit_cell("import time\nif rank == 3:\n    time.sleep(600)\ndist.all_reduce(t)")
    while not all(state_of(grid, rank).collective for rank in range(3)):
        threading.Event().wait(0.05)
    grid.interrupt()
    assert_interrupted(run)
    grid.cell("dist.barrier()")
    shown = "".join(capsys.readouterr())
    assert "ranks 0-3 did not get to the same operation within 1 s" in shown
    assert "process groups rebuilt" in shown
    assert "untouched" not in shown  # replicas may differ


def test_a_stop_after_different_numbers_of_steps_says_so(
    grid: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    grid.cell("m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), lr=0.1)")
    source = (
        "import time\nfor _ in range(2 if rank == 3 else 1):\n"
        "    m(torch.ones(2)).sum().backward(); o.step()\ntime.sleep(600)"
    )
    stop_within(grid, source)
    grid.cell("pass")
    shown = "".join(capsys.readouterr())
    assert "rank 3 has made one step more than ranks 0-2 (o): `%dist_sync m --from 0`" in shown


# What ranks begin first after a stop, or after a heal; gloo ends a process for the second one.
MEETINGS = {
    "sizes": "dist.all_reduce(torch.ones(4000 if rank else 4))",
    "roots": "dist.broadcast(t, rank % 2)",
}


@pytest.mark.parametrize("after", ["a stop", "a heal"])
@pytest.mark.parametrize("source", MEETINGS.values(), ids=MEETINGS)
def test_first_operations_that_cannot_meet_end_no_process(
    grid: cm.Mesh, source: str, after: str
) -> None:
    pids = grid.pull("__import__('os').getpid()").list
    if after == "a stop":
        stop_within(grid, loop("dist.all_reduce(t); t /= world_size"))
    else:
        with pytest.raises(cm.RankFailure):
            grid.cell("if rank == 1: raise ValueError('odd')\ndist.barrier()")
    with pytest.raises(cm.RankFailure, match=r"these cannot meet, so this rank .* places\) \("):
        grid.cell(source)
    grid.cell("dist.barrier()")
    assert grid.pull("__import__('os').getpid()").list == pids
