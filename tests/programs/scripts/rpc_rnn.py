"""In the form of PyTorch's RPC tutorial: an RNN, its embedding and decoder on another worker."""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

losses: list[float] = []
parameters: list[torch.Tensor] = []


def _make(seed, kind, *args):
    torch.manual_seed(seed)
    return kind(*args)


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


def _parameter_rrefs(module):
    return [rpc.RRef(param) for param in module.parameters()]


def _values(module):
    return [param.detach() for param in module.parameters()]


class RNNModel(nn.Module):
    def __init__(self, ps, ntoken, ninp, nhid):
        super().__init__()
        self.emb_table_rref = rpc.remote(ps, _make, args=(1, nn.Embedding, ntoken, ninp))
        # It is made now: the decoder draws from one generator with it.
        _remote_method(_values, self.emb_table_rref)
        self.rnn = _make(3, nn.LSTM, ninp, nhid)
        self.decoder_rref = rpc.remote(ps, _make, args=(2, nn.Linear, nhid, ntoken))

    def forward(self, input, hidden):
        emb = _remote_method(nn.Embedding.forward, self.emb_table_rref, input)
        output, hidden = self.rnn(emb, hidden)
        return _remote_method(nn.Linear.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self):
        remote = [
            _remote_method(_parameter_rrefs, each)
            for each in (self.emb_table_rref, self.decoder_rref)
        ]
        return [*remote[0], *_parameter_rrefs(self.rnn), *remote[1]]


# %%
os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = os.environ["PROGRAM_PORT"]
rank = int(os.environ["RANK"])
rpc.init_rpc("trainer" if rank == 1 else "ps", rank=rank, world_size=2)
if rank == 1:
    model = RNNModel("ps", 10, 6, 4)
    opt = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.05)

# %% steps
if rank == 1:
    losses.clear()
    hidden = (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))
    for step in range(3):
        data = torch.arange(15).view(5, 3).add(step) % 10
        with dist_autograd.context() as context_id:
            hidden = tuple(each.detach() for each in hidden)
            output, hidden = model(data, hidden)
            loss = nn.functional.cross_entropy(output.flatten(0, 1), (data + 1).flatten() % 10)
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
        losses.append(loss.item())

# %%
if rank == 1:
    parameters += _remote_method(_values, model.emb_table_rref) + _values(model.rnn)
rpc.shutdown()
