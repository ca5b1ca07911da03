"""In the form of picotron: a data-parallel class of the program's own, whose hooks of gradients
fill buckets and reduce them, and which waits in a callback at the end of the backward pass.
"""

import torch
import torch.distributed as dist
from torch import nn


class Bucket:
    def __init__(self, parameters):
        self.parameters, self.ready, self.work = set(parameters), set(), None
        self.data = torch.zeros(sum(parameter.numel() for parameter in parameters))
        self.views, start = {}, 0
        for parameter in parameters:
            self.views[parameter] = self.data[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def mark_ready(self, parameter):
        self.ready.add(parameter)
        if self.ready == self.parameters:
            self.data /= dist.get_world_size()
            self.work = dist.all_reduce(self.data, async_op=True)

    def finish(self):
        self.work.wait()
        self.reset()

    def reset(self):
        self.work = None
        self.ready.clear()


class DataParallelBucket(nn.Module):
    def __init__(self, module, per_bucket=2):
        super().__init__()
        self.module, self.is_queued = module, False
        parameters = list(module.parameters())[::-1]
        for parameter in parameters:
            dist.broadcast(parameter.data, 0)
        self.buckets = [
            Bucket(parameters[start : start + per_bucket])
            for start in range(0, len(parameters), per_bucket)
        ]
        self.bucket_of = {
            parameter: bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        self.accumulators = []
        for parameter in parameters:
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(self.make_hook(parameter))
            self.accumulators.append(accumulator)

    def forward(self, *inputs):
        return self.module(*inputs)

    def make_hook(self, parameter):
        def hook(*unused):
            bucket = self.bucket_of[parameter]
            bucket.views[parameter].copy_(parameter.grad)
            parameter.grad = None
            if not self.is_queued:
                self.is_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self.post_backward)
            bucket.mark_ready(parameter)

        return hook

    def post_backward(self):
        for bucket in self.buckets:
            bucket.finish()
            for parameter, view in bucket.views.items():
                parameter.grad = view.clone()
        self.is_queued = False

    def reset(self):
        for bucket in self.buckets:
            bucket.reset()
        self.is_queued = False


# %%
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DataParallelBucket(
    nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

# %% steps
losses = []
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(3, (6,)))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %%
parameters = list(model.parameters())
dist.destroy_process_group()
