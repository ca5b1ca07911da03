"""After a cell that failed, the next step of the same objects is an undisturbed one's, bit for
bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch.distributed.pipelining as pipelining

import cellmesh as cm
from cellmesh.errors import RankFailure
from tests.conftest import clean_runtime_dir
from tests.mesh import training
from tests.mesh.conftest import Recorder
from tests.mesh.training import InBackward, Pipeline, Trainer, compiled, ddp, fsdp1, fsdp2

NUM_RANKS = 4
ALL = tuple(range(NUM_RANKS))

# A place where a fault strikes, the ranks that it strikes, and how many passes it lets by.
Fault = tuple[str, tuple[int, ...], int]
partial = functools.partial


@pytest.fixture(scope="module")
def quick() -> Iterator[cm.Mesh]:
    """Four ranks that are released a moment after one has failed."""
    dims, preload = {"dp": 2, "tp": 2}, "tests.mesh.training"
    # A heal collects garbage, and does not go through the modules of the zygote, which are frozen.
    with (
        clean_runtime_dir(),
        cm.start(NUM_RANKS, mesh=dims, settle_s=0.05, preload=preload) as started,
    ):
        started.cell("%xmode Minimal\nfrom tests.mesh import training")
        yield started


def _fail(mesh: cm.Mesh, number: int, fault: Fault) -> Recorder:
    """Have a step struck by a fault; returns what is told of it."""
    place, ranks, num_skipped = fault
    recorder = Recorder()
    source = (
        f"if rank in {ranks}: training.arm({place!r}, {num_skipped})\n"
        f"try: training.steps('trainer', 1, {number})\n"
        "finally: training.disarm()"
    )
    with pytest.raises(RankFailure):
        mesh.submit_cell(source, sink=recorder).result()
    return recorder


def _check(mesh: cm.Mesh, make_trainer: Callable[[], Any], faults: Sequence[Fault]) -> None:
    """Strike a step by each fault, and take it again."""
    mesh.run(training.make, make_trainer)
    wanted = mesh.run(training.steps, "twin", len(faults))
    for number, fault in enumerate(faults):
        _fail(mesh, number, fault)
        found = mesh.run(training.steps, "trainer", 1, number)
        for rank in ALL:
            assert found[rank] == wanted[rank][number : number + 1], (rank, number, fault)


SCHEDULES = [name for name in pipelining.__all__ if name.startswith("Schedule")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelines(quick: cm.Mesh, name: str) -> None:
    last = 0 if name.removeprefix("Schedule") in ("ZBVZeroBubble", "DualPipeV") else NUM_RANKS - 1
    number = SCHEDULES.index(name)
    first, second, third = ((number + i) % NUM_RANKS for i in range(3))
    # Of two schedules after each other, which share their runtime, one meets half of the places.
    faults: list[Fault] = (
        [("forward", (first,), 2), ("before", (second,), 0), ("after", ALL, 0)]
        if number % 2
        else [("backward", (first,), 2), ("loss", (last,), 2)]
    )
    # The gradients of weights are apart, where they are what fills bubbles.
    if "ZeroBubble" in name or "DualPipeV" in name or not number % 2:
        faults.append(("weight", (third,), 2))
    _check(quick, partial(Pipeline, name), faults)


TRAINERS: dict[str, Callable[[], Any]] = {
    "DDP": partial(Trainer, ddp),
    "DDP, no_sync": partial(Trainer, ddp, without_sync=training.no_sync),
    "DDP, static graph": partial(Trainer, partial(ddp, static_graph=True)),
    "DDP, unused parameters": partial(Trainer, partial(ddp, find_unused_parameters=True)),
    "DDP, checkpointed": partial(Trainer, ddp, is_checkpointed=True),
    "DDP, scaled": partial(Trainer, ddp, is_scaled=True),
    "DDP, joined": partial(Trainer, ddp, is_joined=True),
    "DDP, fp16": partial(Trainer, partial(ddp, hook="fp16")),
    "DDP, compiled": partial(Trainer, compiled(partial(ddp, bucket_cap_mb=25))),
    "DDP, ZeRO": partial(Trainer, ddp, make_optimizer=training.zero),
    "FSDP1": partial(Trainer, fsdp1),
    "FSDP2": partial(Trainer, fsdp2, is_scaled=True),
    "FSDP2, prefetched, accumulated": partial(
        Trainer, partial(fsdp2, prefetches=True), without_sync=training.unsynced
    ),
    "FSDP2, compiled, checkpointed": partial(Trainer, compiled(fsdp2), is_checkpointed=True),
    "HSDP": partial(Trainer, partial(fsdp2, shape=(2, 2)), without_sync=training.unsynced),
}


FAULTS: list[Fault] = [
    ("backward", (3,), 1),
    ("forward", (0,), 1),
    ("loss", ALL, 0),
    ("after", (1,), 0),
    ("optimizer", ALL, 0),
    ("backward", ALL, 2),
]
# Trainers that meet all faults: one of each class that keeps state over a step. The others differ
# from these in options, and meet two faults and those of their own.
HEADS = ("DDP", "FSDP1", "FSDP2")
ACCUMULATING = ("no_sync", "accumulated", "HSDP")


def _faults_of(name: str) -> list[Fault]:
    """Return the faults that a trainer meets; each trainer meets one within a backward pass."""
    number = list(TRAINERS).index(name)
    # Each of the first three strikes some trainers' first step, as the last does. None that lets
    # DDP end its first backward pass does: buckets are put in another order then, and the step
    # taken again sums up in another order.
    first = number % 3
    faults = FAULTS[first:3] + FAULTS[:first] + FAULTS[3:]
    if name not in HEADS:
        faults = [FAULTS[5 if number % 2 else 0], FAULTS[1 + number // 2 % 4]]
    if any(word in name for word in ACCUMULATING):
        faults += [("backward", (2,), 4), ("loss", ALL, 1), ("forward", (1,), 7)]
    return faults


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(quick: cm.Mesh, name: str) -> None:
    _check(quick, TRAINERS[name], _faults_of(name))


def test_ranks_that_failed_on_both_sides_of_a_forward_pass_agree_in_no_sync(quick: cm.Mesh) -> None:
    # Rank 1 has ended the forward pass whose gradients are to be reduced, the others are before it:
    # nothing is half done, but the next backward pass of rank 1 would reduce, within no_sync too.
    make_trainer = partial(Trainer, ddp, without_sync=training.no_sync)
    quick.run(training.make, make_trainer)
    wanted = quick.run(training.steps, "twin", 4)
    source = (
        "training.arm(*(('loss', 2) if rank == 1 else ('before', 0)))\n"
        "try: training.steps('trainer', 1, {})\n"
        "finally: training.disarm()"
    )
    for number in range(3):  # DDP orders its buckets between the first two
        with pytest.raises(RankFailure):
            quick.cell(source.format(number))
        found = quick.run(training.steps, "trainer", 1, number)
        assert [found[rank] for rank in ALL] == [wanted[rank][number : number + 1] for rank in ALL]
    # A cell that fails elsewhere leaves a forward pass whose backward pass is to follow.
    quick.cell(
        "model = training._trainers['trainer'].model\nx = torch.ones(2, 8) + rank\n"
        "model.zero_grad()\nloss = model(x).sum()"
    )
    with pytest.raises(RankFailure):
        quick[1].cell("1 / 0")
    quick.cell("loss.backward()\nsums = [p.grad.sum().item() for p in model.parameters()]")
    assert len({tuple(each) for each in quick.pull("sums").list}) == 1


DROPPED = "gradients of the unfinished step are dropped"
NOTES = {
    "dropped": (partial(Trainer, ddp), f"{DROPPED} (DDP)"),
    # In one bucket: in several, its callbacks wait for each other, under torchrun as well (gloo).
    # (batched_powerSGD_hook raises an AssertionError in each step that it is to compress, as it
    # does alone.)
    "PowerSGD": (
        partial(Trainer, partial(ddp, hook="PowerSGD", bucket_cap_mb=25)),
        "PowerSGD starts over",
    ),
    "optimizers in hooks": (
        partial(InBackward, training.with_hooks),
        "may have updated some: %dist_check",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_dropped_and_unresettable_state_is_reported_and_the_next_step_works(
    quick: cm.Mesh, name: str
) -> None:
    make_trainer, words = NOTES[name]
    quick.run(training.make, make_trainer)
    quick.run(training.steps, "trainer", 4)
    assert words in _fail(quick, 4, ("backward", (2,), 1)).wait_for_note("process groups rebuilt")
    found = quick.run(training.steps, "trainer", 2, 4)
    if name != "optimizers in hooks":  # its shards differ, as they should
        assert [each[2:] for each in found[0]] == [each[2:] for each in found[3]]


REGISTER = """
import cellmesh

