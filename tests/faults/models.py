"""What runs on the ranks: three models, what the ranks keep, and places where a fault can
strike.
"""

from __future__ import annotations

NUM_RANKS = 4
DIMS = {"dp": 2, "tp": 2}
# Imported once for all ranks, also for those that replace dead ones.
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)

# A cell for all ranks. `reach` is called in the middle of forward and backward passes and of what
# else ranks do; `places` says what happens there, once.
SETUP = '''
import hashlib, os, pathlib, resource, signal, sys, threading, time
import faulthandler
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
places = {}


def reach(place):
    places.pop(place, lambda: None)()


def is_open():
    return os.path.exists(gate)


def wait_for_gate():
    while not is_open():
        time.sleep(0.005)


def arrive():
    pathlib.Path(f"{gate}.{rank}").touch()


class Meeting(torch.autograd.Function):
    """Lets a fault strike between two layers, on the way forward or back."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        reach(f"{name} forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        reach(f"{ctx.name} backward")
        return gradient, None


class Net(torch.nn.Module):
    def __init__(self, name, seed):
        super().__init__()
        self.name = name
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(4)
        )

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index == 2:
                x = Meeting.apply(x, self.name)
            x = torch.tanh(layer(x))
        return x


def make_ddp():
    # Small buckets: a backward pass is struck when some have been reduced and some have not.
    model = DistributedDataParallel(Net("ddp", 1), bucket_cap_mb=0.002)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_fsdp():
    model = Net("fsdp", 2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_tp():
    plan = {f"layers.{i}": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
    # Every rank makes the same weights and keeps its part: nothing is sent.
    return parallelize_module(Net("tp", 3), mesh["tp"], plan, src_data_rank=None)


def loss_of(model, step, part):
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(8, 16, dtype=torch.float64, generator=generator)
    return (model(x) - x).square().mean()


def train(model, optimizer, step):
    optimizer.zero_grad()
    loss = loss_of(model, step, rank)
    loss.backward()
    optimizer.step()
    return loss.item()


def ddp_step(step):
    loss = train(ddp, ddp_optimizer, step)
    return loss, digest(*ddp.parameters())


def fsdp_step(step):
    loss = train(fsdp, fsdp_optimizer, step)
    return loss, digest(*(parameter.to_local() for parameter in fsdp.parameters()))


def tp_forward(step):
    with torch.no_grad():
        return loss_of(tp, step, mesh["dp"].get_local_rank()).item()


def fsdp_state():
    model_state, optimizer_state = get_state_dict(fsdp, fsdp_optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save_fsdp(path):
    dcp.save(fsdp_state(), checkpoint_id=path)


def load_fsdp(path):
    state = fsdp_state()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        fsdp, fsdp_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def note_objects():
    """Remember which objects the names are."""
    for name in ("ddp", "ddp_optimizer", "fsdp", "fsdp_optimizer", "tp"):
        objects[name] = id(globals()[name])


def facts():
    return {
        "pid": os.getpid(),
        "rank": rank,
        "counter": kept["counter"],
        "owner": kept["owner"],
        "digest": digest(kept["tensor"]),
        "changed": [name for name, number in objects.items() if id(globals()[name]) != number],
    }


ddp, ddp_optimizer = make_ddp()
# DDP changes the order of its buckets, and so of its sums, before the second pass: let that end.
for _ in range(3):
    loss_of(ddp, 0, rank).backward()
fsdp, fsdp_optimizer = make_fsdp()
tp = make_tp()
objects = {}
note_objects()
kept = {
    "counter": 0,
    "owner": rank,
    "tensor": torch.rand(1000, generator=torch.Generator().manual_seed(rank)),
}
'''

# On a rank that is new and has been given what can be copied: what holds shards is made again.
SETUP_NEW = """
fsdp, fsdp_optimizer = make_fsdp()
tp = make_tp()
note_objects()
"""
