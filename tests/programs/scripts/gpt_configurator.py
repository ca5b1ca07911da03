"""In the form of nanoGPT: settings are globals that a configurator overrides, gradients are
accumulated.
"""

import math
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CONFIGURATOR = """
import sys
from ast import literal_eval
for arg in sys.argv[1:]:
    assert arg.startswith('--'), arg
    key, val = arg.split('=')
    key = key[2:]
    if key not in globals():
        raise ValueError(f"Unknown config key: {key}")
    try:
        attempt = literal_eval(val)
    except (SyntaxError, ValueError):
        attempt = val
    assert type(attempt) is type(globals()[key])
    print(f"Overriding: {key} = {attempt}")
    globals()[key] = attempt
"""

# %%
out_dir = "out"
eval_interval = 2
gradient_accumulation_steps = 4
batch_size, block_size = 2, 8
n_layer, n_embd = 1, 8
learning_rate, min_lr, weight_decay = 6e-3, 6e-4, 1e-1
max_iters, warmup_iters, lr_decay_iters = 2, 1, 8
grad_clip = 1.0
config_keys = [
    k
    for k, v in globals().items()
    if not k.startswith("_") and isinstance(v, (int, float, bool, str))
]
exec(CONFIGURATOR)
config = {k: globals()[k] for k in config_keys if k in ("max_iters", "n_layer", "learning_rate")}

# %%
ddp = int(os.environ.get("RANK", -1)) != -1
init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, n_embd)
        self.h = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(n_embd), nn.Linear(n_embd, n_embd), nn.GELU())
            for _ in range(n_layer)
        )
        self.lm_head = nn.Linear(n_embd, 16, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, 16), targets.flatten())


def get_batch(step, micro_step):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + ddp_rank)
    data = torch.randint(16, (batch_size, block_size + 1), generator=generator)
    return data[:, :-1], data[:, 1:]


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


raw_model = MLP()
groups = [
    {"params": [p for p in raw_model.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
    {"params": [p for p in raw_model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
model = DDP(raw_model)
iter_num, losses = 0, []

# %% steps
while iter_num < max_iters:
    optimizer.zero_grad(set_to_none=True)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(*get_batch(iter_num, micro_step))
        scaler.scale(loss / gradient_accumulation_steps).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if iter_num % eval_interval == 0 and master_process:
        torch.save(
            {"model": raw_model.state_dict(), "config": config}, os.path.join(out_dir, "ckpt.pt")
        )
    iter_num += 1

# %%
parameters = list(raw_model.parameters())
destroy_process_group()
