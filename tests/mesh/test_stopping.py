"""A stop ends all ranks at the same point of what they run, however it was asked for."""

from __future__ import annotations

import re
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
    "messages": (
        "work = dist.isend(t, after)\n    dist.recv(torch.empty(4), before)\n    work.wait()"
    ),
    "batches of messages": (
        "got = torch.empty(4)\n"
        "    ops = [dist.P2POp(dist.isend, t, after), dist.P2POp(dist.irecv, got, before)]\n"
        "    [work.wait() for work in dist.batch_isend_irecv(ops)]"
    ),
    "a program's groups": "dist.all_reduce(t, group=own); t /= 2\n    dist.barrier()",
    "objects": "everyone = [None] * world_size\n    dist.all_gather_object(everyone, n)",
    "functional": ("t = functional.all_reduce(t, 'sum', row) / 2\n    dist.barrier()"),
    "between prints": "print(n)\n    dist.all_reduce(t); t /= world_size",
    "ranks of different speed": (
        "sum(range(20000 * rank))\n    dist.all_reduce(t); t /= world_size"
    ),
}


@pytest.fixture(scope="module")
def _groups(mesh: cm.Mesh) -> None:
    mesh.cell(f"%xmode Minimal\n{SETUP}")  # tracebacks of torch take long to render


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


@pytest.mark.parametrize("body", ROUNDS.values(), ids=ROUNDS)
def test_all_ranks_have_made_the_same_rounds(grid: cm.Mesh, body: str) -> None:
    grid.cell(body.replace("\n    ", "\n"))  # the first round imports, and connects
    generation = grid[0].pull("mesh.get_group('dp')._ledger.generation")
    for _ in range(3):
        run = grid.submit_cell(loop(body))
        begin(grid, run)
        grid.interrupt()
        assert_interrupted(run)
        assert len(set(grid.pull("n").list)) == 1
    # No connection was cut: nothing had to be made again.
    assert grid[0].pull("mesh.get_group('dp')._ledger.generation") == generation


