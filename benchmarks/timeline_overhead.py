"""What it costs that ranks note what they do, for the timeline.

``python -m benchmarks.timeline_overhead``: ranks on gloo, one thread each. A batch with notes and
one without take turns, in the same processes and over the same connections; what is judged is the
median of the pairs' ratios, in time and in the CPU time of a rank with gloo's threads. At the end,
what the notes of one operation cost by themselves, where the group does nothing; and, where it has
one member, those of an asynchronous one, whose end gloo's thread tells.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import cellmesh as cm
from benchmarks.machine import describe_machine

_PROGRAM = """
import statistics, time
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch._C._distributed_c10d import FakeWork

torch.set_num_threads(1)
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16)
    )
)
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(32, 256), torch.randn(32, 16)
small = torch.ones(1000)
group = dist.group.WORLD
spans = group._ledger.spans

def ddp():
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()

def all_reduce():
    dist.all_reduce(small)

def all_reduce_async():
    dist.all_reduce(small, async_op=True).wait()

class Nothing(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 1)
        self.done = FakeWork()
    def allreduce(self, *args):
        return self.done

def batch(function, num, is_on):
    spans.is_on = is_on
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(num):
        function()
    took = (time.perf_counter() - began) / num, (time.process_time() - cpu) / num
    spans.is_on = True
    return took

def pairs(function, num, num_pairs):
    batch(function, num, True)
    found = []
    for index in range(num_pairs):
        order = (True, False) if index % 2 else (False, True)
        taken = {is_on: batch(function, num, is_on) for is_on in order}
        found.append((taken[True], taken[False]))
    return found

def alone(num, is_on):
    spans.is_on = is_on
    began = time.thread_time()
    for _ in range(num):
        dist.all_reduce(small)
    taken = (time.thread_time() - began) / num
    spans.is_on = True
    return taken

def notes():
    nothing, kept = Nothing(), group._inner
    group._inner = nothing
    try:
        return statistics.median(alone(500, True) - alone(500, False) for _ in range(100))
    finally:
        group._inner = kept

solo, _ = dist.new_subgroups(1)

def alone_async(num, is_on):
    spans.is_on = is_on
    began = time.process_time()
    for _ in range(num):
        dist.all_reduce(small, group=solo, async_op=True).wait()
    taken = (time.process_time() - began) / num
    spans.is_on = True
    return taken

def notes_async():
    found = statistics.median(alone_async(200, True) - alone_async(200, False) for _ in range(100))
    dist.barrier()  # who is done first waits
    return found
"""
# Function, calls in a batch, pairs of batches.
_CASES = (("ddp", 5, 200), ("all_reduce", 20, 300), ("all_reduce_async", 20, 300))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tenth of the batches")
    given = parser.parse_args(arguments)
    print(", ".join(describe_machine().values()))
    print(f"{given.ranks} ranks; the ratios are with notes / without")
    print(f"{'':<18}{'without':>12}{'time':>10}{'middle half':>16}{'CPU time':>10}")
    with cm.start(given.ranks) as mesh:
        mesh.cell(_PROGRAM)
        for name, num, num_pairs in _CASES:
            num_pairs = max(4, num_pairs // 10) if given.quick else num_pairs
            found = mesh.pull(f"pairs({name}, {num}, {num_pairs})")[0]
            ratios = sorted(on[0] / off[0] for on, off in found)
            cpu = statistics.median(on[1] / off[1] for on, off in found)
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            without = statistics.median(off[0] for _, off in found)
            print(
                f"{name:<18}{without * 1e6:>9.0f} us{statistics.median(ratios):>9.3f} x"
                f"{f'{low:.3f}-{high:.3f}':>16}{cpu:>8.3f} x"
            )
        alone_s = mesh.pull("notes()")[0]
        async_s = mesh.pull("notes_async()")[0]
    print(f"CPU time of the notes of one operation: {alone_s * 1e6:.2f} us")
    print(f"of one whose end another thread tells: {async_s * 1e6:.2f} us")


if __name__ == "__main__":
    main()
