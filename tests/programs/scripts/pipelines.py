"""In the form of PyTorch's pipelining tutorial: stages of a model, under every schedule."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

MICROBATCHES = 4
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def stage_indices(name, rank, size):
    if name in SINGLE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if name in V_SHAPED else [rank, rank + size]


def build(name, rank, size):
    indices = stage_indices(name, rank, size)
    num_stages = size if name in SINGLE else 2 * size
    stages = []
    for index in indices:
        torch.manual_seed(index)
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        stages.append(PipelineStage(module, index, num_stages, torch.device("cpu")))
    make = getattr(schedules, name)
    stage = stages[0] if name in SINGLE else stages
    schedule = make(stage, n_microbatches=MICROBATCHES, loss_fn=nn.MSELoss(), scale_grads=False)
    return (
        schedule,
        [stage.submod for stage in stages],
        {0} & set(indices),
        {num_stages - 1} & set(indices),
    )


# %%
dist.init_process_group("gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
pipelines = {
    name: build(name, rank, size)
    for name in (*SINGLE, *LOOPED, *V_SHAPED)
    if hasattr(schedules, name)
}
computed = {}

# %% steps
for name, (schedule, modules, is_first, is_last) in pipelines.items():
    if name in computed:
        continue
    found, grads = [], []
    for step in range(2):
        for module in modules:
            module.zero_grad()
        torch.manual_seed(step)
        x, target = torch.randn(8, 6), torch.randn(8, 6)
        args = (x,) if is_first else ()
        kwargs = {"target": target, "losses": found} if is_last else {}
        schedule.step(*args, **kwargs)
        grads += [p.grad.clone() for module in modules for p in module.parameters()]
    computed[name] = found, grads

# %%
losses = [loss.item() for found, _ in computed.values() for loss in found]
parameters = [grad for _, grads in computed.values() for grad in grads]
dist.destroy_process_group()