STOPS: dict[str, Callable[[cm.Mesh, Run], object]] = {
    "interrupt": lambda mesh, run: mesh.interrupt(),
    "cancel": lambda mesh, run: run.cancel(),
    "interrupt of the run": lambda mesh, run: run.interrupt(),
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


def test_ctrl_c_of_a_waiting_caller_is_a_consistent_stop(grid: cm.Mesh) -> None:
    run = grid.submit_cell(loop(ROUNDS["all_reduce"]))
    begin(grid, run)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
        run.result()
    assert len(set(grid.pull("n").list)) == 1


def test_a_stop_on_some_ranks_leaves_the_others_alone(grid: cm.Mesh) -> None:
    body = loop("dist.all_reduce(t, group=own); t /= 2")
    first, second = grid[:2].submit_cell(body), grid[2:].submit_cell(body)
    begin(grid[:2], first)
    first.interrupt()
    assert_interrupted(first)
    assert not second.done()
    assert len(set(grid[:2].pull("n").list)) == 1
    second.interrupt()
    assert_interrupted(second)
    assert len(set(grid[2:].pull("n").list)) == 1


def test_runs_that_meet_in_collectives_are_stopped_together(grid: cm.Mesh) -> None:
    body = loop("dist.all_reduce(t); t /= world_size")
    runs = [grid[rank].submit_cell(body) for rank in range(4)]
    begin(grid[3], runs[3])
    grid.interrupt()
    for run in runs:
        assert_interrupted(run)
    assert len(set(grid.pull("n").list)) == 1


def test_what_handlers_of_the_user_begin_is_not_stopped(grid: cm.Mesh) -> None:
    source = (
        "saved = 0\ntry:\n    while True:\n        dist.all_reduce(t); t /= world_size; n += 1\n"
        "finally:\n    dist.barrier(); saved = 1"
    )
    run = grid.submit_cell(source)
    begin(grid, run)
    grid.interrupt()
    assert_interrupted(run)
    assert grid.pull("saved").list == [1] * 4
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


HOOKS = """
import cellmesh
resets = []
def count(): resets.append(1)
cellmesh.on_heal(count)
def reduce(parameter): dist.all_reduce(parameter.grad)
hooked = torch.nn.Linear(2, 2)
for parameter in hooked.parameters(): parameter.register_post_accumulate_grad_hook(reduce)
"""


def test_own_code_is_reset_after_a_stop_that_the_cell_has_caught(grid: cm.Mesh) -> None:
    grid.cell(HOOKS)
    step = "hooked(torch.ones(2)).sum().backward()"
    catching = "try:\n    while True:\n        {}\nexcept KeyboardInterrupt:\n    pass"
    run = grid.submit_cell(catching.format(step))
    begin(grid, run)
    grid.interrupt()
    run.result(20)
    grid.cell(step)
    assert grid.pull("len(resets)").list == [1] * 4


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
        run = grid.submit_cell(loop(step))
        begin(grid, run)
        grid.interrupt()
        assert_interrupted(run)
        assert len(set(grid.pull("n").list)) == 1
        if "ZeRO" in make:
            assert len(set(grid.pull("m.weight.detach().sum().item()").list)) == 1
    assert "step was interrupted" not in "".join(capsys.readouterr())


def test_ranks_in_python_alone_are_stopped_where_they_are(grid: cm.Mesh) -> None:
    run = grid.submit_cell("import time\nwhile True:\n    time.sleep(0.001)")
    begin(grid, run)
    grid.interrupt()
    assert_interrupted(run)


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
    run = grid.submit_cell(source)
    begin(grid, run)
    grid.interrupt()
    assert_interrupted(run)
    grid.cell("pass")
    shown = "".join(capsys.readouterr())
    assert re.search(r"\d+ on ranks 0-2, \d+ on rank 3 \(o\): `%dist_sync m --from 0`", shown)


# What ranks begin first after a stop, or after a heal; gloo ends a process for the second one.
MEETINGS = {
    "kinds": "dist.all_reduce(t) if rank else dist.broadcast(t, 0)",
    "sizes": "dist.all_reduce(torch.ones(4000 if rank else 4))",
    "dtypes": "dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))",
    "roots": "dist.broadcast(t, rank % 2)",
}


@pytest.mark.parametrize("after", ["a stop", "a heal"])
@pytest.mark.parametrize("source", MEETINGS.values(), ids=MEETINGS)
def test_first_operations_that_cannot_meet_end_no_process(
    grid: cm.Mesh, source: str, after: str
) -> None:
    pids = grid.pull("__import__('os').getpid()").list
    if after == "a stop":
        run = grid.submit_cell(loop("dist.all_reduce(t); t /= world_size"))
        begin(grid, run)
        grid.interrupt()
        assert_interrupted(run)
    else:
        with pytest.raises(cm.RankFailure):
            grid.cell("if rank == 1: raise ValueError('odd')\ndist.barrier()")
    with pytest.raises(cm.RankFailure, match=r"these cannot meet, so this rank .* places\) \("):
        grid.cell(source)
    grid.cell("dist.barrier()")
    assert grid.pull("__import__('os').getpid()").list == pids


def test_first_operations_of_parts_and_threads_are_not_mistaken(grid: cm.Mesh) -> None:
    grid.interrupt()
    for _ in range(2):
        run = grid.submit_cell(loop("dist.all_reduce(t, group=own); t /= 2"))
        begin(grid, run)
        grid.interrupt()
        assert_interrupted(run)
        halves = [grid[[0, 1]], grid[[2, 3]]]
        parts = [
            half.submit_cell(f"dist.all_reduce(torch.ones({i + 1}), group=own)")
            for i, half in enumerate(halves)
        ]
        for part in parts:
            part.result(20)
        grid.cell("dist.all_gather([torch.empty(4) for _ in range(4)], t)\ndist.barrier()")