resets = []
cellmesh.on_heal(training._trainers['trainer'].model.reset)


@cellmesh.on_heal
def note_heal():
    resets.append(dist.get_rank())


@cellmesh.on_heal
def refuse():
    raise ValueError('not today')
"""


def test_own_data_parallel_code_is_named_and_its_reset_is_called(quick: cm.Mesh) -> None:
    make_own = partial(Trainer, training.OwnReplicas)
    quick.run(training.make, make_own)
    wanted = quick.run(training.steps, "twin", 3)
    found = quick.run(training.steps, "trainer", 1)
    assert [found[rank][0] for rank in ALL] == [wanted[rank][0] for rank in ALL]
    note = _fail(quick, 1, ("backward", (2,), 0)).wait_for_note("process groups rebuilt")
    assert "training.OwnReplicas._finish`, queued for the end of a backward pass, was cut" in note
    assert "cellmesh.on_heal(callback)" in note

    quick.run(training.make, make_own)
    wanted = quick.run(training.steps, "twin", 3)
    for _ in range(2):  # a cell that is run again
        quick.cell(REGISTER)
    for number, place in enumerate(("backward", "forward", "loss")):
        note = _fail(quick, number, (place, (2,), 0)).wait_for_note("process groups rebuilt")
        assert "on_heal: `refuse` raised ValueError: not today" in note
        found = quick.run(training.steps, "trainer", 1, number)
        assert [found[rank] for rank in ALL] == [wanted[rank][number : number + 1] for rank in ALL]
    assert quick.pull("len(resets)").list == [3] * NUM_RANKS
