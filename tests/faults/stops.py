"""Stops training loops at random instants, and checks that every stop is a consistent cut.

After each stop all ranks have made the same number of steps and replicas are equal; the loop then
goes on. At the end the same number of steps is made without a stop: parameters were the same, bit
for bit, at each step at which the loop was stopped.

``python -m tests.faults.stops --times 200`` stops each loop so often, and prints how long stops
took.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import cellmesh as cm
from cellmesh.errors import RanksInterrupted

from .models import DIMS, NUM_RANKS, PRELOAD
from .watching import Shown

# `step` makes the n-th step, whose data depend on n only; `state` is equal on all ranks of a row
# of `replicas`.
_COMMON = '''
import hashlib
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
nn = torch.nn


class Samples(torch.utils.data.Dataset):
    """Its index is a step: what a step is given depends on nothing else."""

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index * 7 + part)
        return torch.randn(8, 16, dtype=torch.float64, generator=generator)

    def __len__(self):
        return 1_000_000


class From(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(n, 1_000_000))


def batches(num_workers=0):
    return torch.utils.data.DataLoader(
        Samples(), batch_size=None, sampler=From(), num_workers=num_workers
    )


def net(seed, num_layers=4):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16, dtype=torch.float64) for _ in range(num_layers)))


def digest(tensors):
    whole = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in whole)).hexdigest()[:16]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def train(x):
    loss = (m(x) - x).square().mean()
    loss.backward()
    o.step()
    o.zero_grad()
    return loss.item()
'''

_DDP = """
part = rank
def make():
    global m, o
    m = DistributedDataParallel(net(1), bucket_cap_mb=0.002)
    o = adam(m)
step = train
def state(): return digest(m.parameters())
"""
_FSDP2 = """
part = rank
def make():
    global m, o
    m = net(2)
    for layer in m:
        fully_shard(layer)
    fully_shard(m)
    o = adam(m)
step = train
def state(): return digest(m.parameters())
"""
_FSDP2_TP = """
part = mesh["dp"].get_local_rank()
def make():
    global m, o
    m = net(3)
    plan = {str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
    parallelize_module(m, mesh["tp"], plan)
    for layer in m:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(m, mesh=mesh["dp"])
    o = adam(m)
step = train
def state(): return digest(m.parameters())
"""
_PIPELINE = """
part = 0
def make():
    global m, o, schedule
    m = net(4 + rank, 1)
    o = adam(m)
    stage = PipelineStage(m, rank, world_size, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
def step(x):
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        schedule.step(target=x, losses=losses)
    else:
        schedule.step()
    o.step()
    o.zero_grad()
    return sum(float(loss) for loss in losses)
def state(): return digest(m.parameters())
"""
_ALL_REDUCE = """
part = rank
def make():
    global w, pending
    w, pending = torch.zeros(8, 16, dtype=torch.float64), None
def step(x):
    global w
    x = x.clone()
    handle = dist.all_reduce(x, async_op=True)
    total = torch.zeros(1, dtype=torch.float64)
    dist.all_reduce(total)
    handle.wait()
    w = 0.9 * w + x
    return total.item()
def state(): return digest([w])
"""


@dataclass(frozen=True)
class Loop:
    """A training loop: the source that makes it, and whether all ranks hold the same state."""

    name: str
    source: str
    is_replicated: bool = True
    num_workers: int = 0


LOOPS = (
    Loop("DDP", _DDP, num_workers=1),
    Loop("FSDP2", _FSDP2, is_replicated=False),
    Loop("FSDP2 x TP", _FSDP2_TP, is_replicated=False),
    Loop("1F1B", _PIPELINE, is_replicated=False),
    Loop("all_reduce", _ALL_REDUCE),
)

_RUN = """
for x in batches({num_workers}):
    loss = step(x)
    n += 1
    if n % 3 == rank:
        print(n, loss)
"""
_UNDISTURBED = """
make()
n, found = 0, {}
for x in batches():
    if n in wanted:
        found[n] = state()
    if n >= max(wanted):
        break
    step(x)
    n += 1
"""


@dataclass
class Stops:
    """The stops of one loop.

    Attributes:
        took_s: how long each took, in seconds.
        states: number of steps -> each rank's state, at each stop.
        notes: remarks that were shown with the stops.
    """

    took_s: list[float] = field(default_factory=list)
    states: dict[int, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def stop_often(
    mesh: cm.Mesh,
    loop: Loop,
    times: int,
    seed: int,
    stop: Callable[[cm.Mesh, cm.Run], None] = lambda mesh, run: mesh.interrupt(),
) -> Stops:
    """Stop a loop at random instants; check steps and replicas after each, and the whole against
    the same steps without a stop.
    """
    instants = random.Random(seed)
    # The first step imports much: it is made before.
    mesh.cell(_COMMON + loop.source + "\nmake()\nn = 0\nstep(Samples()[n])\nn = 1")
    stops = Stops()
    for _ in range(times):
        shown = Shown()
        before = max(mesh.pull("n").list)
        run = mesh.submit_cell(_RUN.format(num_workers=loop.num_workers), sink=shown)
        time.sleep(instants.uniform(0.02, 0.3))
        began_at = time.monotonic()
        stop(mesh, run)
        assert run.wait(20), f"{loop.name}: the stop did not end the run:\n{shown.texts[-20:]}"
        stops.took_s.append(time.monotonic() - began_at)
        try:
            run.result()
        except (KeyboardInterrupt, RanksInterrupted):
            pass
        else:
            raise AssertionError(f"{loop.name} ended by itself: {shown.texts[-20:]}")
        where = mesh.pull("n").list
        assert len(set(where)) == 1, f"{loop.name}: steps by rank {where}\n{shown.texts[-20:]}"
        states = mesh.pull("state()").list
        if loop.is_replicated:
            assert len(set(states)) == 1, f"{loop.name} at step {where[0]}: {states}"
        again = stops.states.setdefault(where[0], states)
        assert again == states, f"{loop.name}: a stopped step {where[0]} has changed parameters"
        assert where[0] >= before
        stops.notes += [text for text in shown.texts if "another point" in text]
    mesh.push(wanted=sorted(stops.states))
    mesh.cell(_UNDISTURBED)
    undisturbed = mesh.pull("found").list
    for num_steps, states in stops.states.items():
        expected = [of_rank[num_steps] for of_rank in undisturbed]
        assert states == expected, f"{loop.name} differs from the undisturbed one at {num_steps}"
    return stops


@contextmanager
def stopping_mesh() -> Iterator[cm.Mesh]:
    with cm.start(NUM_RANKS, mesh=DIMS, preload=PRELOAD) as mesh:
        yield mesh


def main(arguments: list[str]) -> int:
    """Stop each loop many times; print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loop", choices=[loop.name for loop in LOOPS])
    options = parser.parse_args(arguments)
    for loop in LOOPS:
        if options.loop in (None, loop.name):
            with stopping_mesh() as mesh:
                stops = stop_often(mesh, loop, options.times, options.seed)
            took = sorted(stops.took_s)
            late = took[min(len(took) - 1, int(0.95 * len(took)))]
            print(
                f"{loop.name}: {len(took)} stops equal, at {len(stops.states)} steps up to "
                f"{max(stops.states)}; median {statistics.median(took) * 1e3:.0f} ms, "
                f"95 % {late * 1e3:.0f} ms, longest {took[-1] * 1e3:.0f} ms; "
                f"{len(stops.notes)} not aligned",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
