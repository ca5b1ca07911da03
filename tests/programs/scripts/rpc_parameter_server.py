"""In the form of PyTorch's RPC tutorial: a parameter server, a trainer, distributed autograd,
optimizer.
"""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

losses: list[float] = []
parameters: list[torch.Tensor] = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.fc1 = nn.Conv2d(1, 2, 3), nn.Linear(2 * 4 * 4, 5)

    def forward(self, x):
        return torch.log_softmax(self.fc1(torch.relu(self.conv1(x)).flatten(1)), dim=1)


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def forward(self, inp):
        return self.model(inp)

    def get_dist_gradients(self, cid):
        return dict(dist_autograd.get_gradients(cid).items())

    def get_param_rrefs(self):
        return [rpc.RRef(param) for param in self.model.parameters()]

    def get_values(self):
        return [param.detach() for param in self.model.parameters()]


param_server = None


def get_parameter_server():
    global param_server
    if param_server is None:
        param_server = ParameterServer()
    return param_server


class TrainerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server)

    def get_global_param_rrefs(self):
        return remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, x):
        return remote_method(ParameterServer.forward, self.param_server_rref, x)


def run_training_loop(net, opt):
    losses.clear()
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        data, target = torch.randn(4, 1, 6, 6, generator=generator), torch.arange(4)
        with dist_autograd.context() as cid:
            loss = torch.nn.functional.nll_loss(net(data), target)
            dist_autograd.backward(cid, [loss])
            opt.step(cid)
            losses.append(loss.item())


# %%
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(
    "parameter_server" if rank == 0 else f"trainer_{rank}", rank=rank, world_size=world_size
)

# %% steps
if rank == 1:
    net = TrainerNet()
    opt = DistributedOptimizer(torch.optim.SGD, net.get_global_param_rrefs(), lr=0.03)
    run_training_loop(net, opt)
    parameters[:] = remote_method(ParameterServer.get_values, net.param_server_rref)

# %%
rpc.shutdown()
